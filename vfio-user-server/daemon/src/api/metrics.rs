//! `/metrics`: the statistics in Prometheus' text format, version 0.0.4.
//!
//! Each metric is one row: name, help, and value in base units (seconds, bytes, ratios). Names
//! follow Prometheus' conventions: counters end in `_total`, and the unit is part of the name.

use prometheus::core::Collector;
use prometheus::{CounterVec, Encoder, GaugeVec, Opts, Registry, TextEncoder};

use vgpud_api::{ParentStats, Stats, Version, VgpuState, VgpuStats};

/// Content type of [`text`].
pub const CONTENT_TYPE: &str = prometheus::TEXT_FORMAT;

/// Metric of `T`: name, help and value.
type Row<T> = (&'static str, &'static str, fn(&T) -> f64);

const NS: f64 = 1e-9;

const PARENT_GAUGES: &[Row<ParentStats>] = &[
    ("tessera_parent_up", "1 while the physical GPU accepts vGPUs.", |p| {
        f64::from(u8::from(p.ready))
    }),
    (
        "tessera_parent_engine_busy_ratio",
        "Busy time of the engine over the last second or so, as a ratio.",
        |p| p.busy / 100.0,
    ),
    ("tessera_parent_video_memory_bytes", "Video memory available to vGPUs in total.", |p| {
        p.vram_bytes as f64
    }),
    (
        "tessera_parent_video_memory_free_bytes",
        "Video memory that no running vGPU occupies.",
        |p| p.vram_free_bytes as f64,
    ),
];

const VGPU_GAUGES: &[Row<VgpuStats>] = &[
    ("tessera_vgpu_running", "1 while a VM is attached or can attach.", |v| {
        f64::from(u8::from(v.state == VgpuState::Running))
    }),
    ("tessera_vgpu_attached", "1 while a VM is attached.", |v| {
        f64::from(u8::from(v.vm_pid.is_some()))
    }),
    ("tessera_vgpu_processes", "Processes of CUDA programs that use the vGPU.", |v| {
        v.programs.as_ref().map_or(0.0, |programs| programs.processes.len() as f64)
    }),
    ("tessera_vgpu_runnable", "1 while the vGPU has work.", |v| f64::from(u8::from(v.runnable))),
    ("tessera_vgpu_share_ratio", "Share of the GPU's time used over the last second or so.", |v| {
        v.share_measured / 100.0
    }),
    (
        "tessera_vgpu_share_entitled_ratio",
        "Entitled share of the GPU's time while all other vGPUs are busy.",
        |v| v.share_entitled / 100.0,
    ),
    ("tessera_vgpu_share_cap_ratio", "Upper limit of the share of the GPU's time.", |v| {
        v.share_cap / 100.0
    }),
    ("tessera_vgpu_timeslice_seconds", "Time slice.", |v| v.timeslice_us as f64 * 1e-6),
    ("tessera_vgpu_video_memory_bytes", "Video memory of the vGPU.", |v| v.vram_bytes as f64),
    ("tessera_vgpu_imported_memory_bytes", "Guest memory imported.", |v| v.imported_bytes as f64),
    ("tessera_vgpu_imported_memory_limit_bytes", "Limit of imported guest memory.", |v| {
        v.limits.imported_bytes as f64
    }),
    ("tessera_vgpu_channels", "Existing channels.", |v| f64::from(v.channels)),
    ("tessera_vgpu_channels_limit", "Limit of channels.", |v| f64::from(v.limits.channels)),
];

const VGPU_COUNTERS: &[Row<VgpuStats>] = &[
    ("tessera_vgpu_wait_seconds_total", "Time spent runnable and waiting for the engine.", |v| {
        v.wait_ns as f64 * NS
    }),
    ("tessera_vgpu_gated_seconds_total", "Part of the waiting time that the cap caused.", |v| {
        v.gated_ns as f64 * NS
    }),
    ("tessera_vgpu_gate_closings_total", "Number of times that the cap closed the gate.", |v| {
        v.gate_closings as f64
    }),
    (
        "tessera_vgpu_gate_cost_seconds_total",
        "Engine time used after the gate closed, until the vGPU released the engine.",
        |v| v.gate_cost_ns as f64 * NS,
    ),
    ("tessera_vgpu_submissions_total", "Completed GPFIFO entries.", |v| v.submissions as f64),
    (
        "tessera_vgpu_throttled_submissions_total",
        "Submissions delayed by the limit of submissions per second.",
        |v| v.throttled as f64,
    ),
    (
        "tessera_vgpu_polled_doorbells_total",
        "Doorbells received by polling, without a VM exit.",
        |v| v.polled_doorbells as f64,
    ),
    ("tessera_vgpu_wakeups_total", "Wake-ups that required a trapped write.", |v| v.wakeups as f64),
    (
        "tessera_vgpu_preemptions_total",
        "Number of times that the vGPU was switched out with work left.",
        |v| v.preemptions as f64,
    ),
    ("tessera_vgpu_slice_overruns_total", "Time slices that ended late.", |v| {
        v.slice_overruns as f64
    }),
    ("tessera_vgpu_overrun_seconds_total", "Total delay of late time slices.", |v| {
        v.overrun_ns as f64 * NS
    }),
    (
        "tessera_vgpu_stolen_seconds_total",
        "Part of the time slices in which the host ran other work; not charged to any vGPU.",
        |v| v.stolen_ns as f64 * NS,
    ),
    ("tessera_vgpu_faults_total", "Channel faults, including hangs.", |v| v.faults as f64),
    ("tessera_vgpu_hang_resets_total", "Channels reset because of a hang.", |v| {
        v.hang_resets as f64
    }),
];

/// Engine time by the label `engine`; the sum is the total engine time.
const ENGINE: &str = "tessera_vgpu_engine_seconds_total";

/// Trapped accesses by the label `kind`.
const TRAPS: &str = "tessera_vgpu_traps_total";

/// Video memory in use, of vGPUs that CUDA programs use, and of each process.
const USED: &str = "tessera_vgpu_video_memory_used_bytes";
const USED_BY_PROCESS: &str = "tessera_vgpu_process_video_memory_bytes";

/// Returns the statistics in Prometheus' text format.
pub fn text(stats: &Stats, version: &Version) -> prometheus::Result<String> {
    let registry = Registry::new();
    let build = gauge("tessera_build_info", "Version of vgpud; always 1.", &["version"])?;
    build.with_label_values(&[&version.version]).set(1.0);
    add(&registry, build)?;
    for (name, help, value) in PARENT_GAUGES {
        let family = gauge(name, help, &["parent"])?;
        for parent in &stats.parents {
            family.with_label_values(&[&parent.parent]).set(value(parent));
        }
        add(&registry, family)?;
    }
    vgpus(&registry, &stats.vgpus)?;
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text)?;
    // The encoder writes UTF-8.
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn vgpus(registry: &Registry, vgpus: &[VgpuStats]) -> prometheus::Result<()> {
    let names: Vec<_> = vgpus.iter().map(|vgpu| vgpu.uuid.to_string()).collect();
    let all = || names.iter().zip(vgpus);
    let info = gauge(
        "tessera_vgpu_info",
        "Parent and type of a vGPU; always 1.",
        &["vgpu", "parent", "type"],
    )?;
    let asked = gauge("tessera_vgpu_share_asked_ratio", "Requested share of the GPU.", &["vgpu"])?;
    let traps = counter(TRAPS, "Trapped accesses of the attached VM.", &["vgpu", "kind"])?;
    let engine = counter(ENGINE, "Engine time used, by engine.", &["vgpu", "engine"])?;
    for (name, vgpu) in all() {
        let times = vgpu.engines;
        for (kind, ns) in
            [("copy", times.copy_ns), ("compute", times.compute_ns), ("host", times.host_ns)]
        {
            engine.with_label_values(&[name.as_str(), kind]).inc_by(ns as f64 * NS);
        }
        info.with_label_values(&[name, &vgpu.parent, &vgpu.mdev_type]).set(1.0);
        if let Some(core) = vgpu.share_asked {
            asked.with_label_values(&[name]).set(f64::from(core) / 100.0);
        }
        let kinds = vgpu.traps;
        for (kind, count) in [
            ("config", kinds.config),
            ("display", kinds.display),
            ("control", kinds.control),
            ("mailbox", kinds.mailbox),
            ("doorbell", kinds.doorbell),
            ("memory", kinds.memory),
        ] {
            traps.with_label_values(&[name.as_str(), kind]).inc_by(count as f64);
        }
    }
    programs(registry, vgpus)?;
    add(registry, info)?;
    add(registry, asked)?;
    add(registry, traps)?;
    add(registry, engine)?;
    for (metric, help, value) in VGPU_GAUGES {
        let family = gauge(metric, help, &["vgpu"])?;
        all().for_each(|(name, vgpu)| family.with_label_values(&[name]).set(value(vgpu)));
        add(registry, family)?;
    }
    for (metric, help, value) in VGPU_COUNTERS {
        let family = counter(metric, help, &["vgpu"])?;
        all().for_each(|(name, vgpu)| family.with_label_values(&[name]).inc_by(value(vgpu)));
        add(registry, family)?;
    }
    Ok(())
}

/// Adds the memory of CUDA programs.
fn programs(registry: &Registry, vgpus: &[VgpuStats]) -> prometheus::Result<()> {
    let used = gauge(USED, "Video memory that CUDA programs have allocated.", &["vgpu"])?;
    let help = "Video memory that a process of a CUDA program can use.";
    let by_process = gauge(USED_BY_PROCESS, help, &["vgpu", "process", "name"])?;
    for vgpu in vgpus {
        let Some(programs) = &vgpu.programs else { continue };
        let name = vgpu.uuid.to_string();
        used.with_label_values(&[&name]).set(programs.vram_used_bytes as f64);
        for process in &programs.processes {
            let labels = [name.as_str(), &process.pid.to_string(), &process.name];
            by_process.with_label_values(&labels).set(process.vram_used_bytes as f64);
        }
    }
    add(registry, used)?;
    add(registry, by_process)
}

fn gauge(name: &str, help: &str, labels: &[&str]) -> prometheus::Result<GaugeVec> {
    GaugeVec::new(Opts::new(name, help), labels)
}

fn counter(name: &str, help: &str, labels: &[&str]) -> prometheus::Result<CounterVec> {
    CounterVec::new(Opts::new(name, help), labels)
}

fn add(registry: &Registry, family: impl Collector + 'static) -> prometheus::Result<()> {
    registry.register(Box::new(family))
}
