//! The engine, one run at a time: preemption timeouts and accounting.

use std::os::fd::AsFd;
use std::sync::Arc;

use ipc::mem::Mapping;
use mdev_core::abi::host::{self, GpEntry};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::{copy, notifier, userd};
use mdev_core::gpu::{
    Backing, ChannelSpec, ClientSpec, EngineKind, MapRequest, Pending, Placement,
};
use mdev_core::ids::{ChannelId, GpuVa, SpaceId, VgpuId};
use mdev_core::units::MIB;

use super::engine_loop::PREEMPTION_GRACE_NS;
use super::*;
use crate::conformance::Pushbuffer;
use crate::mediator::emulation::channel::Readiness;
use crate::mediator::emulation::clock::now_ns;
use crate::mediator::emulation::vgpu::run::PollResult;
use crate::mediator::emulation::vgpu::{Vgpu, WorkerFds};
use crate::mediator::wire::STATUS_PENDING;
use crate::soft::SoftGpu;

const VRAM: u64 = 64 * MIB;
const USERD: u64 = 0x1000;
const PUSHBUFFER: u64 = 0x2000;

/// A vGPU with a guest that uses only video memory.
struct Guest {
    vgpu: Arc<Vgpu>,
    fds: WorkerFds,
    vram: Arc<Mapping>,
    channel: ChannelId,
}

impl Guest {
    fn new(vgpus: &VgpuList) -> Self {
        let spec = ClientSpec {
            vgpu: VgpuId::random(),
            vram_bytes: VRAM,
            framebuffer_bytes: 0,
            max_channels: 1,
            max_import_bytes: 0,
        };
        let gpu = Arc::new(SoftGpu::new("soft0", VRAM));
        let (vgpu, fds) = Vgpu::new(spec, gpu, vgpus.waker().clone()).unwrap();
        let vgpu = Arc::new(vgpu);
        vgpu.map(&MapRequest::new(GpuVa(VA_START), VRAM, Backing::Vram { offset: 0 })).unwrap();
        let channel = vgpu.create_channel(&ChannelSpec {
            engine: EngineKind::Copy,
            gpfifo: GpuVa(VA_START),
            gpfifo_entries: 2,
            userd: Backing::Vram { offset: USERD },
            vector: 0,
            space: SpaceId::DEFAULT,
            group: None,
            placement: Placement::default(),
            preamble: None,
        });
        vgpus.update(|list| list.push(Arc::clone(&vgpu)));
        let file = fds.vram.as_ref().unwrap().0.as_fd();
        let vram = Mapping::new(file, 0, VRAM, true).unwrap();
        Self { vgpu, fds, vram, channel: channel.unwrap().id }
    }

    /// Queues a copy that takes many runs.
    fn copy(&self) {
        let at = |offset: u64| VA_START + offset;
        let push = Pushbuffer::default().copy_method(host::SET_OBJECT, &[copy::CLASS]).copy(
            at(MIB),
            at(VRAM / 2),
            (VRAM / 4) as u32,
        );
        self.queue(push.words());
    }

    /// Queues `count` yields, each of which ends a run.
    fn yields(&self, count: usize) {
        let header = 1 << 29 | 1 << 16 | host::YIELD >> 2;
        self.queue(&[header, host::YIELD_TSG].repeat(count));
    }

    fn queue(&self, words: &[u32]) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.vram.write(PUSHBUFFER, &bytes).unwrap();
        let entry = GpEntry::Segment { va: VA_START + PUSHBUFFER, dwords: words.len() as u32 };
        self.vram.store_u64(0, entry.encode()).unwrap();
        self.vram.store_u32(USERD + userd::GP_PUT, 1).unwrap();
    }

    fn error(&self) -> u32 {
        self.vgpu.query_channel(self.channel).unwrap().error
    }

    fn pending(&self) -> Pending {
        let status = Mapping::new(self.fds.status.as_fd(), 0, 4096, true).unwrap();
        let bits = status.load_u32(STATUS_PENDING as u64).unwrap();
        Pending::from_bits_truncate(bits)
    }
}

/// Returns an engine that runs groups only when called, with `grace_ns` instead of
/// [`PREEMPTION_GRACE_NS`].
fn engine(vgpus: &Arc<VgpuList>, grace_ns: u64) -> EngineLoop {
    let mut engine = EngineLoop::new(Arc::clone(vgpus), Pace::CPU);
    engine.grace_ns = grace_ns;
    engine.refresh();
    engine.poll_all(now_ns());
    engine
}

#[test]
fn a_preemption_timeout_resets_one_channel_and_notifies_its_guest() {
    let vgpus = Arc::new(VgpuList::new().unwrap());
    let (hung, neighbour) = (Guest::new(&vgpus), Guest::new(&vgpus));
    hung.copy();
    neighbour.copy();
    // A chunk of a copy takes longer than 1 ns, which without grace is a preemption timeout.
    let mut engine = engine(&vgpus, 0);
    engine.run_group(0, 1, now_ns(), None);
    assert_eq!(hung.error(), notifier::CTXSW_TIMEOUT);
    assert_eq!(notifier::CTXSW_TIMEOUT, 109, "the code that drivers expect");
    assert!(hung.pending().contains(Pending::CHANNEL_ERROR), "the guest gets an interrupt");
    let usage = hung.vgpu.usage();
    assert_eq!((usage.hang_resets, usage.faults), (1, 1));
    assert_eq!(hung.vgpu.poll(now_ns(), false), PollResult::Polled(Readiness::Idle));

    engine.grace_ns = PREEMPTION_GRACE_NS;
    while neighbour.vgpu.usage().submissions == 0 {
        engine.run_group(1, Pace::CPU.max_run_ns, now_ns(), None);
    }
    assert_eq!((neighbour.error(), neighbour.pending()), (0, Pending::empty()));
    assert_eq!(neighbour.vgpu.usage().hang_resets, 0);
    let late = hung.vgpu.usage();
    assert_eq!((late.hang_resets, late.engine_ns), (1, usage.engine_ns), "reset only once");
}

#[test]
fn a_wait_lasts_from_the_loss_of_the_engine_until_the_next_run() {
    let vgpus = Arc::new(VgpuList::new().unwrap());
    let (first, second) = (Guest::new(&vgpus), Guest::new(&vgpus));
    first.copy();
    second.copy();
    let mut engine = engine(&vgpus, PREEMPTION_GRACE_NS);
    let mut run = |index| {
        engine.runlist.pick(now_ns());
        let start = now_ns();
        engine.run_group(index, 1, start, None);
        engine.poll_all(now_ns());
        start
    };
    let counted = || [&first, &second].map(|guest| guest.vgpu.waits().total());
    let ended = run(0);
    run(0);
    run(0);
    assert_eq!(counted(), [1, 0], "a run after another one of the same group ends no wait");
    let began = run(1);
    assert_eq!(counted(), [1, 1]);
    let longest = second.vgpu.waits().quantile(1.0).unwrap();
    assert!(longest >= began - ended, "it began with the first run of the other group");
    run(0);
    assert_eq!(counted(), [2, 1]);

    // A closed gate takes the engine away.
    first.vgpu.set_gate(false);
    engine.poll_all(now_ns());
    first.vgpu.set_gate(true);
    engine.poll_all(now_ns());
    engine.run_group(0, 1, now_ns(), None);
    assert_eq!(counted(), [3, 1]);
    assert_eq!(first.vgpu.usage().waits, first.vgpu.waits());
}

#[test]
fn work_for_an_idle_engine_hardly_waits() {
    let vgpus = Arc::new(VgpuList::new().unwrap());
    let (idle, guest) = (Guest::new(&vgpus), Guest::new(&vgpus));
    let mut engine = engine(&vgpus, PREEMPTION_GRACE_NS);
    guest.yields(1);
    let found = engine.poll_all(now_ns());
    engine.run_group(1, Pace::CPU.max_run_ns, found, None);
    assert_eq!((guest.vgpu.waits().total(), idle.vgpu.waits().total()), (1, 0));
    assert!(guest.vgpu.waits().quantile(1.0).unwrap() < 10_000);
}

#[test]
fn engine_time_is_counted_by_engine_and_adds_up() {
    let vgpus = Arc::new(VgpuList::new().unwrap());
    let guest = Guest::new(&vgpus);
    guest.copy();
    let mut engine = engine(&vgpus, PREEMPTION_GRACE_NS);
    while guest.vgpu.usage().submissions == 0 {
        engine.run_group(0, Pace::CPU.max_run_ns, now_ns(), None);
    }
    let usage = guest.vgpu.usage();
    assert_eq!((usage.copy_ns, usage.compute_ns, usage.host_ns()), (usage.engine_ns, 0, 0));
    // A run without work counts for neither engine.
    engine.run_group(0, Pace::CPU.max_run_ns, now_ns(), None);
    let usage = guest.vgpu.usage();
    assert!(usage.host_ns() > 0, "{usage:?}");
}

/// Beside a guest whose runs are as short as runs can be.
#[test]
fn the_whole_wall_clock_is_charged_while_there_is_work() {
    let vgpus = Arc::new(VgpuList::new().unwrap());
    let (yielding, neighbour, idle) = (Guest::new(&vgpus), Guest::new(&vgpus), Guest::new(&vgpus));
    yielding.yields(400_000);
    neighbour.copy();
    let mut engine = engine(&vgpus, PREEMPTION_GRACE_NS);
    let used = || [&yielding, &neighbour, &idle].map(|guest| guest.vgpu.usage());
    let charged = || used().map(|usage| usage.engine_ns + usage.stolen_ns).iter().sum::<u64>();
    let begun = engine.step(now_ns());
    let before = charged();
    let now = (0..2000).fold(begun, |now, _| engine.step(now));
    assert_eq!(charged() - before, now - begun, "{:?}", used());
}

#[test]
fn a_vgpu_that_held_the_engine_is_cut_off() {
    let vgpus = Arc::new(VgpuList::new().unwrap());
    let (holding, neighbour) = (Guest::new(&vgpus), Guest::new(&vgpus));
    holding.copy();
    let mut engine = engine(&vgpus, PREEMPTION_GRACE_NS);
    engine.pause(0, 600_000_000, now_ns());
    assert_eq!(holding.error(), notifier::IDLE_TIMEOUT);
    assert!(holding.pending().contains(Pending::CHANNEL_ERROR), "the guest gets an interrupt");
    assert!(engine.groups[0].paused_until_ns > now_ns() + 10_000_000_000);
    neighbour.copy();
    while neighbour.vgpu.usage().submissions == 0 {
        engine.step(now_ns());
    }
    assert_eq!((neighbour.error(), holding.vgpu.usage().submissions), (0, 0));
}

#[test]
fn a_group_in_which_the_engine_slept_is_paused() {
    let vgpus = Arc::new(VgpuList::new().unwrap());
    let (holding, neighbour) = (Guest::new(&vgpus), Guest::new(&vgpus));
    holding.copy();
    let mut engine = engine(&vgpus, PREEMPTION_GRACE_NS);
    engine.pause(0, 50_000_000, now_ns());
    let begun = now_ns();
    while now_ns() - begun < 5_000_000 {
        engine.step(now_ns());
    }
    // Not its engine time: a look at its ring may be charged on a busy machine.
    assert_eq!(holding.vgpu.usage().submissions, 0);
    neighbour.copy();
    while neighbour.vgpu.usage().submissions == 0 {
        engine.step(now_ns());
    }
    while holding.vgpu.usage().submissions == 0 {
        engine.step(now_ns());
    }
    assert!(now_ns() - begun >= 45_000_000, "the pause ends by itself");
}
