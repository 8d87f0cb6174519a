//! A channel of the software silicon over memory of which it may write a part, read a part, and not see the rest.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

use mdev_core::abi::host::{GpEntry, MethodHeader, SET_OBJECT, SecOp};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::{compute, copy, userd};
use mdev_core::gpu::{Backing, ChannelSpec, EngineKind};
use mdev_core::ids::{GpuVa, VgpuId};
use nix::sys::eventfd::EventFd;
use vendor_backends::mediator::silicon::address_space::{AddressSpace, Slot};
use vendor_backends::mediator::silicon::channel::{Channel, Userd};
use vendor_backends::mediator::silicon::clock::{Turn, now_ns};
use vendor_backends::mediator::silicon::counters::Counters;
use vendor_backends::mediator::silicon::fault::Context;
use vendor_backends::mem::{Mapping, SharedMemory};
use vendor_backends::mediator::silicon::signals::Signals;
use vendor_backends::soft::SoftGpu;
use zerocopy::IntoBytes;

const BYTES: u64 = 0x4_0000;
/// May be written.
pub const OPEN: Range<u64> = 0x1_0000..0x2_0000;
/// May be read.
const READ_ONLY: Range<u64> = 0x2_8000..0x2_a000;
/// Not in the address space at all.
const USERD: u64 = 0x3_0000;
const RING: u64 = OPEN.start;
/// Where a QMD, a program and its constants may be put.
pub const QMD: u64 = OPEN.start + 0x1000;
/// See [`QMD`].
pub const PROGRAM: u64 = OPEN.start + 0x2000;
/// See [`QMD`].
pub const CONSTANTS: u64 = OPEN.start + 0x3000;
const PUSHBUFFER: u64 = OPEN.start + 0x8000;
/// What lies in memory that a channel may not write.
const CANARY: u8 = 0xa5;
/// A turn. An operation that is not done by then is preempted.
const TURN_NS: u64 = 50_000;

/// The GPU address of an offset.
pub const fn va(offset: u64) -> u64 {
    VA_START + offset
}

/// A method with its data, as words.
pub fn call(subchannel: u8, method: u32, data: &[u32]) -> Vec<u32> {
    let count = data.len() as u32;
    let mut words = vec![MethodHeader { op: SecOp::Inc, subchannel, method, count }.encode()];
    words.extend(data);
    words
}

/// Memory, and the address space over it.
#[derive(Debug)]
pub struct Bench {
    gpu: SoftGpu,
    memory: Arc<Mapping>,
    space: AddressSpace,
    signals: Signals,
}

impl Default for Bench {
    fn default() -> Self {
        let memory = SharedMemory::new(c"fuzz", BYTES).expect("memory").mapping;
        memory.write(0, &vec![CANARY; BYTES as usize]).expect("in range");
        let mut space = AddressSpace::new(Some(Arc::clone(&memory)), 0);
        for (range, writable) in [(OPEN, true), (READ_ONLY, false)] {
            let len = range.end - range.start;
            space
                .map(GpuVa(va(range.start)), len, Slot::VRAM, range.start, writable)
                .expect("maps");
        }
        let status = SharedMemory::new(c"status", 4096).expect("memory").mapping;
        let event = EventFd::new().expect("an eventfd").into();
        let signals = Signals::new(status, event).expect("signals");
        Self { gpu: SoftGpu::new("soft0", BYTES), memory, space, signals }
    }
}

impl Bench {
    /// Clears what a channel may write.
    pub fn clear(&self) {
        self.put(OPEN.start, &[0; (OPEN.end - OPEN.start) as usize]);
        self.put(USERD, &[0; 512]);
    }

    /// Writes memory as a guest would.
    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write(at, bytes).expect("in range");
    }

    /// Runs a pushbuffer and then some entries of the guest's choice; what must not change has not changed.
    pub fn run(&self, pushbuffer: &[u32], entries: &[u64], put: u32) {
        let mut words = call(1, SET_OBJECT, &[compute::CLASS]);
        words.extend(call(4, SET_OBJECT, &[copy::CLASS]));
        words.extend(pushbuffer);
        words.truncate(((OPEN.end - PUSHBUFFER) / 4) as usize);
        self.put(PUSHBUFFER, words.as_bytes());
        let first = GpEntry::Segment { va: va(PUSHBUFFER), dwords: words.len() as u32 };
        self.put(RING, first.encode().as_bytes());
        self.put(RING + 8, entries.as_bytes());
        let spec = ChannelSpec {
            engine: EngineKind::Compute,
            gpfifo: GpuVa(va(RING)),
            gpfifo_entries: 16,
            userd: Backing::Vram { offset: USERD },
            vector: 0,
        };
        let userd = Userd { mapping: Arc::clone(&self.memory), offset: USERD, memory: None };
        let mut channel = Channel::new(spec, userd, 0);
        self.memory.store_u32(USERD + userd::GP_PUT, put).expect("in range");
        let (waiting, gate_open) = (AtomicU32::new(0), AtomicBool::new(true));
        // Twice: an operation that was preempted goes on from where it was.
        for _ in 0..2 {
            let end_ns = now_ns() + TURN_NS;
            let turn = Turn { end_ns, waiting: &waiting, gate_open: &gate_open };
            let signals = &self.signals;
            let cx = Context {
                hardware: &self.gpu,
                vgpu: VgpuId(uuid::Uuid::nil()),
                space: &self.space,
                turn: &turn,
                signals,
                vector: 0,
            };
            if let Err(fault) = channel.run(cx, &Counters::default(), &mut None) {
                channel.fail(fault);
                assert_ne!(channel.status().error, 0, "a fault is told");
                break;
            }
        }
        self.check();
    }

    fn check(&self) {
        let mut after = vec![0; BYTES as usize];
        self.memory.read(0, &mut after).expect("in range");
        for closed in [0..OPEN.start, OPEN.end..USERD, USERD + 512..BYTES] {
            let bytes = &after[closed.start as usize..closed.end as usize];
            if let Some(at) = bytes.iter().position(|byte| *byte != CANARY) {
                panic!("{:#x} was written", closed.start + at as u64);
            }
        }
    }
}
