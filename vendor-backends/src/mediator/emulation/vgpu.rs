//! One vGPU of the emulated GPU: its partition, its address spaces and channels, and its scheduling
//! parameters.
//!
//! One lock protects the address spaces and the channels. The engine holds the lock while it runs
//! the vGPU's work, so no access of the vGPU is in flight while a control request holds the lock.
//! The engine releases the lock within one chunk of work when a control request waits, so a control
//! request waits at most about 50 us, or as long as the engine sleeps in a page fault. The engine
//! itself never waits: it skips a locked vGPU.
//!
//! * `state`: the state under the lock
//! * `requests`: control requests
//! * [`run`]: operations of the engine
//! * `saved`: pausing, saving and restoring
//! * `fault_backoff`: delay of new channels after faults
//! * `memory_watch`: checks of imported memory
//! * `machine_code_log`: message about programs that the software GPU cannot run

mod fault_backoff;
mod machine_code_log;
mod memory_watch;
mod requests;
pub mod run;
mod saved;
mod state;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use ipc::mem::{SharedMemory, sealed_memfd};
use mdev_core::abi::doorbell;
use mdev_core::gpu::{ClientSpec, Pending, Quotas, Usage, Waits};
use mdev_core::ids::VgpuId;
use mdev_core::sched::Budget;
use nix::sys::eventfd::{EfdFlags, EventFd};

use self::fault_backoff::FaultBackoff;
use self::machine_code_log::MachineCodeLog;
use self::memory_watch::MemoryWatch;
use self::state::VgpuState;
use super::address_space::AddressSpaces;
use super::channel::Channel;
use super::counters::Counters;
use super::engine::waker::EngineWaker;
use super::interrupts::Interrupts;
use super::wakeup::{WakeupReceiver, WakeupSenders};
use crate::mediator::fault::Fault;
use crate::mediator::hardware::{Hardware, Partition};
use crate::mediator::wire::{Refusal, STATUS_BYTES};

/// File descriptors of a vGPU that its worker gets.
#[derive(Debug)]
pub struct WorkerFds {
    /// File of the video memory partition, and the partition's offset in the file.
    pub vram: Option<(OwnedFd, u64)>,
    /// Doorbell page.
    pub doorbell: OwnedFd,
    /// Status page.
    pub status: OwnedFd,
    /// Eventfd that signals a change of the status page.
    pub event: OwnedFd,
    /// Senders of wake-ups.
    pub wakeups: WakeupSenders,
}

impl WorkerFds {
    /// Replaces the descriptors of what a guest can map or signal.
    pub fn replace(&mut self, renewed: RenewedFds) {
        self.doorbell = renewed.doorbell;
        self.wakeups.event = renewed.event;
        if renewed.vram.is_some() {
            self.vram = renewed.vram;
        }
    }
}

/// File descriptors of what a guest can map or signal, for the next guest.
#[derive(Debug)]
pub struct RenewedFds {
    /// File of the new video memory partition, and the partition's offset in the file; `None` if
    /// video memory was not replaced.
    pub vram: Option<(OwnedFd, u64)>,
    /// New doorbell page.
    pub doorbell: OwnedFd,
    /// New eventfd that wakes the engine.
    pub event: OwnedFd,
}

/// Longest wait for the lock in a request of the manager.
pub const MANAGER_WAIT: Duration = Duration::from_millis(500);

/// One vGPU.
#[derive(Debug)]
pub struct Vgpu {
    spec: ClientSpec,
    hardware: Arc<dyn Hardware>,
    max_channels: u32,
    state: Mutex<VgpuState>,
    /// Held during an eviction.
    eviction: Mutex<()>,
    /// Number of control requests that wait for `state`.
    waiting_requests: AtomicU32,
    gate_open: AtomicBool,
    /// Time at which the gate was closed last.
    gate_closed_ns: AtomicU64,
    budget: Mutex<Option<Budget>>,
    slice_ns: AtomicU64,
    counters: Counters,
    interrupts: Interrupts,
    wakeups: WakeupReceiver,
    waker: EngineWaker,
}

impl Vgpu {
    /// Creates a vGPU without mappings and channels.
    pub fn new(
        spec: ClientSpec,
        hardware: Arc<dyn Hardware>,
        waker: EngineWaker,
    ) -> Result<(Self, WorkerFds), Refusal> {
        let Partition { memory, reservation } = hardware.partition(&spec)?;
        let (vram, file) = memory.map_or((None, None), |memory| {
            (Some(memory.mapping), Some((memory.fd, memory.offset)))
        });
        let status = SharedMemory::new(c"vgpu-status", STATUS_BYTES as u64)?;
        let event = OwnedFd::from(
            EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
                .map_err(io::Error::from)?,
        );
        let (wakeups, senders) = WakeupReceiver::new()?;
        let state = VgpuState {
            spaces: AddressSpaces::new(vram, spec.max_import_bytes),
            channels: BTreeMap::new(),
            next_id: 1,
            paused: false,
            last_run: 0,
            fault_backoff: FaultBackoff::default(),
            memory_watch: MemoryWatch::default(),
            machine_code_log: MachineCodeLog::default(),
            quotas: Quotas { hang_timeout: hardware.describe().hang_timeout, ..Quotas::default() },
            submissions: None,
            reservation: Some(reservation),
        };
        let vgpu = Self {
            max_channels: spec.max_channels.min(hardware.describe().max_channels),
            state: Mutex::new(state),
            eviction: Mutex::default(),
            waiting_requests: AtomicU32::new(0),
            gate_open: AtomicBool::new(true),
            gate_closed_ns: AtomicU64::new(0),
            budget: Mutex::default(),
            slice_ns: AtomicU64::new(nanoseconds(hardware.describe().default_timeslice)),
            counters: Counters::default(),
            interrupts: Interrupts::new(status.mapping, event.try_clone()?)?,
            wakeups,
            waker,
            spec,
            hardware,
        };
        let fds = WorkerFds {
            vram: file,
            doorbell: doorbell_page()?,
            status: status.fd,
            event,
            wakeups: senders,
        };
        Ok((vgpu, fds))
    }

    /// Returns the id.
    pub fn id(&self) -> VgpuId {
        self.spec.vgpu
    }

    /// Returns the granted specification.
    pub fn spec(&self) -> &ClientSpec {
        &self.spec
    }

    /// Returns the usage.
    pub fn usage(&self) -> Usage {
        self.counters.usage()
    }

    /// Returns the waits for the engine.
    pub fn waits(&self) -> Waits {
        self.counters.waits.counts()
    }

    /// Locks the state for a control request. The engine releases the lock within one chunk of
    /// work.
    fn lock(&self) -> Result<MutexGuard<'_, VgpuState>, Refusal> {
        self.waiting_requests.fetch_add(1, Ordering::SeqCst);
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting_requests.fetch_sub(1, Ordering::SeqCst);
        if state.reservation.is_some() { Ok(state) } else { Err(Refusal::NoVgpu) }
    }

    /// Locks the state for a request of the manager, whose thread serves all vGPUs. The engine can
    /// sleep in the guest's memory with the lock.
    fn lock_for_manager(&self) -> Result<MutexGuard<'_, VgpuState>, Refusal> {
        let deadline = Instant::now() + MANAGER_WAIT;
        self.waiting_requests.fetch_add(1, Ordering::SeqCst);
        let state = loop {
            match self.state.try_lock() {
                Ok(state) => break Some(state),
                Err(TryLockError::Poisoned(poisoned)) => break Some(poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_micros(20));
                }
                Err(TryLockError::WouldBlock) => break None,
            }
        };
        self.waiting_requests.fetch_sub(1, Ordering::SeqCst);
        let state = state.ok_or(Refusal::Os(libc::EBUSY))?;
        if state.reservation.is_some() { Ok(state) } else { Err(Refusal::NoVgpu) }
    }

    /// Locks the state for the engine, unless a control request holds or waits for the lock.
    fn try_lock(&self) -> Option<MutexGuard<'_, VgpuState>> {
        if self.waiting_requests.load(Ordering::SeqCst) != 0 {
            return None;
        }
        match self.state.try_lock() {
            Ok(state) => Some(state),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Destroys all channels and mappings and releases the partition. When this function returns,
    /// imported memory is unmapped and the partition is free, even if another thread evicts the
    /// vGPU at the same time.
    pub fn evict(&self) {
        let _eviction = self.eviction.lock().unwrap_or_else(PoisonError::into_inner);
        if let Ok(mut state) = self.lock() {
            let reservation = state.reservation.take();
            let channels = std::mem::take(&mut state.channels);
            let spaces = std::mem::replace(&mut state.spaces, AddressSpaces::new(None, 0));
            drop(state);
            // The reservation ends last: until then the device can reach the imported memory.
            drop((channels, spaces));
            drop(reservation);
        }
    }

    fn fail_channels(
        &self,
        state: &mut VgpuState,
        fault: Fault,
        selected: impl Fn(&Channel) -> bool,
    ) {
        let mut failed = 0;
        for channel in state.channels.values_mut().filter(|channel| selected(channel)) {
            failed += u64::from(channel.fail(fault));
        }
        if failed > 0 {
            self.counters.faults.fetch_add(failed, Ordering::Relaxed);
            self.interrupts.raise(Pending::CHANNEL_ERROR, None);
        }
    }
}

/// Creates a doorbell page. It is not shared with other vGPUs, because a page that several guests
/// can write is a covert channel. The engine reads the rings and not the tokens in this page.
fn doorbell_page() -> io::Result<OwnedFd> {
    sealed_memfd(c"vgpu-doorbell", doorbell::PAGE_BYTES)
}

/// Returns a time in nanoseconds, or the most that fit.
pub fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
