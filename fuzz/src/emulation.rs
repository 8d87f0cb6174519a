//! A channel of the emulated GPU whose address space has a writable range, a read-only range and
//! unmapped memory.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

use ipc::mem::{Mapping, SharedMemory};
use mdev_core::abi::host::{GpEntry, MethodHeader, SEM_ADDR_LO, SET_OBJECT, SecOp};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::{compute, copy, userd};
use mdev_core::gpu::{Backing, ChannelSpec, EngineKind, MapRequest, Placement};
use mdev_core::ids::{GpuVa, SpaceId, VgpuId};
use nix::sys::eventfd::EventFd;
use vendor_backends::mediator::emulation::address_space::AddressSpaces;
use vendor_backends::mediator::emulation::channel::{Channel, Userd};
use vendor_backends::mediator::emulation::clock::now_ns;
use vendor_backends::mediator::emulation::context::Context;
use vendor_backends::mediator::emulation::counters::Counters;
use vendor_backends::mediator::emulation::interrupts::Interrupts;
use vendor_backends::mediator::emulation::run_limit::RunLimit;
use vendor_backends::soft::SoftGpu;
use zerocopy::IntoBytes;

use crate::input::Input;

const BYTES: u64 = 0x4_0000;
/// Writable range.
pub const WRITABLE: Range<u64> = 0x1_0000..0x2_0000;
/// Read-only range.
const READ_ONLY: Range<u64> = 0x2_8000..0x2_a000;
/// Offset of the USERD, which is outside of the address space.
const USERD: u64 = 0x3_0000;
const RING: u64 = WRITABLE.start;
/// Offset of the QMD.
pub const QMD: u64 = WRITABLE.start + 0x1000;
/// Offset of the program.
pub const PROGRAM: u64 = WRITABLE.start + 0x2000;
/// Offset of the constants.
pub const CONSTANTS: u64 = WRITABLE.start + 0x3000;
const PUSHBUFFER: u64 = WRITABLE.start + 0x8000;
/// Contents of memory that the channel must not write.
const CANARY: u8 = 0xa5;
/// Duration of a run. An operation that takes longer is preempted.
const RUN_NS: u64 = 50_000;

/// Specification of the channel.
const SPEC: ChannelSpec = ChannelSpec {
    engine: EngineKind::Compute,
    gpfifo: GpuVa(va(RING)),
    gpfifo_entries: 16,
    userd: Backing::Vram { offset: USERD },
    vector: 0,
    space: SpaceId::DEFAULT,
    group: None,
    placement: Placement { copy_engine: None, second_runqueue: false },
    preamble: None,
};

/// Returns the GPU virtual address of an offset.
pub const fn va(offset: u64) -> u64 {
    VA_START + offset
}

/// Encodes a method with its data.
pub fn call(subchannel: u8, method: u32, data: &[u32]) -> Vec<u32> {
    let count = data.len() as u32;
    let mut words = vec![MethodHeader { op: SecOp::Inc, subchannel, method, count }.encode()];
    words.extend(data);
    words
}

/// Memory and its address space.
#[derive(Debug)]
pub struct Fixture {
    gpu: SoftGpu,
    memory: Arc<Mapping>,
    spaces: AddressSpaces,
    interrupts: Interrupts,
}

impl Default for Fixture {
    fn default() -> Self {
        let memory = SharedMemory::new(c"fuzz", BYTES).expect("memory").mapping;
        memory.write(0, &vec![CANARY; BYTES as usize]).expect("in range");
        let mut spaces = AddressSpaces::new(Some(Arc::clone(&memory)), 0);
        for (range, writable) in [(WRITABLE, true), (READ_ONLY, false)] {
            let backing = Backing::Vram { offset: range.start };
            let request = MapRequest::new(GpuVa(va(range.start)), range.end - range.start, backing);
            spaces.map(&MapRequest { writable, ..request }).expect("maps");
        }
        let status = SharedMemory::new(c"status", 4096).expect("memory").mapping;
        let event = EventFd::new().expect("an eventfd").into();
        let interrupts = Interrupts::new(status, event).expect("interrupts");
        Self { gpu: SoftGpu::new("soft0", BYTES), memory, spaces, interrupts }
    }
}

impl Fixture {
    /// Clears the memory that the channel may write.
    pub fn clear(&self) {
        self.put(WRITABLE.start, &[0; (WRITABLE.end - WRITABLE.start) as usize]);
        self.put(USERD, &[0; 512]);
    }

    /// Writes memory as a guest would.
    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write(at, bytes).expect("in range");
    }

    /// Runs a pushbuffer and then GPFIFO entries of the fuzzer's choice. Panics if protected memory
    /// has changed.
    pub fn run(&self, pushbuffer: &[u32], entries: &[u64], put: u32) {
        let mut words = call(1, SET_OBJECT, &[compute::CLASS]);
        words.extend(call(4, SET_OBJECT, &[copy::CLASS]));
        words.extend(pushbuffer);
        words.truncate(((WRITABLE.end - PUSHBUFFER) / 4) as usize);
        self.put(PUSHBUFFER, words.as_bytes());
        let first = GpEntry::Segment { va: va(PUSHBUFFER), dwords: words.len() as u32 };
        self.put(RING, first.encode().as_bytes());
        self.put(RING + 8, entries.as_bytes());
        let mut channel = Channel::new(SPEC, self.userd(), 0);
        self.memory.store_u32(USERD + userd::GP_PUT, put).expect("in range");
        self.drive(&mut channel, RUN_NS);
        self.check();
    }

    /// Restores a channel from a state and runs it. The state is any bytes, or that of a channel in
    /// the midst of its work with some bytes changed. Panics if protected memory has changed.
    pub fn run_restored(&self, input: &mut Input<'_>) {
        let state = if input.byte() & 3 == 0 {
            input.0.to_vec()
        } else {
            let mut state = self.busy_state(input.byte());
            for _ in 0..input.byte() % 8 {
                let at = usize::from(input.u32() as u16) % state.len();
                state[at] = input.byte();
            }
            state
        };
        let channel = Channel::restore(SPEC, self.userd(), &state, &self.gpu);
        if let Some(mut channel) = channel {
            self.memory.store_u32(USERD + userd::GP_PUT, 3).expect("in range");
            self.drive(&mut channel, RUN_NS);
        }
        self.check();
    }

    /// Returns the state of a channel in the midst of a copy, a fill, a rearranged copy or a wait.
    fn busy_state(&self, kind: u8) -> Vec<u8> {
        let upper = (va(0) >> 32) as u32;
        let (from, to) = (va(WRITABLE.start) as u32, va(WRITABLE.start + 0x4000) as u32);
        let mut words = call(4, SET_OBJECT, &[copy::CLASS]);
        if kind & 3 == 3 {
            words.extend(call(0, SEM_ADDR_LO, &[to, upper, 1, 0, 0]));
        } else {
            words.extend(call(4, copy::OFFSET_IN_UPPER, &[upper, from, upper, to]));
            words.extend(call(4, copy::PITCH_IN, &[0, 0, 0x3000, u32::MAX]));
            let two = 1 << copy::remap::NUM_DST_SHIFT | 1 << copy::remap::NUM_SRC_SHIFT;
            let elements = if kind & 1 == 0 { two | 1 } else { two | 0x64 };
            words.extend(call(4, copy::SET_REMAP_COMPONENTS, &[elements]));
            let remap = if kind & 3 == 2 { 0 } else { copy::launch::REMAP };
            let pitched = copy::launch::SRC_PITCH | copy::launch::DST_PITCH;
            let flags = pitched | remap | copy::launch::MULTI_LINE | 1;
            words.extend(call(4, copy::LAUNCH_DMA, &[flags]));
        }
        self.put(PUSHBUFFER, words.as_bytes());
        let first = GpEntry::Segment { va: va(PUSHBUFFER), dwords: words.len() as u32 };
        self.put(RING, first.encode().as_bytes());
        let mut channel = Channel::new(SPEC, self.userd(), 0);
        self.memory.store_u32(USERD + userd::GP_PUT, 1).expect("in range");
        self.drive(&mut channel, 0);
        channel.save().expect("a state")
    }

    fn userd(&self) -> Userd {
        Userd { mapping: Arc::clone(&self.memory), offset: USERD, memory: None }
    }

    fn drive(&self, channel: &mut Channel, run_ns: u64) {
        let (waiting, gate_open) = (AtomicU32::new(0), AtomicBool::new(true));
        // The second run continues an operation that was preempted.
        for _ in 0..2 {
            let end_ns = now_ns() + run_ns;
            let limit =
                RunLimit { end_ns, waiting_requests: &waiting, gate_open: &gate_open, turn: None };
            let interrupts = &self.interrupts;
            let cx = Context {
                hardware: &self.gpu,
                vgpu: VgpuId(uuid::Uuid::nil()),
                space: self.spaces.get(SpaceId::DEFAULT).expect("the default"),
                limit: &limit,
                interrupts,
                vector: 0,
            };
            if let Err(fault) = channel.run(cx, &Counters::default(), &mut None) {
                channel.fail(fault);
                assert_ne!(channel.status().error, 0, "a fault is reported");
                break;
            }
        }
    }

    fn check(&self) {
        let mut after = vec![0; BYTES as usize];
        self.memory.read(0, &mut after).expect("in range");
        for closed in [0..WRITABLE.start, WRITABLE.end..USERD, USERD + 512..BYTES] {
            let bytes = &after[closed.start as usize..closed.end as usize];
            if let Some(at) = bytes.iter().position(|byte| *byte != CANARY) {
                panic!("{:#x} was written", closed.start + at as u64);
            }
        }
    }
}
