//! Driver of a guest that names preambles and counts executed entries.

use std::time::{Duration, Instant};

use ipc::mem::SharedMemory;
use mdev_core::abi::compute::{
    self, SEND_PCAS_A, SEND_SIGNALING_PCAS2_B, SET_SHADER_LOCAL_MEMORY_WINDOW_A,
    SET_SHADER_SHARED_MEMORY_WINDOW_A,
};
use mdev_core::abi::copy::{self, LAUNCH_DMA, LINE_LENGTH_IN, OFFSET_IN_UPPER, launch};
use mdev_core::abi::host::{
    GpEntry, MethodHeader, SEM_ADDR_LO, SET_OBJECT, SUBCHANNEL_COMPUTE, SUBCHANNEL_COPY, SecOp, sem,
};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::userd;
use mdev_core::gpu::{
    Backing, ChannelSpec, Client, EngineKind, GpuError, MapRequest, Placement, Preamble,
    SavedClient,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token};
use mdev_core::units::{GIB, KIB, MIB};
use vendor_backends::conformance::lifecycle;
use vendor_backends::nvidia::NvidiaClient;

/// Entries of a ring.
pub const ENTRIES: u32 = 64;
/// Memory of a channel in guest memory, and offsets in it.
const CHANNEL_BYTES: u64 = 64 * KIB;
const USERD: u64 = 0x1000;
const PREAMBLE: u64 = 0x2000;
const SLOTS: u64 = 0x3000;
const SLOT_BYTES: u64 = 256;
/// Launch descriptor of the kernel, beyond the channels.
const DESCRIPTOR: u64 = 512 * KIB;
/// Source of copies.
pub const SOURCE: u64 = 520 * KIB;
/// Start of the mapping of video memory, of which the start counts kernels, and its length.
pub const VRAM_VA: u64 = VA_START + GIB;
pub const VRAM_BYTES: u64 = 4 * MIB;
/// Destination of copies in video memory.
pub const DESTINATION: u64 = MIB;
/// Offset of that mapping in video memory.
pub const VRAM_OFFSET: u64 = 2 * MIB;

/// Guest memory and what its driver knows.
#[derive(Debug)]
pub struct Guest {
    pub ram: SharedMemory,
    pub channels: Vec<Channel>,
}

/// Channel as its driver knows it.
#[derive(Clone, Copy, Debug)]
pub struct Channel {
    pub id: ChannelId,
    pub token: Token,
    base: u64,
    submitted: u32,
}

fn method(subchannel: u8, method: u32, data: &[u32]) -> Vec<u32> {
    let count = data.len() as u32;
    let header = MethodHeader { op: SecOp::Inc, subchannel, method, count }.encode();
    [&[header], data].concat()
}

fn halves(va: u64) -> [u32; 2] {
    [(va >> 32) as u32, va as u32]
}

impl Guest {
    /// Maps memory and makes a channel for each engine.
    pub fn new(client: &mut NvidiaClient, engines: &[EngineKind]) -> Self {
        let ram = SharedMemory::new(c"ram", MIB).unwrap();
        let memory = map(client, &ram);
        let mut guest = Self { ram, channels: Vec::new() };
        let mapping = &guest.ram.mapping;
        mapping.store_u64(DESCRIPTOR, VRAM_VA).unwrap();
        for at in (0..64 * KIB).step_by(8) {
            mapping.store_u64(SOURCE + at, at.wrapping_mul(0x9e37_79b9_7f4a_7c15) + 1).unwrap();
        }
        for engine in engines {
            guest.create(client, memory, *engine);
        }
        guest
    }

    pub fn create(&mut self, client: &mut NvidiaClient, memory: MemoryId, engine: EngineKind) {
        let base = self.channels.len() as u64 * CHANNEL_BYTES;
        let mut words = Vec::new();
        if engine == EngineKind::Compute {
            words.extend(method(SUBCHANNEL_COMPUTE, SET_OBJECT, &[compute::CLASS]));
            for window in [SET_SHADER_SHARED_MEMORY_WINDOW_A, SET_SHADER_LOCAL_MEMORY_WINDOW_A] {
                words.extend(method(SUBCHANNEL_COMPUTE, window, &halves(0x7293_0000_0000)));
            }
        }
        words.extend(method(SUBCHANNEL_COPY, SET_OBJECT, &[copy::CLASS]));
        for (number, word) in (0..).zip(&words) {
            self.ram.mapping.store_u32(base + PREAMBLE + number * 4, *word).unwrap();
        }
        let preamble = Preamble::new(GpuVa(VA_START + base + PREAMBLE), words.len() as u32);
        let spec = ChannelSpec { preamble, ..spec(engine, memory, base) };
        let made = client.create_channel(&spec).unwrap();
        let channel = Channel { id: made.id, token: made.token, base, submitted: 0 };
        self.channels.push(channel);
        self.submit(self.channels.len() - 1, words);
    }

    /// Queues methods, and the release that counts them.
    pub fn submit(&mut self, channel: usize, mut words: Vec<u32>) {
        let Channel { base, submitted, .. } = self.channels[channel];
        let started = Instant::now();
        while submitted.wrapping_sub(self.progress(channel)) >= ENTRIES - 1 {
            assert!(started.elapsed() < Duration::from_secs(20), "room in the ring");
            std::thread::sleep(Duration::from_micros(50));
        }
        let number = submitted + 1;
        let counter = VA_START + base + USERD + userd::PROGRESS;
        let release = [counter as u32, (counter >> 32) as u32, number, 0, sem::RELEASE];
        words.extend(method(0, SEM_ADDR_LO, &release));
        let index = submitted % ENTRIES;
        let slot = base + SLOTS + u64::from(index) * SLOT_BYTES;
        for (number, word) in (0..).zip(&words) {
            self.ram.mapping.store_u32(slot + number * 4, *word).unwrap();
        }
        let entry = GpEntry::Segment { va: VA_START + slot, dwords: words.len() as u32 };
        let mapping = &self.ram.mapping;
        mapping.store_u64(base + u64::from(index) * 8, entry.encode()).unwrap();
        mapping.store_u32(base + USERD + userd::GP_PUT, number % ENTRIES).unwrap();
        self.channels[channel].submitted = number;
    }

    /// Queues kernels.
    pub fn launch(&mut self, channel: usize, count: u32) {
        for _ in 0..count {
            let descriptor = ((VA_START + DESCRIPTOR) >> 8) as u32;
            let mut words = method(SUBCHANNEL_COMPUTE, SEND_PCAS_A, &[descriptor]);
            words.extend(method(SUBCHANNEL_COMPUTE, SEND_SIGNALING_PCAS2_B, &[3]));
            self.submit(channel, words);
        }
    }

    /// Queues a copy of `len` bytes of the source.
    pub fn copy(&mut self, channel: usize, from: u64, to: u64, len: u32) {
        let [from, to] = [VA_START + SOURCE + from, VRAM_VA + DESTINATION + to].map(halves);
        let mut words = method(SUBCHANNEL_COPY, OFFSET_IN_UPPER, &[from, to].concat());
        words.extend(method(SUBCHANNEL_COPY, LINE_LENGTH_IN, &[len]));
        let plain = launch::TRANSFER_NON_PIPELINED | launch::SRC_PITCH | launch::DST_PITCH;
        words.extend(method(SUBCHANNEL_COPY, LAUNCH_DMA, &[plain]));
        self.submit(channel, words);
    }

    /// Queues a wait until another channel has executed an entry.
    pub fn wait_for(&mut self, channel: usize, other: usize, entry: u32) {
        let counter = VA_START + self.channels[other].base + USERD + userd::PROGRESS;
        let data = [counter as u32, (counter >> 32) as u32, entry, 0, sem::ACQ_CIRC_GEQ];
        self.submit(channel, method(0, SEM_ADDR_LO, &data));
    }

    pub fn submitted(&self, channel: usize) -> u32 {
        self.channels[channel].submitted
    }

    /// Returns the number of executed entries.
    pub fn progress(&self, channel: usize) -> u32 {
        let at = self.channels[channel].base + USERD + userd::PROGRESS;
        self.ram.mapping.load_u32(at).unwrap()
    }

    /// Waits until all entries are executed.
    pub fn wait(&self) {
        for channel in 0..self.channels.len() {
            super::super::eventually("all entries", || {
                self.progress(channel) == self.submitted(channel)
            });
        }
    }

    /// Restores a saved client in the memory of another VMM, and clears what a driver does not
    /// know.
    pub fn restore(&self, client: &mut NvidiaClient, saved: &SavedClient) -> Result<(), GpuError> {
        lifecycle::restore(client, &self.ram, saved)
    }
}

pub fn spec(engine: EngineKind, memory: MemoryId, base: u64) -> ChannelSpec {
    ChannelSpec {
        engine,
        gpfifo: GpuVa(VA_START + base),
        gpfifo_entries: ENTRIES,
        userd: Backing::Guest { memory, offset: base + USERD },
        vector: 0,
        space: SpaceId::DEFAULT,
        group: None,
        placement: Placement::default(),
        preamble: None,
    }
}

pub fn map(client: &mut NvidiaClient, ram: &SharedMemory) -> MemoryId {
    let memory = lifecycle::import(client, ram).unwrap();
    let backing = Backing::Guest { memory, offset: 0 };
    client.map(&MapRequest::new(GpuVa(VA_START), ram.mapping.len(), backing)).unwrap();
    let vram = Backing::Vram { offset: VRAM_OFFSET };
    client.map(&MapRequest::new(GpuVa(VRAM_VA), VRAM_BYTES, vram)).unwrap();
    memory
}
