//! A channel: a ring of commands, its doorbell, and the semaphore that says how far it got.
//!
//! The same code drives both kinds of silicon. Each submission is one ring entry that ends with a semaphore release,
//! so that the semaphore alone says which pushbuffer slots are free again.

use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use mdev_core::abi::control::reg;
use mdev_core::abi::host::{GP_ENTRY_BYTES, GpEntry};
use mdev_core::abi::mailbox::{
    ChannelCreate, ChannelCreated, ChannelState, ENGINE_COMPUTE, ENGINE_COPY, USERD_GUEST,
};
use mdev_core::abi::{compute as compute_class, copy as copy_class, host, userd};
use mdev_core::gpu::EngineKind;
use mdev_core::units::PAGE_SIZE;
use zerocopy::IntoBytes;

use crate::GuestError;
use crate::compute;
use crate::copy;
use crate::device::Device;
use crate::fence::{Fence, Patience};
use crate::memory::Buffer;
use crate::pushbuffer::Methods;

/// Entries of a ring, unless told otherwise.
pub const DEFAULT_ENTRIES: u32 = 256;
/// Bytes of pushbuffer that one submission may take.
const SLOT_BYTES: u64 = 1024;
/// Words of methods that one submission may carry: the release at its end takes six, and giving way one.
pub const MAX_WORDS: usize = SLOT_BYTES as usize / 4 - 7;

/// What a channel has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelCounters {
    /// Submissions, each with one doorbell write.
    pub doorbells: u64,
    /// Wake-ups of a sleeping silicon, each a trapped write.
    pub wakes: u64,
    /// Wake-ups although earlier submissions were still unfinished: should be zero.
    pub wakes_while_busy: u64,
    /// Times a submission had to wait for room in the ring.
    pub ring_full: u64,
}

/// A channel of the vGPU; destroyed when dropped.
#[derive(Debug)]
pub struct Channel {
    device: Device,
    created: ChannelCreated,
    memory: Buffer,
    layout: Layout,
    need_wakeup: bool,
    submitted: u32,
    /// Whether the last submission was the copy engine's, beside others on the same channel.
    copying: bool,
    /// The last submission that the silicon was woken for, or one that is done.
    woken: Fence,
    counters: ChannelCounters,
    patience: Patience,
}

/// Where things are in a channel's memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    entries: u32,
}

impl Layout {
    const fn userd(self) -> u64 {
        (self.entries as u64 * GP_ENTRY_BYTES).next_multiple_of(PAGE_SIZE)
    }

    const fn semaphore(self) -> u64 {
        self.userd() + PAGE_SIZE
    }

    const fn slot(self, number: u32) -> u64 {
        self.semaphore() + PAGE_SIZE + number as u64 * SLOT_BYTES
    }
}

impl Channel {
    /// Makes a channel for `engine` and sets its classes up.
    pub fn new(device: &Device, engine: EngineKind) -> Result<Self, GuestError> {
        Self::with_entries(device, engine, DEFAULT_ENTRIES)
    }

    /// The same, with a ring of `entries` (a power of two).
    pub fn with_entries(
        device: &Device,
        engine: EngineKind,
        entries: u32,
    ) -> Result<Self, GuestError> {
        let most = device.info().max_gpfifo_entries;
        if !entries.is_power_of_two() || !(2..=most).contains(&entries) {
            return Err(GuestError::Invalid(format!("a ring of {entries} entries")));
        }
        let layout = Layout { entries };
        let memory = Buffer::guest(device, layout.slot(entries))?;
        let userd = memory.physical(layout.userd()).ok_or(GuestError::Lost)?;
        let created = device.create_channel(&ChannelCreate {
            engine: match engine {
                EngineKind::Copy => ENGINE_COPY,
                EngineKind::Compute => ENGINE_COMPUTE,
            },
            gpfifo_entries: entries,
            gpfifo_va: memory.va(),
            userd,
            userd_aperture: USERD_GUEST,
            vector: 0,
        })?;
        let mut channel = Self {
            device: device.clone(),
            created,
            memory,
            layout,
            need_wakeup: device.features().contains(mdev_core::abi::control::Features::NEED_WAKEUP),
            submitted: 0,
            copying: false,
            woken: Fence(0),
            counters: ChannelCounters::default(),
            patience: Patience::default(),
        };
        let mut methods = Methods::new();
        if engine == EngineKind::Compute {
            methods.set_object(host::SUBCHANNEL_COMPUTE, compute_class::CLASS);
            compute::set_up(&mut methods);
        }
        methods.set_object(host::SUBCHANNEL_COPY, copy_class::CLASS);
        let fence = channel.submit(&methods)?;
        channel.wait_for("Setting the channel up", fence, Duration::from_secs(5))?;
        Ok(channel)
    }

    /// How to wait from now on.
    pub fn set_patience(&mut self, patience: Patience) {
        self.patience = patience;
    }

    /// The vGPU it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// What the guest knows it by.
    pub fn name(&self) -> ChannelCreated {
        self.created
    }

    /// What it has done.
    pub fn counters(&self) -> ChannelCounters {
        self.counters
    }

    /// Queues methods, and returns at once unless the ring is full.
    pub fn submit(&mut self, methods: &Methods) -> Result<Fence, GuestError> {
        let words = methods.words();
        if words.len() > MAX_WORDS {
            return Err(GuestError::Invalid(format!(
                "{} words of methods, where a submission takes {MAX_WORDS}",
                words.len()
            )));
        }
        // The semaphore only grows: copies that are under way come first.
        if self.copying && !methods.end_with_copies() {
            self.wait_idle()?;
        }
        self.copying = methods.end_with_copies();
        // One entry stays free: GP_PUT equal to GP_GET means that there is nothing to do.
        let completed = self.completed();
        let in_flight = self.submitted.wrapping_sub(completed);
        if in_flight >= self.layout.entries - 1 {
            self.counters.ring_full += 1;
            let oldest = Fence(self.submitted.wrapping_sub(self.layout.entries - 2));
            self.wait_for("Room in the ring", oldest, self.patience.limit)?;
        }
        let value = self.submitted.wrapping_add(1);
        let index = self.submitted & (self.layout.entries - 1);
        let slot = self.layout.slot(index);
        let semaphore = self.memory.va() + self.layout.semaphore();
        let mut end = Methods::new();
        // Whoever works last says that it is done: a copy engine works beside the host and the other engines.
        if methods.end_with_copies() {
            copy::release(&mut end, semaphore, value);
        } else {
            end.release(semaphore, value);
        }
        // The silicon changes to another channel of the group when this one's ring runs dry, which it may never do.
        if in_flight > 0 {
            end.give_way();
        }
        let window = self.memory.window();
        window.write(slot, words.as_bytes());
        window.write(slot + size_of_val(words) as u64, end.words().as_bytes());
        let dwords = (words.len() + end.words().len()) as u32;
        let entry = GpEntry::Segment { va: self.memory.va() + slot, dwords };
        self.push_entry(index, entry.encode());
        self.submitted = value;
        self.kick(value & (self.layout.entries - 1), Fence(completed));
        Ok(Fence(value))
    }

    fn push_entry(&self, index: u32, entry: u64) {
        self.memory.window().write(u64::from(index) * GP_ENTRY_BYTES, &entry.to_le_bytes());
    }

    /// Publishes `put`, rings, and wakes the silicon if it sleeps.
    ///
    /// `done` is a submission that is known to be done.
    fn kick(&mut self, put: u32, done: Fence) {
        let window = self.memory.window();
        window.write32(self.layout.userd() + userd::GP_PUT, put);
        // GP_PUT has to be visible before the doorbell, and before NEED_WAKEUP is read: the silicon sets that word and
        // then looks at GP_PUT once more, so one of the two sees the other.
        fence(Ordering::SeqCst);
        self.device.platform().ring(self.created.token);
        self.counters.doorbells += 1;
        let asleep =
            self.need_wakeup && window.read32(self.layout.userd() + userd::NEED_WAKEUP) != 0;
        // While work that it was woken for is unfinished, the silicon is up or on its way, and will look at GP_PUT
        // before it sleeps again: a burst wakes it once.
        if !asleep {
            self.woken = done;
        } else if self.is_done(self.woken) {
            self.counters.wakes += 1;
            let previous = Fence(self.submitted.wrapping_sub(1));
            self.counters.wakes_while_busy += u64::from(!self.is_done(previous));
            self.woken = Fence(self.submitted);
            self.device.platform().write32(reg::WAKE, self.created.token);
        }
    }

    /// The semaphore: the number of the last submission that is done.
    pub fn completed(&self) -> u32 {
        self.memory.window().read32(self.layout.semaphore())
    }

    /// Whether a submission is done.
    pub fn is_done(&self, fence: Fence) -> bool {
        fence.reached(self.completed())
    }

    /// Waits for a submission; a channel that faults meanwhile is an error that says how.
    pub fn wait(&self, fence: Fence) -> Result<(), GuestError> {
        self.wait_for("Work on the GPU", fence, self.patience.limit)
    }

    fn wait_for(
        &self,
        what: &'static str,
        fence: Fence,
        limit: Duration,
    ) -> Result<(), GuestError> {
        let patience = Patience { limit, ..self.patience };
        if patience.wait(|| self.is_done(fence), || self.check())? {
            return Ok(());
        }
        self.check().and(Err(GuestError::Timeout { what, after: limit }))
    }

    /// Submits and waits.
    pub fn run(&mut self, methods: &Methods) -> Result<(), GuestError> {
        let fence = self.submit(methods)?;
        self.wait(fence)
    }

    /// Waits until everything that was submitted is done.
    pub fn wait_idle(&self) -> Result<(), GuestError> {
        self.wait(Fence(self.submitted))
    }

    /// What the device says of the channel.
    pub fn query(&self) -> Result<ChannelState, GuestError> {
        self.device.query_channel(self.created.channel)
    }

    /// An error if the channel has faulted.
    pub fn check(&self) -> Result<(), GuestError> {
        let state = self.query()?;
        match state.error {
            0 => Ok(()),
            code => Err(GuestError::Channel { code, info: state.error_info }),
        }
    }

    /// Puts a raw entry in the ring, with no fence: for tests of what the silicon refuses.
    #[doc(hidden)]
    pub fn submit_raw(&mut self, entry: u64) {
        let index = self.submitted & (self.layout.entries - 1);
        self.push_entry(index, entry);
        self.submitted = self.submitted.wrapping_add(1);
        self.kick_raw(self.submitted & (self.layout.entries - 1));
    }

    /// Writes anything to GP_PUT and rings: for tests of what the silicon refuses.
    #[doc(hidden)]
    pub fn kick_raw(&mut self, put: u32) {
        let done = Fence(self.completed());
        self.woken = done;
        self.kick(put, done);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Before its memory goes. Where the device refuses, the channel is gone already.
        let _ = self.device.destroy_channel(self.created.channel);
    }
}
