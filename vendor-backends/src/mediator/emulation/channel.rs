//! A channel: a ring of pushbuffers that a guest fills, and the engine's progress in it.
//!
//! * `run`: fetching and executing
//! * `saved`: state between two steps
//! * `userd`: the memory with the ring's indices

mod run;
mod saved;
mod userd;

use mdev_core::abi::userd as abi;
use mdev_core::gpu::{ChannelSpec, ChannelStatus};
use mdev_core::ids::MemoryId;
use serde::{Deserialize, Serialize};

pub use self::userd::Userd;
use super::address_space::AddressSpaces;
use super::compute_class::{ComputeClass, Grid};
use super::context::Progress;
use super::copy_class::CopyClass;
use super::engine_time::EngineTime;
use super::host_class::HostClass;
use super::pushbuffer::Decoder;
use super::semaphore::Acquire;
use super::transfer::Transfer;
use crate::mediator::fault::Fault;

/// Words of a pushbuffer that are fetched at once.
const WINDOW: usize = 256;

/// Operation that outlasts its method.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Active {
    Transfer(Box<Transfer>),
    Grid(Box<Grid>),
    Acquire(Acquire),
}

/// Pushbuffer segment in progress.
#[derive(Debug, Default)]
struct Segment {
    va: u64,
    /// Words not yet fetched.
    left: u32,
}

/// Readiness of a channel to use the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// No work until the next doorbell.
    Idle,
    /// Work is ready.
    Ready,
    /// Waits for an event without a wake-up, such as a semaphore: must be polled again.
    Waiting,
}

/// A channel.
#[derive(Debug)]
pub struct Channel {
    spec: ChannelSpec,
    /// USERD; `None` after a fault, because its memory can be withdrawn.
    userd: Option<Userd>,
    get: u32,
    seen_put: u32,
    segment: Option<Segment>,
    window: [u32; WINDOW],
    window_len: usize,
    window_next: usize,
    decoder: Decoder,
    bound: [u32; 8],
    host: HostClass,
    copy: CopyClass,
    compute: ComputeClass,
    active: Option<Active>,
    error: Option<Fault>,
    engine_ns: u64,
    /// Time of the current run by engine.
    engine_time: EngineTime,
    /// Number of launches; identifies a launch.
    launches: u64,
    /// Launch that was charged last, and its engine time so far.
    charged: (u64, u64),
    /// Time of the first poll that found the channel blocked on the current semaphore.
    blocked_since: Option<u64>,
    /// Whether the quota of submissions has delayed the next entry.
    throttled: bool,
    /// Time before which the channel must not run, because of the backoff after faults.
    run_after_ns: u64,
}

impl Channel {
    /// Creates a channel. Clears GP_GET and NEED_WAKEUP in the USERD.
    pub fn new(spec: ChannelSpec, userd: Userd, run_after_ns: u64) -> Self {
        // As the driver of a hardware GPU does: the ring may be where a channel was before.
        userd.store(abi::GP_GET, 0);
        userd.store(abi::GP_PUT, 0);
        userd.store(abi::NEED_WAKEUP, 0);
        Self::idle(spec, Some(userd), run_after_ns)
    }

    fn idle(spec: ChannelSpec, userd: Option<Userd>, run_after_ns: u64) -> Self {
        Self {
            spec,
            userd,
            get: 0,
            seen_put: 0,
            segment: None,
            window: [0; WINDOW],
            window_len: 0,
            window_next: 0,
            decoder: Decoder::default(),
            bound: [0; 8],
            host: HostClass::default(),
            copy: CopyClass::default(),
            compute: ComputeClass::default(),
            active: None,
            error: None,
            engine_ns: 0,
            engine_time: EngineTime::default(),
            launches: 0,
            charged: (0, 0),
            blocked_since: None,
            throttled: false,
            run_after_ns,
        }
    }

    /// Returns the status.
    pub fn status(&self) -> ChannelStatus {
        ChannelStatus {
            error: self.error.map_or(0, |fault| fault.code),
            error_info: self.error.map_or(0, |fault| fault.info),
            gp_get: self.get,
            engine_ns: self.engine_ns,
        }
    }

    /// Returns the specification.
    pub fn spec(&self) -> &ChannelSpec {
        &self.spec
    }

    /// Returns whether the USERD is in an import.
    pub fn uses_userd_in(&self, memory: MemoryId) -> bool {
        self.userd.as_ref().is_some_and(|userd| userd.memory == Some(memory))
    }

    /// Faults the channel and drops its USERD. Returns false, and keeps the first fault, if the
    /// channel has faulted before.
    pub fn fail(&mut self, fault: Fault) -> bool {
        self.active = None;
        self.segment = None;
        // Without an access to it: a store can sleep while the client punches holes.
        self.userd = None;
        let first = self.error.is_none();
        self.error.get_or_insert(fault);
        first
    }

    /// Forgets for how long the channel has been blocked.
    pub fn forget_wait(&mut self) {
        self.blocked_since = None;
    }

    /// Starts the accounting of a run.
    pub fn begin(&mut self, now_ns: u64) {
        self.engine_time = EngineTime::new(now_ns);
    }

    /// Returns the time of the last run by engine.
    pub fn engine_time(&self) -> EngineTime {
        self.engine_time
    }

    /// Charges engine time. Returns the time that the current kernel or transfer has used so far.
    pub fn charge(&mut self, ns: u64) -> u64 {
        self.engine_ns += ns;
        let working = matches!(self.active, Some(Active::Transfer(_) | Active::Grid(_)));
        let before = if self.charged.0 == self.launches { self.charged.1 } else { 0 };
        self.charged = (self.launches, if working { before + ns } else { 0 });
        self.charged.1
    }

    /// Returns for how many nanoseconds the channel has been blocked on one semaphore.
    pub fn blocked_ns(&self, now_ns: u64) -> u64 {
        self.blocked_since.map_or(0, |since| now_ns.saturating_sub(since))
    }

    /// Polls the ring, or the semaphore that the channel waits for. `may_submit` is false while the
    /// quota of submissions delays the next entry.
    pub fn poll(&mut self, now_ns: u64, spaces: &AddressSpaces, may_submit: bool) -> Readiness {
        if self.error.is_some() {
            return Readiness::Idle;
        }
        if now_ns < self.run_after_ns {
            return if self.has_work() { Readiness::Waiting } else { Readiness::Idle };
        }
        match &self.active {
            // An MMU fault of the semaphore is reported when the channel runs.
            Some(Active::Acquire(acquire)) if self.is_blocked(acquire, spaces) => {
                self.blocked_since.get_or_insert(now_ns);
                Readiness::Waiting
            }
            None if self.segment.is_none() && !may_submit && self.has_work() => {
                self.throttled = true;
                Readiness::Waiting
            }
            _ if self.has_work() => Readiness::Ready,
            _ => Readiness::Idle,
        }
    }

    /// Returns the address of the machine code that the channel has just refused to run.
    pub fn take_machine_code(&mut self) -> Option<u64> {
        self.compute.take_machine_code()
    }

    fn is_blocked(&self, acquire: &Acquire, spaces: &AddressSpaces) -> bool {
        let space = spaces.get(self.spec.space);
        space.is_some_and(|space| acquire.run(space) == Ok(Progress::Blocked))
    }

    fn has_work(&self) -> bool {
        self.active.is_some() || self.segment.is_some() || self.put() != self.get
    }

    fn put(&self) -> u32 {
        self.userd.as_ref().map_or(self.get, |userd| userd.load(abi::GP_PUT))
    }

    /// Returns whether GP_PUT has changed since the last call.
    pub fn take_doorbell(&mut self) -> bool {
        let put = self.put();
        std::mem::replace(&mut self.seen_put, put) != put
    }

    /// Tells the guest whether the next doorbell needs a wake-up. A channel with work needs none.
    pub fn announce_sleep(&self, asleep: bool) {
        if let Some(userd) = &self.userd {
            userd.store(abi::NEED_WAKEUP, u32::from(asleep && !self.has_work()));
        }
    }
}
