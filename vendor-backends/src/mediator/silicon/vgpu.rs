//! One vGPU in the silicon: its partition, its world (address space and channels), and what the engine knows of it.
//!
//! The world has one lock. The engine holds it while it runs the vGPU's work and lets go within a chunk of work when a
//! control request waits for it, so a control request waits 50 us at most, and while it holds the lock no access of
//! that vGPU is in flight. The engine never waits: a world that is locked is passed over.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use mdev_core::abi::control::VECTORS;
use mdev_core::abi::mailbox::{MAX_GPFIFO_ENTRIES, VA_END, VA_START};
use mdev_core::abi::{doorbell, host, notifier, userd};
use mdev_core::gpu::{
    Backing, ChannelHandle, ChannelSpec, ChannelStatus, ClientSpec, EngineKind, GpuCapabilities,
    Pending, Quotas, Usage,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, Token, VgpuId};
use mdev_core::sched::Budget;
use mdev_core::units::{PAGE_SIZE, is_aligned};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, fstatfs};

use super::address_space::{AddressSpace, Memory};
use super::channel::{Channel, Readiness, Userd};
use super::clock::{Turn, now_ns};
use super::counters::Counters;
use super::engine::Kick;
use super::fault::{Context, Fault, Progress};
use super::quota::Bucket;
use super::signals::Signals;
use super::stretch::Stretch;
use super::wake::{Wake, WakeEnds};
use crate::mediator::hardware::{Hardware, Hold, Partition};
use crate::mediator::wire::{Refusal, STATUS_BYTES};
use crate::mem::{Mapping, SharedMemory, sealed_memfd};

/// `HUGETLBFS_MAGIC`.
const HUGETLBFS: FsType = FsType(0x9584_58f6);
/// Faults that cost nothing, if one second passes without another.
const FREE_FAULTS: u32 = 4;
const FAULT_MEMORY_NS: u64 = 1_000_000_000;
/// How long a new channel is held back after one more fault; doubles up to 256 times that.
const BACKOFF_NS: u64 = 1_000_000;

/// What a worker gets of a vGPU, besides answers.
#[derive(Debug)]
pub struct Shared {
    /// The file of the video memory partition, and where it begins in it.
    pub vram: Option<(OwnedFd, u64)>,
    /// The doorbell page.
    pub doorbell: OwnedFd,
    /// The status page.
    pub status: OwnedFd,
    /// The eventfd that says that the status page has changed.
    pub event: OwnedFd,
    /// What wakes the silicon.
    pub wake: WakeEnds,
}

/// What control requests change and the engine runs.
#[derive(Debug)]
struct World {
    space: AddressSpace,
    channels: BTreeMap<u32, Channel>,
    next_id: u32,
    /// The channel that had the last turn.
    last: u32,
    faults: u32,
    last_fault_ns: u64,
    quotas: Quotas,
    /// Keeps the quota of submissions.
    bucket: Option<Bucket>,
    /// Its claim on the device; `None` once it was evicted.
    hold: Option<Box<dyn Hold>>,
}

/// One vGPU.
#[derive(Debug)]
pub struct Vgpu {
    spec: ClientSpec,
    hardware: Arc<dyn Hardware>,
    max_channels: u32,
    world: Mutex<World>,
    /// Held by whoever evicts it.
    leaving: Mutex<()>,
    /// Control requests that wait for the world.
    waiting: AtomicU32,
    gate_open: AtomicBool,
    /// When the gate was closed last.
    closed_ns: AtomicU64,
    budget: Mutex<Option<Budget>>,
    slice_ns: AtomicU64,
    counters: Counters,
    signals: Signals,
    wake: Wake,
    kick: Kick,
}

/// What the engine found when it looked at a vGPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Glance {
    /// A control request is at work on it.
    Busy,
    /// The best that any of its channels could do.
    Seen(Readiness),
}

impl Vgpu {
    /// A new one with an empty world.
    pub fn new(
        spec: ClientSpec,
        hardware: Arc<dyn Hardware>,
        kick: Kick,
    ) -> Result<(Self, Shared), Refusal> {
        let Partition { memory, hold } = hardware.partition(&spec)?;
        let (vram, file) = memory.map_or((None, None), |memory| {
            (Some(memory.mapping), Some((memory.fd, memory.offset)))
        });
        let status = SharedMemory::new(c"vgpu-status", STATUS_BYTES as u64)?;
        let event = OwnedFd::from(
            EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
                .map_err(io::Error::from)?,
        );
        let (wake, ends) = Wake::new()?;
        let world = World {
            space: AddressSpace::new(vram, spec.max_import_bytes),
            channels: BTreeMap::new(),
            next_id: 1,
            last: 0,
            faults: 0,
            last_fault_ns: 0,
            quotas: Quotas { hang_timeout: hardware.describe().hang_timeout, ..Quotas::default() },
            bucket: None,
            hold: Some(hold),
        };
        let vgpu = Self {
            max_channels: spec.max_channels.min(hardware.describe().max_channels),
            world: Mutex::new(world),
            leaving: Mutex::default(),
            waiting: AtomicU32::new(0),
            gate_open: AtomicBool::new(true),
            closed_ns: AtomicU64::new(0),
            budget: Mutex::default(),
            slice_ns: AtomicU64::new(nanoseconds(hardware.describe().default_timeslice)),
            counters: Counters::default(),
            signals: Signals::new(status.mapping, event.try_clone()?)?,
            wake,
            kick,
            spec,
            hardware,
        };
        let shared = Shared {
            vram: file,
            // Its own: a page that several guests may write would be a way from one to the other. Nobody reads the
            // tokens, since the rings themselves are looked at.
            doorbell: sealed_memfd(c"vgpu-doorbell", doorbell::PAGE_BYTES)?,
            status: status.fd,
            event,
            wake: ends,
        };
        Ok((vgpu, shared))
    }

    /// Whose it is.
    pub fn id(&self) -> VgpuId {
        self.spec.vgpu
    }

    /// What was granted.
    pub fn spec(&self) -> &ClientSpec {
        &self.spec
    }

    /// What it has used.
    pub fn usage(&self) -> Usage {
        self.counters.usage()
    }

    // What control requests do.

    /// Enters the world for a control request; the engine lets go of it within a chunk of work.
    fn enter(&self) -> Result<MutexGuard<'_, World>, Refusal> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let world = self.world.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        if world.hold.is_some() { Ok(world) } else { Err(Refusal::NoVgpu) }
    }

    /// Imports guest memory.
    pub fn import(
        &self,
        fd: &OwnedFd,
        offset: u64,
        len: u64,
        writable: bool,
    ) -> Result<MemoryId, Refusal> {
        if len == 0 || !is_aligned(offset, PAGE_SIZE) || !is_aligned(len, PAGE_SIZE) {
            return Err(Refusal::Alignment);
        }
        // Only memory: a page of a file on a disk, or of FUSE, could keep the engine waiting.
        let kind = fstatfs(fd).map_err(io::Error::from)?.filesystem_type();
        if kind != TMPFS_MAGIC && kind != HUGETLBFS {
            return Err(Refusal::Descriptor);
        }
        let size = nix::sys::stat::fstat(fd).map_err(io::Error::from)?.st_size.cast_unsigned();
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(Refusal::Backing);
        }
        self.enter()?.check_import(len)?;
        let mapping = Mapping::new(fd.as_fd(), offset, len, writable)?;
        // Without the lock: pinning memory for a device takes a while.
        let attachment = self.hardware.attach(self.spec.vgpu, &mapping)?;
        let mut world = self.enter()?;
        world.check_import(len)?;
        let id = world.space.import(Memory { attachment, mapping })?;
        self.counters.imported_bytes.store(world.space.imported(), Ordering::Relaxed);
        Ok(id)
    }

    /// Takes guest memory away; channels whose USERD is in it end.
    pub fn release(&self, memory: MemoryId) -> Result<(), Refusal> {
        let mut world = self.enter()?;
        let memory_released = world.space.release(memory)?;
        self.counters.imported_bytes.store(world.space.imported(), Ordering::Relaxed);
        let fault = Fault { code: notifier::MMU_FAULT, info: 0 };
        self.fail_channels(&mut world, fault, |channel| channel.lives_in(memory));
        drop(world);
        // Unmapping gigabytes takes a while: the engine need not wait for it.
        drop(memory_released);
        Ok(())
    }

    /// Maps memory.
    pub fn map(
        &self,
        va: GpuVa,
        len: u64,
        backing: Backing,
        writable: bool,
    ) -> Result<(), Refusal> {
        let mut world = self.enter()?;
        let (slot, offset) = match backing {
            Backing::Vram { offset } => (world.space.vram()?.0, offset),
            Backing::Guest { memory, offset } => (world.space.memory(memory)?.0, offset),
        };
        world.space.map(va, len, slot, offset, writable)
    }

    /// Unmaps memory.
    pub fn unmap(&self, va: GpuVa, len: u64) -> Result<(), Refusal> {
        self.enter()?.space.unmap(va, len)
    }

    /// Makes a channel.
    pub fn create_channel(&self, spec: &ChannelSpec) -> Result<ChannelHandle, Refusal> {
        let entries = spec.gpfifo_entries;
        let ring = u64::from(entries) * host::GP_ENTRY_BYTES;
        let gpfifo = spec.gpfifo.0;
        if !entries.is_power_of_two()
            || !(2..=MAX_GPFIFO_ENTRIES).contains(&entries)
            || !is_aligned(gpfifo, host::GP_ENTRY_BYTES)
            || gpfifo < VA_START
            || gpfifo > VA_END - ring
        {
            return Err(Refusal::Gpfifo);
        }
        if spec.vector >= VECTORS {
            return Err(Refusal::Vector);
        }
        let needs = match spec.engine {
            EngineKind::Copy => GpuCapabilities::COPY,
            EngineKind::Compute => GpuCapabilities::COMPUTE,
        };
        if !self.hardware.describe().capabilities.contains(needs) {
            return Err(Refusal::Unsupported);
        }
        let mut world = self.enter()?;
        let most = world.quotas.max_channels.unwrap_or(u32::MAX).min(self.max_channels);
        if world.channels.len() as u64 >= u64::from(most) {
            return Err(Refusal::ChannelLimit);
        }
        let (mapping, offset, memory) = match spec.userd {
            Backing::Vram { offset } => (world.space.vram()?.1, offset, None),
            Backing::Guest { memory, offset } => {
                (world.space.memory(memory)?.1, offset, Some(memory))
            }
        };
        let inside = offset.checked_add(userd::BYTES).is_some_and(|end| end <= mapping.len());
        if !is_aligned(offset, userd::BYTES) || !inside || !mapping.writable() {
            return Err(Refusal::Userd);
        }
        let userd = Userd { mapping: Arc::clone(mapping), offset, memory };
        let id = world.free_id();
        let hold_until_ns = world.hold_until();
        world.channels.insert(id, Channel::new(*spec, userd, hold_until_ns));
        self.counters.channels.store(world.channels.len() as u32, Ordering::Relaxed);
        drop(world);
        self.kick.kick();
        Ok(ChannelHandle { id: ChannelId(id), token: Token(id) })
    }

    /// Ends a channel.
    pub fn destroy_channel(&self, id: ChannelId) -> Result<(), Refusal> {
        let mut world = self.enter()?;
        world.channels.remove(&id.0).ok_or(Refusal::NoChannel)?;
        self.counters.channels.store(world.channels.len() as u32, Ordering::Relaxed);
        Ok(())
    }

    /// How a channel is.
    pub fn query_channel(&self, id: ChannelId) -> Result<ChannelStatus, Refusal> {
        self.enter()?.channels.get(&id.0).map(Channel::status).ok_or(Refusal::NoChannel)
    }

    /// Sets or clears the eventfd of a vector.
    pub fn set_interrupt(&self, vector: u32, event: Option<OwnedFd>) -> Result<(), Refusal> {
        self.signals.set_vector(vector, event)
    }

    /// Destroys all channels and mappings.
    pub fn reset(&self) -> Result<(), Refusal> {
        let mut world = self.enter()?;
        let channels = std::mem::take(&mut world.channels);
        world.space.unmap_all();
        self.counters.channels.store(0, Ordering::Relaxed);
        drop(world);
        drop(channels);
        Ok(())
    }

    /// Faults every channel, for the manager.
    pub fn reset_channels(&self) -> Result<(), Refusal> {
        let mut world = self.enter()?;
        let fault = Fault { code: notifier::RESET_CHANNEL, info: 0 };
        self.fail_channels(&mut world, fault, |_| true);
        Ok(())
    }

    /// Sets the time slice.
    pub fn set_timeslice(&self, slice: Duration) {
        self.slice_ns.store(nanoseconds(slice), Ordering::Relaxed);
    }

    /// Sets or lifts the budget of engine time.
    pub fn set_budget(&self, budget: Option<Budget>) {
        *self.budget.lock().unwrap_or_else(PoisonError::into_inner) = budget;
        self.kick.kick();
    }

    /// Sets the quotas.
    pub fn set_quotas(&self, quotas: &Quotas) -> Result<(), Refusal> {
        let mut world = self.enter()?;
        if quotas.submissions_per_second != world.quotas.submissions_per_second {
            let now = now_ns();
            world.bucket = quotas.submissions_per_second.map(|rate| Bucket::new(rate, now));
        }
        world.quotas = *quotas;
        drop(world);
        self.kick.kick();
        Ok(())
    }

    /// Opens or closes the gate.
    pub fn set_gate(&self, open: bool) {
        if !open && self.gate_open() {
            self.closed_ns.store(now_ns(), Ordering::SeqCst);
        }
        self.gate_open.store(open, Ordering::SeqCst);
        self.kick.kick();
    }

    /// Takes everything away, for good. What was imported is unmapped and its claim given back when this returns, also
    /// where somebody else was at it.
    pub fn evict(&self) {
        let _leaving = self.leaving.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(mut world) = self.enter() {
            let hold = world.hold.take();
            let channels = std::mem::take(&mut world.channels);
            let space = std::mem::replace(&mut world.space, AddressSpace::new(None, 0));
            drop(world);
            // What the device may reach is its own until nothing of it can be reached any more.
            drop((channels, space));
            drop(hold);
        }
    }

    fn fail_channels(&self, world: &mut World, fault: Fault, which: impl Fn(&Channel) -> bool) {
        let mut failed = 0;
        for channel in world.channels.values_mut().filter(|channel| which(channel)) {
            failed += u64::from(channel.fail(fault));
        }
        if failed > 0 {
            self.counters.faults.fetch_add(failed, Ordering::Relaxed);
            self.signals.raise(Pending::CHANNEL_ERROR, None);
        }
    }

    // What the engine does.

    /// The time slice in nanoseconds.
    pub fn slice_ns(&self) -> u64 {
        self.slice_ns.load(Ordering::Relaxed)
    }

    /// Whether the gate is open.
    pub fn gate_open(&self) -> bool {
        self.gate_open.load(Ordering::SeqCst)
    }

    /// When the gate was closed, where it is.
    pub fn closed_ns(&self) -> Option<u64> {
        (!self.gate_open()).then(|| self.closed_ns.load(Ordering::SeqCst))
    }

    /// The budget of engine time.
    pub fn budget(&self) -> Option<Budget> {
        *self.budget.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its counters.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Where wake-ups arrive.
    pub fn wake(&self) -> &Wake {
        &self.wake
    }

    fn try_enter(&self) -> Option<MutexGuard<'_, World>> {
        if self.waiting.load(Ordering::SeqCst) != 0 {
            return None;
        }
        match self.world.try_lock() {
            Ok(world) => Some(world),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Looks whether any channel has work, and counts new doorbells as polled unless the vGPU was just woken.
    pub fn glance(&self, now_ns: u64, woken: bool) -> Glance {
        let Some(mut world) = self.try_enter() else { return Glance::Busy };
        let token = world.token(now_ns);
        let patience = world.quotas.acquire_timeout.map_or(u64::MAX, nanoseconds);
        let World { space, channels, .. } = &mut *world;
        let mut best = Readiness::Idle;
        let (mut doorbells, mut hung) = (0, 0);
        for channel in channels.values_mut() {
            doorbells += u64::from(channel.take_doorbell());
            let mut readiness = channel.poll(now_ns, space, token);
            if channel.blocked_ns(now_ns) > patience {
                hung +=
                    u64::from(channel.fail(Fault { code: notifier::SEMAPHORE_TIMEOUT, info: 0 }));
                readiness = Readiness::Idle;
            }
            match readiness {
                Readiness::Ready => best = Readiness::Ready,
                Readiness::Waiting if best == Readiness::Idle => best = Readiness::Waiting,
                Readiness::Waiting | Readiness::Idle => {}
            }
        }
        if doorbells > 0 && !woken {
            self.counters.polled_doorbells.fetch_add(doorbells, Ordering::Relaxed);
        }
        if hung > 0 {
            Counters::add(&self.counters.hang_resets, hung);
            Counters::add(&self.counters.faults, hung);
            self.signals.raise(Pending::CHANNEL_ERROR, None);
        }
        Glance::Seen(best)
    }

    /// Tells the guest whether doorbells need a wake-up; false where the world is locked.
    pub fn announce_sleep(&self, asleep: bool) -> bool {
        let world = self.try_enter();
        if let Some(world) = &world {
            world.channels.values().for_each(|channel| channel.announce_sleep(asleep));
        }
        world.is_some()
    }

    /// Ends the channel that had the last turn, since it did not give up the engine.
    pub fn fail_running(&self, overrun_ns: u64) {
        let Some(mut world) = self.try_enter() else { return };
        let last = world.last;
        let fault = Fault { code: notifier::CTXSW_TIMEOUT, info: overrun_ns };
        if world.channels.get_mut(&last).is_some_and(|channel| channel.fail(fault)) {
            log::warn!("vGPU {}: channel {last} did not give up the engine: reset", self.spec.vgpu);
            Counters::add(&self.counters.hang_resets, 1);
            Counters::add(&self.counters.faults, 1);
            world.count_fault(now_ns());
            self.signals.raise(Pending::CHANNEL_ERROR, None);
        }
    }

    /// Gives the engine to the next channel that is ready, until `end_ns`; which of the engines that was for.
    pub fn run(&self, now: u64, end_ns: u64) -> Stretch {
        let idle = Stretch::new(now);
        let Some(mut world) = self.try_enter() else { return idle };
        let token = world.token(now);
        let patience = world.quotas.hang_timeout.map_or(u64::MAX, nanoseconds);
        let World { space, channels, last, bucket, .. } = &mut *world;
        let ready = |id: &u32, channel: &mut Channel| {
            (channel.poll(now, space, token) == Readiness::Ready).then_some(*id)
        };
        let start = *last;
        let after = channels.range_mut(start.wrapping_add(1)..).find_map(|(i, c)| ready(i, c));
        let next = after.or_else(|| channels.iter_mut().find_map(|(id, c)| ready(id, c)));
        let Some(id) = next else { return idle };
        *last = id;
        let Some(channel) = channels.get_mut(&id) else { return idle };
        channel.begin(now);
        let turn = Turn { end_ns, waiting: &self.waiting, gate_open: &self.gate_open };
        let cx = Context {
            hardware: &*self.hardware,
            vgpu: self.spec.vgpu,
            space,
            turn: &turn,
            signals: &self.signals,
            vector: channel.vector(),
        };
        let mut outcome = channel.run(cx, &self.counters, bucket);
        if space.poisoned() {
            outcome = Err(Fault { code: notifier::MMU_FAULT, info: 0 });
        }
        let (ended, stretch) = (now_ns(), channel.stretch());
        let grain_ns = self.hardware.pace().grain_ns;
        // What is far beyond the turn's end is the host's doing, or else the engine notices.
        let working = channel.charge((ended - now).min(end_ns.saturating_sub(now) + grain_ns));
        let hung = outcome == Ok(Progress::More) && working > patience;
        if hung {
            Counters::add(&self.counters.hang_resets, 1);
            outcome = Err(Fault { code: notifier::IDLE_TIMEOUT, info: working });
        }
        match outcome {
            Ok(Progress::Done | Progress::More | Progress::Blocked) => {}
            Err(fault) => {
                log::debug!("vGPU {}: channel {id} faulted: {fault:?}", self.spec.vgpu);
                channel.fail(fault);
                self.counters.faults.fetch_add(1, Ordering::Relaxed);
                world.count_fault(ended);
                self.signals.raise(Pending::CHANNEL_ERROR, None);
            }
        }
        stretch
    }
}

impl World {
    /// Whether an entry may be taken from a ring.
    fn token(&mut self, now_ns: u64) -> bool {
        self.bucket.as_mut().is_none_or(|bucket| {
            bucket.advance(now_ns);
            bucket.has_one()
        })
    }

    /// Whether so much more may be imported.
    fn check_import(&self, len: u64) -> Result<(), Refusal> {
        let quota = self.quotas.max_import_bytes.unwrap_or(u64::MAX);
        let room = quota.saturating_sub(self.space.imported()).min(self.space.import_room());
        if len > room { Err(Refusal::ImportLimit) } else { Ok(()) }
    }

    /// Ids are reused late, so that a stale one names nothing.
    fn free_id(&mut self) -> u32 {
        loop {
            let id = self.next_id;
            self.next_id = self.next_id % 0x7fff_ffff + 1;
            if !self.channels.contains_key(&id) {
                return id;
            }
        }
    }

    fn count_fault(&mut self, now: u64) {
        let quiet = now.saturating_sub(self.last_fault_ns) > FAULT_MEMORY_NS;
        self.faults = if quiet { 1 } else { self.faults.saturating_add(1) };
        self.last_fault_ns = now;
    }

    /// Making channels only to let them fault does not pay: each time it takes longer until the next one may run.
    fn hold_until(&self) -> u64 {
        match self.faults.checked_sub(FREE_FAULTS) {
            None | Some(0) => 0,
            Some(more) => self.last_fault_ns + (BACKOFF_NS << more.min(8)),
        }
    }
}

fn nanoseconds(slice: Duration) -> u64 {
    u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX)
}
