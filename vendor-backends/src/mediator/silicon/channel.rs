//! A channel: a ring of pushbuffers that a guest fills, and how far the silicon is with it.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use mdev_core::abi::host::{
    CLASS as HOST, FIRST_CLASS_METHOD, GP_ENTRY_BYTES, GpEntry, SUBCHANNEL_COPY,
};
use mdev_core::abi::{compute, copy, notifier, userd};
use mdev_core::gpu::{ChannelSpec, ChannelStatus, EngineKind};
use mdev_core::ids::MemoryId;
use zerocopy::IntoBytes;

use super::address_space::AddressSpace;
use super::compute::ComputeClass;
use super::copy::{CopyClass, Transfer};
use super::counters::Counters;
use super::fault::{Context, Fault, Progress};
use super::host::{Acquire, Action, HostClass};
use super::kernels::Job;
use super::method::{Call, Decoded, Decoder};
use super::quota::Bucket;
use super::stretch::Stretch;
use crate::mem::Mapping;

/// Words of a pushbuffer that are fetched at a time.
const WINDOW: usize = 256;

/// What goes on beyond one method.
#[derive(Debug)]
enum Active {
    Transfer(Box<Transfer>),
    Grid(Job),
    Acquire(Acquire),
}

/// A segment of methods in work.
#[derive(Debug, Default)]
struct Segment {
    va: u64,
    /// Words that are not fetched yet.
    left: u32,
}

/// The memory that holds a channel's USERD.
#[derive(Debug)]
pub struct Userd {
    /// What it is in.
    pub mapping: Arc<Mapping>,
    /// Byte offset into it.
    pub offset: u64,
    /// Which import that is; `None` for video memory.
    pub memory: Option<MemoryId>,
}

impl Userd {
    fn load(&self, field: u64) -> u32 {
        self.mapping.load_u32(self.offset + field).unwrap_or_default()
    }

    fn store(&self, field: u64, value: u32) {
        let _ = self.mapping.store_u32(self.offset + field, value);
    }
}

/// Whether a channel could use the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// Nothing to do until the guest says so.
    Idle,
    /// It has work.
    Ready,
    /// It waits for something that nobody will announce: look again soon.
    Waiting,
}

/// One channel.
#[derive(Debug)]
pub struct Channel {
    spec: ChannelSpec,
    userd: Userd,
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
    /// Which engine the turn in work is for.
    stretch: Stretch,
    /// Counts launches, so that two are told apart.
    launches: u64,
    /// The launch in work when it was charged last, and what that has used so far.
    charged: (u64, u64),
    /// Since when it has been seen waiting for a semaphore.
    blocked_since: Option<u64>,
    /// The next entry has waited for the quota.
    held: bool,
    /// Until when a channel made after faults is held back, in nanoseconds of the clock.
    hold_until_ns: u64,
}

impl Channel {
    /// A new one; the ring starts where the USERD says, which is at 0 for a guest that clears it.
    pub fn new(spec: ChannelSpec, userd: Userd, hold_until_ns: u64) -> Self {
        userd.store(userd::GP_GET, 0);
        userd.store(userd::NEED_WAKEUP, 0);
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
            stretch: Stretch::default(),
            launches: 0,
            charged: (0, 0),
            blocked_since: None,
            held: false,
            hold_until_ns,
        }
    }

    /// How it is.
    pub fn status(&self) -> ChannelStatus {
        ChannelStatus {
            error: self.error.map_or(0, |fault| fault.code),
            error_info: self.error.map_or(0, |fault| fault.info),
            gp_get: self.get,
            engine_ns: self.engine_ns,
        }
    }

    /// Its interrupt vector.
    pub fn vector(&self) -> u32 {
        self.spec.vector
    }

    /// Whether its USERD is in that import.
    pub fn lives_in(&self, memory: MemoryId) -> bool {
        self.userd.memory == Some(memory)
    }

    /// Ends it. The first fault stays. False where it was dead already.
    pub fn fail(&mut self, fault: Fault) -> bool {
        self.active = None;
        self.segment = None;
        self.userd.store(userd::NEED_WAKEUP, 0);
        let fresh = self.error.is_none();
        self.error.get_or_insert(fault);
        fresh
    }

    /// A turn begins.
    pub fn begin(&mut self, now_ns: u64) {
        self.stretch = Stretch::new(now_ns);
    }

    /// Which engine the last turn was for.
    pub fn stretch(&self) -> Stretch {
        self.stretch
    }

    /// Charges engine time; what the kernel or transfer in work has used so far.
    pub fn charge(&mut self, ns: u64) -> u64 {
        self.engine_ns += ns;
        let working = matches!(self.active, Some(Active::Transfer(_) | Active::Grid(_)));
        let before = if self.charged.0 == self.launches { self.charged.1 } else { 0 };
        self.charged = (self.launches, if working { before + ns } else { 0 });
        self.charged.1
    }

    /// For how long it has been seen waiting for one semaphore, in nanoseconds.
    pub fn blocked_ns(&self, now_ns: u64) -> u64 {
        self.blocked_since.map_or(0, |since| now_ns.saturating_sub(since))
    }

    /// Looks at the ring, or at what it waits for. Without a `token` no entry may be taken from the ring.
    pub fn poll(&mut self, now_ns: u64, space: &AddressSpace, token: bool) -> Readiness {
        if self.error.is_some() {
            return Readiness::Idle;
        }
        if now_ns < self.hold_until_ns {
            return if self.has_work() { Readiness::Waiting } else { Readiness::Idle };
        }
        match &self.active {
            // A fault of the semaphore's address is found when it runs.
            Some(Active::Acquire(acquire)) if acquire.run(space) == Ok(Progress::Blocked) => {
                self.blocked_since.get_or_insert(now_ns);
                Readiness::Waiting
            }
            None if self.segment.is_none() && !token && self.has_work() => {
                self.held = true;
                Readiness::Waiting
            }
            _ if self.has_work() => Readiness::Ready,
            _ => Readiness::Idle,
        }
    }

    fn has_work(&self) -> bool {
        self.active.is_some() || self.segment.is_some() || self.put() != self.get
    }

    fn put(&self) -> u32 {
        self.userd.load(userd::GP_PUT)
    }

    /// Whether the guest has queued something since this was asked last: a doorbell.
    pub fn take_doorbell(&mut self) -> bool {
        let put = self.put();
        std::mem::replace(&mut self.seen_put, put) != put
    }

    /// Tells the guest whether the next doorbell needs a wake-up. Not where work waits already.
    pub fn announce_sleep(&self, asleep: bool) {
        if self.error.is_none() {
            self.userd.store(userd::NEED_WAKEUP, u32::from(asleep && !self.has_work()));
        }
    }

    /// Works until there is nothing more, the turn is over or it has to wait.
    pub fn run(
        &mut self,
        cx: Context<'_>,
        counters: &Counters,
        quota: &mut Option<Bucket>,
    ) -> Result<Progress, Fault> {
        self.blocked_since = None;
        loop {
            if let Some(active) = &mut self.active {
                let progress = match active {
                    Active::Transfer(transfer) => {
                        self.stretch.turn_to(EngineKind::Copy);
                        transfer.run(cx)?
                    }
                    Active::Grid(job) => {
                        self.stretch.turn_to(EngineKind::Compute);
                        super::compute::run(job, cx)?
                    }
                    Active::Acquire(acquire) => acquire.run(cx.space)?,
                };
                if progress != Progress::Done {
                    return Ok(progress);
                }
                self.active = None;
                // Where the device does the work, any piece of it is dear.
                if !cx.hardware.pace().on_cpu && cx.turn.expired() {
                    return Ok(Progress::More);
                }
            } else if self.window_next < self.window_len {
                let word = self.window[self.window_next];
                self.window_next += 1;
                match self.decoder.feed(word)? {
                    Decoded::Header => {}
                    Decoded::Call(call) => {
                        if self.call(cx, call)? {
                            return Ok(Progress::More);
                        }
                    }
                    Decoded::EndSegment => {
                        self.window_next = self.window_len;
                        self.segment = Some(Segment::default());
                    }
                }
                // A method may be as dear as a fetch: look at the time now and then.
                if self.window_next.is_multiple_of(64) && cx.turn.expired() {
                    return Ok(Progress::More);
                }
            } else if let Some(segment) = &mut self.segment {
                if segment.left == 0 {
                    self.segment = None;
                    self.retire(counters);
                    continue;
                }
                let words = (segment.left as usize).min(WINDOW);
                cx.space.read(segment.va, self.window[..words].as_mut_bytes())?;
                segment.va += 4 * words as u64;
                segment.left -= words as u32;
                (self.window_len, self.window_next) = (words, 0);
            } else if !self.fetch(cx, counters, quota)? {
                return Ok(Progress::Done);
            } else if cx.turn.expired() {
                return Ok(Progress::More);
            }
        }
    }

    /// Takes the next entry of the ring; false where there is none, or none may be taken yet.
    fn fetch(
        &mut self,
        cx: Context<'_>,
        counters: &Counters,
        quota: &mut Option<Bucket>,
    ) -> Result<bool, Fault> {
        let put = self.put();
        if put == self.get {
            return Ok(false);
        }
        if put >= self.spec.gpfifo_entries {
            return Err(Fault::host(put));
        }
        if let Some(bucket) = quota {
            if !bucket.take() {
                self.held = true;
                return Ok(false);
            }
            Counters::add(&counters.throttled, std::mem::take(&mut self.held).into());
        }
        let at = self.spec.gpfifo.0.wrapping_add(u64::from(self.get) * GP_ENTRY_BYTES);
        let raw = cx.space.load_u64(at)?;
        match GpEntry::decode(raw) {
            GpEntry::Segment { va, dwords } => self.segment = Some(Segment { va, left: dwords }),
            GpEntry::Control { opcode: 0 } => self.retire(counters),
            GpEntry::Control { .. } => return Err(Fault::host(raw)),
        }
        Ok(true)
    }

    /// An entry is done.
    fn retire(&mut self, counters: &Counters) {
        self.get = (self.get + 1) % self.spec.gpfifo_entries;
        self.userd.store(userd::GP_GET, self.get);
        counters.submissions.fetch_add(1, Ordering::Relaxed);
    }

    /// Executes a method; true where the channel gives up its turn.
    fn call(&mut self, cx: Context<'_>, call: Call) -> Result<bool, Fault> {
        let Call { subchannel, method, data } = call;
        let bound = &mut self.bound[usize::from(subchannel)];
        if method < FIRST_CLASS_METHOD {
            match self.host.method(cx, method, data)? {
                Action::None => {}
                Action::Yield => return Ok(true),
                Action::Acquire(acquire) => self.active = Some(Active::Acquire(acquire)),
                Action::Bind(class) => {
                    // On hardware the copy engine has a subchannel of its own, and the others are not wired to it.
                    let copies = subchannel == SUBCHANNEL_COPY;
                    let offered = class == HOST
                        || class == copy::CLASS && copies
                        || class == compute::CLASS
                            && !copies
                            && self.spec.engine == EngineKind::Compute;
                    if !offered {
                        return Err(Fault::host(class));
                    }
                    *bound = class;
                }
            }
            return Ok(false);
        }
        self.launches += 1;
        self.active = match *bound {
            copy::CLASS => self.copy.method(method, data)?.map(Box::new).map(Active::Transfer),
            compute::CLASS => self.compute.method(cx, method, data)?.map(Active::Grid),
            _ => return Err(Fault { code: notifier::PBDMA_ERROR, info: method.into() }),
        };
        Ok(false)
    }
}
