//! Minimal guest driver: memory, rings, pushbuffers and waiting.

use std::fmt;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use ipc::mem::{Mapping, SharedMemory};
use mdev_core::abi::host::{self, GpEntry, MethodHeader, SecOp, sem};
use mdev_core::abi::mailbox::VA_START;
use mdev_core::abi::{compute, copy, doorbell, userd};
use mdev_core::gpu::{
    Backing, ChannelSpec, ChannelStatus, Client, EngineKind, GpuCapabilities, GuestRam, MapRequest,
    Placement,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, SpaceId, Token};
use mdev_core::units::MIB;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Size of guest memory.
pub const RAM_BYTES: u64 = 48 * MIB;
/// Offset of a test's data in guest memory.
pub const DATA: u64 = 12 * MIB;
/// Number of entries of a ring.
pub const ENTRIES: u32 = 64;
/// Size of a ring in guest memory: GPFIFO, USERD, semaphore, and a pushbuffer for each entry.
const RING_BYTES: u64 = MIB;
/// Maximum number of rings.
const RINGS: u64 = DATA / RING_BYTES;
/// Offset of the USERD in a ring.
const USERD: u64 = 0x1000;
/// Offset of the semaphore in a ring.
const SEMAPHORE: u64 = 0x1800;
/// Offset of the pushbuffers in a ring.
const PUSHBUFFERS: u64 = 0x1_0000;
const PUSHBUFFER_BYTES: u64 = 0x2000;
/// Default timeout of a wait.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(20);
/// Time after which a wait sleeps between its checks.
const YIELD_UNTIL: Duration = Duration::from_millis(20);
/// Maximum sleep between two checks of a wait.
const MAX_SLEEP: Duration = Duration::from_millis(100);

/// Methods that are submitted together.
#[derive(Clone, Debug, Default)]
pub struct Pushbuffer(Vec<u32>);

impl Pushbuffer {
    /// Returns the words.
    pub fn words(&self) -> &[u32] {
        &self.0
    }

    /// Adds a raw word.
    #[must_use]
    pub fn word(mut self, word: u32) -> Self {
        self.0.push(word);
        self
    }

    /// Adds data for a method and the following methods.
    #[must_use]
    pub fn method(self, subchannel: u8, method: u32, data: &[u32]) -> Self {
        let count = data.len() as u32;
        let header = MethodHeader { op: SecOp::Inc, subchannel, method, count };
        let mut push = self.word(header.encode());
        push.0.extend_from_slice(data);
        push
    }

    /// Adds a host method.
    #[must_use]
    pub fn host(self, method: u32, data: u32) -> Self {
        self.method(0, method, &[data])
    }

    /// Adds methods of the copy class.
    #[must_use]
    pub fn copy_method(self, method: u32, data: &[u32]) -> Self {
        self.method(host::SUBCHANNEL_COPY, method, data)
    }

    /// Sets source and destination of a copy.
    #[must_use]
    pub fn addresses(self, from: u64, to: u64) -> Self {
        let halves = [(from >> 32) as u32, from as u32, (to >> 32) as u32, to as u32];
        self.copy_method(copy::OFFSET_IN_UPPER, &halves)
    }

    /// Starts a transfer of pitch-linear memory.
    #[must_use]
    pub fn launch(self, flags: u32) -> Self {
        let pitch = copy::launch::SRC_PITCH | copy::launch::DST_PITCH;
        let flags = flags | pitch | copy::launch::TRANSFER_NON_PIPELINED | copy::launch::FLUSH;
        self.copy_method(copy::LAUNCH_DMA, &[flags])
    }

    /// Adds a linear copy.
    #[must_use]
    pub fn copy(self, from: u64, to: u64, len: u32) -> Self {
        self.addresses(from, to).copy_method(copy::LINE_LENGTH_IN, &[len, 1]).launch(0)
    }

    /// Adds a semaphore operation of the host.
    #[must_use]
    pub fn semaphore(self, va: u64, payload: u64, flags: u32) -> Self {
        let data = [va as u32, (va >> 32) as u32, payload as u32, (payload >> 32) as u32, flags];
        self.method(0, host::SEM_ADDR_LO, &data)
    }
}

/// Channel and its ring.
#[derive(Debug)]
pub struct Ring {
    id: ChannelId,
    token: Token,
    base: u64,
    put: u32,
    submitted: u32,
}

impl Ring {
    /// Returns the channel's ID.
    pub fn id(&self) -> ChannelId {
        self.id
    }

    /// Returns the last value of `GP_PUT`.
    pub fn put(&self) -> u32 {
        self.put
    }
}

/// Completion of submitted work: offset of a semaphore in guest memory, and its final value.
#[derive(Clone, Copy, Debug)]
pub struct Completion {
    offset: u64,
    value: u32,
}

/// Guest driver without a VM.
pub struct Driver {
    client: Box<dyn Client>,
    ram: SharedMemory,
    memory: MemoryId,
    vram: Option<Arc<Mapping>>,
    doorbell: Option<Arc<Mapping>>,
    /// Offsets of free rings in guest memory. The last one is used next.
    free_rings: Vec<u64>,
    timeout: Duration,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("client", &self.client).finish_non_exhaustive()
    }
}

impl Driver {
    /// Starts a client, and imports and maps guest memory.
    pub fn new(mut client: Box<dyn Client>) -> Self {
        client.start().unwrap();
        let ram = SharedMemory::new(c"guest-ram", RAM_BYTES).unwrap();
        let guest = GuestRam { fd: ram.fd.as_fd(), offset: 0, len: RAM_BYTES, writable: true };
        let memory = client.import(guest).unwrap();
        let map = |aperture: &Option<mdev_core::gpu::Aperture>| {
            let aperture = aperture.as_ref()?;
            Some(Mapping::new(aperture.fd.as_fd(), aperture.offset, aperture.len, true).unwrap())
        };
        let (vram, doorbell) = (map(&client.apertures().vram), map(&client.apertures().doorbell));
        let free_rings = (0..RINGS).rev().map(|index| index * RING_BYTES).collect();
        let timeout = DEFAULT_TIMEOUT;
        let mut driver = Self { client, ram, memory, vram, doorbell, free_rings, timeout };
        driver.map_ram();
        driver
    }

    /// Maps guest memory at [`Driver::va`].
    pub fn map_ram(&mut self) {
        let backing = Backing::Guest { memory: self.memory, offset: 0 };
        let va = GpuVa(self.va(0));
        self.client.map(&MapRequest::new(va, RAM_BYTES, backing)).unwrap();
    }

    /// Maps video memory. Returns the GPU virtual address.
    pub fn map_vram(&mut self, offset: u64, len: u64) -> u64 {
        let va = VA_START + (8 << 30);
        self.client.map(&MapRequest::new(GpuVa(va), len, Backing::Vram { offset })).unwrap();
        va
    }

    /// Imports more guest memory.
    pub fn import(&mut self, len: u64) -> (SharedMemory, MemoryId) {
        let memory = SharedMemory::new(c"more-ram", len).unwrap();
        let guest = GuestRam { fd: memory.fd.as_fd(), offset: 0, len, writable: true };
        let id = self.client.import(guest).unwrap();
        (memory, id)
    }

    /// Maps an import.
    pub fn map(&mut self, va: u64, len: u64, memory: MemoryId) {
        let backing = Backing::Guest { memory, offset: 0 };
        self.client.map(&MapRequest::new(GpuVa(va), len, backing)).unwrap();
    }

    /// Starts an endless kernel (a program of the software GPU).
    pub fn spin_forever(&mut self, ring: &mut Ring) -> Completion {
        let push = super::kernels::endless_kernel(self);
        self.submit(ring, push)
    }

    /// Sets the timeout of waits.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the client.
    pub fn client(&mut self) -> &mut dyn Client {
        &mut *self.client
    }

    /// Returns the import of guest memory.
    pub fn memory(&self) -> MemoryId {
        self.memory
    }

    /// Returns the GPU virtual address of an offset in guest memory.
    #[allow(clippy::unused_self, reason = "the address is valid for this driver only")]
    pub fn va(&self, offset: u64) -> u64 {
        VA_START + (1 << 30) + offset
    }

    /// Writes guest memory.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.ram.mapping.write(offset, bytes).unwrap();
    }

    /// Reads guest memory.
    pub fn read(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ram.mapping.read(offset, &mut bytes).unwrap();
        bytes
    }

    /// Reads video memory.
    pub fn read_vram(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.vram.as_ref().unwrap().read(offset, &mut bytes).unwrap();
        bytes
    }

    /// Creates a channel without binding classes.
    pub fn bare_ring(&mut self, engine: EngineKind) -> Ring {
        self.ring_in(engine, SpaceId::DEFAULT, None)
    }

    /// Creates a channel in an address space and group, without binding classes. The address space
    /// has the guest's memory at its usual address.
    pub fn ring_in(&mut self, engine: EngineKind, space: SpaceId, group: Option<u32>) -> Ring {
        let base = self.free_rings.pop().expect("a free ring");
        self.write(base, &vec![0; PUSHBUFFERS as usize]);
        let spec = ChannelSpec {
            engine,
            gpfifo: GpuVa(self.va(base)),
            gpfifo_entries: ENTRIES,
            userd: Backing::Guest { memory: self.memory, offset: base + USERD },
            vector: 0,
            space,
            group,
            placement: Placement::default(),
            preamble: None,
        };
        let handle = self.client.create_channel(&spec).unwrap();
        Ring { id: handle.id, token: handle.token, base, put: 0, submitted: 0 }
    }

    /// Destroys a channel and frees its ring.
    #[allow(clippy::needless_pass_by_value, reason = "the ring does not exist any more")]
    pub fn destroy(&mut self, ring: Ring) {
        self.client.destroy_channel(ring.id).unwrap();
        self.free_rings.push(ring.base);
    }

    /// Creates a channel and binds its classes.
    pub fn ring(&mut self, engine: EngineKind) -> Ring {
        let mut ring = self.bare_ring(engine);
        let mut push = Pushbuffer::default().copy_method(host::SET_OBJECT, &[copy::CLASS]);
        if engine == EngineKind::Compute {
            push = push.method(host::SUBCHANNEL_COMPUTE, host::SET_OBJECT, &[compute::CLASS]);
        }
        self.finish(&mut ring, push);
        ring
    }

    /// Queues methods, then a semaphore release that marks their completion.
    pub fn submit(&mut self, ring: &mut Ring, push: Pushbuffer) -> Completion {
        ring.submitted += 1;
        let done = Completion { offset: ring.base + SEMAPHORE, value: ring.submitted };
        // Without WFI, hardware releases a semaphore while its engines are still busy.
        let release = sem::RELEASE | sem::RELEASE_WFI;
        let push = push.semaphore(self.va(done.offset), done.value.into(), release);
        let at = ring.base + PUSHBUFFERS + u64::from(ring.put) % 64 * PUSHBUFFER_BYTES;
        let bytes: Vec<u8> = push.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        assert!(bytes.len() <= PUSHBUFFER_BYTES as usize);
        self.write(at, &bytes);
        let entry = GpEntry::Segment { va: self.va(at), dwords: push.0.len() as u32 };
        self.submit_entry(ring, entry);
        done
    }

    /// Queues an entry of the ring.
    pub fn submit_entry(&mut self, ring: &mut Ring, entry: GpEntry) {
        let at = ring.base + u64::from(ring.put) * host::GP_ENTRY_BYTES;
        self.ram.mapping.store_u64(at, entry.encode()).unwrap();
        self.set_put(ring, (ring.put + 1) % ENTRIES);
    }

    /// Writes `GP_PUT`, rings the doorbell, and wakes the GPU if it asks for a wakeup.
    pub fn set_put(&mut self, ring: &mut Ring, put: u32) {
        ring.put = put;
        self.ram.mapping.store_u32(ring.base + USERD + userd::GP_PUT, put).unwrap();
        fence(Ordering::SeqCst);
        if let Some(doorbell) = &self.doorbell {
            doorbell.store_u32(doorbell::TOKEN, ring.token.0).unwrap();
        }
        let need_wakeup = self.ram.mapping.load_u32(ring.base + USERD + userd::NEED_WAKEUP);
        if self.doorbell.is_none()
            || self.client.gpu().capabilities.contains(GpuCapabilities::NEED_WAKEUP)
                && need_wakeup != Some(0)
        {
            self.client.wake(ring.token).unwrap();
        }
    }

    /// Waits for a completion. Returns false after a timeout.
    pub fn wait_for(&self, done: Completion, timeout: Duration) -> bool {
        let started = Instant::now();
        while self.ram.mapping.load_u32(done.offset) != Some(done.value) {
            match started.elapsed() {
                waited if waited > timeout => return false,
                waited if waited > YIELD_UNTIL => std::thread::sleep((waited / 16).min(MAX_SLEEP)),
                _ => std::thread::yield_now(),
            }
        }
        true
    }

    /// Waits for a completion by spinning.
    pub fn wait_spinning(&self, done: Completion) {
        while self.ram.mapping.load_u32(done.offset) != Some(done.value) {
            std::hint::spin_loop();
        }
    }

    /// Waits for a completion with the default timeout. Returns false after the timeout.
    pub fn wait(&self, done: Completion) -> bool {
        self.wait_for(done, self.timeout)
    }

    /// Queues methods and waits for their completion.
    pub fn finish(&mut self, ring: &mut Ring, push: Pushbuffer) {
        let done = self.submit(ring, push);
        assert!(self.wait(done), "not completed: {:?}", self.client.query_channel(ring.id));
    }

    /// Waits for a fault of a channel.
    pub fn expect_fault(&mut self, ring: &Ring) -> ChannelStatus {
        let started = Instant::now();
        loop {
            let status = self.client.query_channel(ring.id).unwrap();
            if status.error != 0 {
                return status;
            }
            assert!(started.elapsed() < self.timeout, "no fault of {ring:?}: {status:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Returns whether the client's event becomes readable before a timeout.
    pub fn event_within(&self, timeout: Duration) -> bool {
        readable(&self.client.event(), timeout)
    }

    /// Sets a new eventfd for an interrupt vector, and returns it.
    pub fn set_vector(&mut self, vector: u32) -> File {
        let event = OwnedFd::from(EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap());
        self.client.set_interrupt(vector, Some(event.as_fd())).unwrap();
        File::from(event)
    }
}

/// Returns whether a descriptor becomes readable before a timeout.
pub fn readable(fd: &impl AsFd, timeout: Duration) -> bool {
    let mut fds = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
    let timeout = PollTimeout::try_from(timeout).unwrap_or(PollTimeout::MAX);
    poll(&mut fds, timeout).is_ok() && fds[0].any() == Some(true)
}
