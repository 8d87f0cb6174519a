//! All attacks of `cargo lab attack`, by who makes them.

use super::Attack;

/// All attacks: those of a VM or its process, of a program, of a taken-over process of Tessera, of
/// other users of the host.
pub(super) const ATTACKS: &[Attack] = &[
    Attack {
        name: "held-memory",
        what: "a tenant makes mmap, page faults and closes of its memory wait, to hold other \
               tenants, starts or the manager",
        tests: &[
            "system-tests/security/held_memory",
            "system-tests/shares/engine_time::guest_whose_memory",
            "system-tests/shares/engine_time::time_in_page_faults",
            "vendor-backends/sleeping_engine",
        ],
    },
    Attack {
        name: "truncated-memory",
        what: "a tenant truncates or punches its memory under the worker and the GPU",
        tests: &["system-tests/security/memory", "system-tests/security/abuse::truncated"],
    },
    Attack {
        name: "first-touch",
        what: "a tenant has the GPU fill sparse files, to use up the host's memory",
        tests: &[
            "system-tests/shares/engine_time::the_gpu_does_not_fill",
            "system-tests/shares/engine_time::page_tables",
            "vendor-backends/vendor_backends/mediator::emulation::address_space::first_touch",
        ],
    },
    Attack {
        name: "engine-time",
        what: "a tenant yields, rings and submits in ways that are to give it more of the engine",
        tests: &[
            "system-tests/shares/engine_time::giving_the_engine_back",
            "system-tests/security/doorbells",
            "system-tests/shares/limits",
            "vendor-backends/nvidia/hostile_guest",
            "vendor-backends/nvidia/teardown",
            "vendor-backends/nvidia/faults",
        ],
    },
    Attack {
        name: "looking-brief",
        what: "a tenant of an NVIDIA GPU looks as if it worked briefly, to run before others",
        tests: &["mdev-core/mdev_core/sched::sim::tests::brief::looking_brief"],
    },
    Attack {
        name: "waiting-closes",
        what: "a VM's process, a program or a taken-over worker passes descriptors whose close waits",
        tests: &[
            "system-tests/security/lingering",
            "system-tests/security/descriptors",
            "system-tests/security/waiting",
            "vgpud/vgpud/foreign_stream",
            "vgpud/vgpud/api::file_receiver",
        ],
    },
    Attack {
        name: "messages",
        what: "a VM's process sends messages of any shape, stalls, floods and reconnects",
        tests: &["system-tests/security/abuse", "system-tests/protocol"],
    },
    Attack {
        name: "program-requests",
        what: "a program makes malformed requests, or asks for what is another program's",
        tests: &["vendor-backends/frontend", "vendor-backends/control_queue"],
    },
    Attack {
        name: "program-descriptors",
        what: "a program uses up the descriptors and threads of its worker",
        tests: &["system-tests/cuda/descriptors", "vendor-backends/frontend/descriptors"],
    },
    Attack {
        name: "share-policies",
        what: "a program takes memory that another has not shared with it, or no longer shares",
        tests: &[
            "vendor-backends/frontend/sharing",
            "vendor-backends/control_queue/programs_of_different_users",
        ],
    },
    Attack {
        name: "guest-module",
        what: "a program in a VM withholds memory from the guest's module while the vGPU goes away",
        tests: &["system-tests/guest_driver/unbinding"],
    },
    Attack {
        name: "foreign-text",
        what: "names, command lines and answers without an end, or with control characters",
        tests: &[
            "mdev-core/mdev_core/untrusted",
            "vgpud/vgpud/console::qmp_input",
            "vgpud/vgpud/service::attached_vm",
            "vgpud/vgpud/worker_client",
            "vgpuctl/vgpuctl/commands::vm_state",
            "vgpu-guest/vgpu_guest/checkpoint::tests::a_name_forges",
            "host-inventory/host_inventory/finding",
        ],
    },
    Attack {
        name: "logs",
        what: "requests that fail, VMs that reconnect and processes that were taken over, to flood \
               the log or to forge lines of others",
        tests: &["system-tests/security/logs", "vgpud/vgpud/child_logs"],
    },
    Attack {
        name: "previous-client",
        what: "a VM reads what the one before it left, or keeps what the next one uses",
        tests: &["system-tests/security/previous_client"],
    },
    Attack {
        name: "taken-over-context",
        what: "a context process says anything to the process that gives turns on the engine",
        tests: &["vendor-backends/vendor_backends/mediator::arbiter"],
    },
    Attack {
        name: "taken-over-worker",
        what: "a worker calls the kernel, signals, opens files, lies to the manager, dies for ever",
        tests: &[
            "system-tests/security/sandbox",
            "system-tests/security/system_calls",
            "system-tests/security/taken_over",
            "system-tests/security/worker_users",
            "system-tests/security/cgroups",
            "vendor-backends/nvidia/hostile_worker",
            "vgpud/vgpud/anchor::restarts",
            "vgpud/vgpud/service::worker_statuses",
        ],
    },
    Attack {
        name: "lost-processes",
        what: "the manager, a worker or a GPU process has no descriptors left",
        tests: &["system-tests/security/lost", "system-tests/security/abuse::a_worker_out_of"],
    },
    Attack {
        name: "other-users",
        what: "users of the host reach a vGPU that is not theirs, use up connections, or send \
               requests without end",
        tests: &[
            "system-tests/security/access",
            "system-tests/security/listeners",
            "vgpud/vgpud/api::listener",
            "vgpud/vgpud/http_server",
        ],
    },
];
