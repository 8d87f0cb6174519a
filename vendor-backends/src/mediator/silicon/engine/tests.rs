//! The engine, one turn at a time: what becomes of work that does not give it up.

use std::sync::Arc;

use mdev_core::abi::host::{self, GpEntry};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::{copy, notifier, userd};
use mdev_core::gpu::{Backing, ChannelSpec, ClientSpec, EngineKind, Pending};
use mdev_core::ids::{ChannelId, GpuVa, VgpuId};
use mdev_core::units::MIB;

use super::*;
use crate::conformance::Pushbuffer;
use crate::mediator::silicon::vgpu::Shared;
use crate::mediator::wire::STATUS_PENDING;
use crate::mem::Mapping;
use crate::soft::SoftGpu;

const VRAM: u64 = 64 * MIB;
const USERD: u64 = 0x1000;
const PUSHBUFFER: u64 = 0x2000;

/// A vGPU whose guest uses its video memory alone.
struct Guest {
    vgpu: Arc<Vgpu>,
    shared: Shared,
    vram: Arc<Mapping>,
    channel: ChannelId,
}

impl Guest {
    fn new(board: &Board) -> Self {
        let spec = ClientSpec {
            vgpu: VgpuId::random(),
            vram_bytes: VRAM,
            framebuffer_bytes: 0,
            max_channels: 1,
            max_import_bytes: 0,
        };
        let gpu = Arc::new(SoftGpu::new("soft0", VRAM));
        let (vgpu, shared) = Vgpu::new(spec, gpu, board.kick()).unwrap();
        let vgpu = Arc::new(vgpu);
        vgpu.map(GpuVa(VA_START), VRAM, Backing::Vram { offset: 0 }, true).unwrap();
        let channel = vgpu.create_channel(&ChannelSpec {
            engine: EngineKind::Copy,
            gpfifo: GpuVa(VA_START),
            gpfifo_entries: 2,
            userd: Backing::Vram { offset: USERD },
            vector: 0,
        });
        board.update(|vgpus| vgpus.push(Arc::clone(&vgpu)));
        let file = shared.vram.as_ref().unwrap().0.as_fd();
        let vram = Mapping::new(file, 0, VRAM, true).unwrap();
        Self { vgpu, shared, vram, channel: channel.unwrap().id }
    }

    /// Queues a copy that takes many turns.
    fn copy(&self) {
        let at = |offset: u64| VA_START + offset;
        let push = Pushbuffer::default().copy_method(host::SET_OBJECT, &[copy::CLASS]).copy(
            at(MIB),
            at(VRAM / 2),
            (VRAM / 4) as u32,
        );
        let bytes: Vec<u8> = push.words().iter().flat_map(|word| word.to_le_bytes()).collect();
        self.vram.write(PUSHBUFFER, &bytes).unwrap();
        let dwords = push.words().len() as u32;
        let entry = GpEntry::Segment { va: at(PUSHBUFFER), dwords };
        self.vram.store_u64(0, entry.encode()).unwrap();
        self.vram.store_u32(USERD + userd::GP_PUT, 1).unwrap();
    }

    fn error(&self) -> u32 {
        self.vgpu.query_channel(self.channel).unwrap().error
    }

    fn pending(&self) -> Pending {
        let status = Mapping::new(self.shared.status.as_fd(), 0, 4096, true).unwrap();
        let bits = status.load_u32(STATUS_PENDING as u64).unwrap();
        Pending::from_bits_truncate(bits)
    }
}

/// An engine that makes turns when it is told to, and bears so much beyond their end.
fn engine(board: &Arc<Board>, grace_ns: u64) -> State {
    let mut state = State::new(Arc::clone(board), Pace::CPU);
    state.grace_ns = grace_ns;
    state.refresh();
    state.look_at_all(now_ns());
    state
}

#[test]
fn what_does_not_give_up_the_engine_is_reset_alone_and_its_guest_is_told() {
    let board = Arc::new(Board::new().unwrap());
    let (hung, neighbour) = (Guest::new(&board), Guest::new(&board));
    hung.copy();
    neighbour.copy();
    // A piece of a copy takes longer than a turn of a nanosecond: with no grace that is a preemption not obeyed.
    let mut state = engine(&board, 0);
    state.turn(0, 1);
    assert_eq!(hung.error(), notifier::CTXSW_TIMEOUT);
    assert_eq!(notifier::CTXSW_TIMEOUT, 109, "the code that drivers know");
    assert!(hung.pending().contains(Pending::CHANNEL_ERROR), "an interrupt tells the guest");
    let usage = hung.vgpu.usage();
    assert_eq!((usage.hang_resets, usage.faults), (1, 1));
    assert_eq!(hung.vgpu.glance(now_ns(), false), Glance::Seen(Readiness::Idle));

    state.grace_ns = PREEMPTION_GRACE_NS;
    while neighbour.vgpu.usage().submissions == 0 {
        state.turn(1, Pace::CPU.turn_ns);
    }
    assert_eq!((neighbour.error(), neighbour.pending()), (0, Pending::empty()));
    assert_eq!(neighbour.vgpu.usage().hang_resets, 0);
    let late = hung.vgpu.usage();
    assert_eq!((late.hang_resets, late.engine_ns), (1, usage.engine_ns), "and it is told once");
}

#[test]
fn engine_time_is_told_apart_by_engine_and_adds_up() {
    let board = Arc::new(Board::new().unwrap());
    let guest = Guest::new(&board);
    guest.copy();
    let mut state = engine(&board, PREEMPTION_GRACE_NS);
    while guest.vgpu.usage().submissions == 0 {
        state.turn(0, Pace::CPU.turn_ns);
    }
    let usage = guest.vgpu.usage();
    assert_eq!((usage.copy_ns, usage.compute_ns, usage.host_ns()), (usage.engine_ns, 0, 0));
    // Turns in which there is nothing to do are for neither.
    state.turn(0, Pace::CPU.turn_ns);
    let usage = guest.vgpu.usage();
    assert!(usage.host_ns() > 0, "{usage:?}");
}
