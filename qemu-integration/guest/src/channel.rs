//! Channels: a ring of commands, a doorbell, and a semaphore that shows the progress.
//!
//! The same code drives the software GPU and hardware. Each submission is one ring entry that ends
//! with a semaphore release, so the semaphore value alone tells which pushbuffer slots are free.

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
use crate::fence::{Fence, WaitPolicy};
use crate::memory::Buffer;
use crate::pushbuffer::Methods;

/// Default number of ring entries.
pub const DEFAULT_ENTRIES: u32 = 256;
/// Bytes of pushbuffer available to one submission.
const SLOT_BYTES: u64 = 1024;
/// Limit of method words in one submission. The slot also holds a release and an acquire (six words
/// each), an interrupt (two words) and a yield (one word).
pub const MAX_WORDS: usize = SLOT_BYTES as usize / 4 - 15;

/// Counters of a channel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelCounters {
    /// Submissions, each with one doorbell write.
    pub doorbells: u64,
    /// Wake-ups of a sleeping GPU, each a trapped write.
    pub wakes: u64,
    /// Wake-ups while earlier submissions were unfinished; should be zero.
    pub wakes_while_busy: u64,
    /// Submissions that had to wait for room in the ring.
    pub ring_full: u64,
}

/// Channel of a vGPU; destroyed when dropped.
#[derive(Debug)]
pub struct Channel {
    device: Device,
    created: ChannelCreated,
    memory: Buffer,
    layout: Layout,
    need_wakeup: bool,
    submitted: u32,
    /// Whether the last submission ended with the copy engine, on a channel that also has other
    /// engines.
    copying: bool,
    /// Last submission that woke the GPU, or a completed submission.
    woken: Fence,
    counters: ChannelCounters,
    wait_policy: WaitPolicy,
}

/// Layout of a channel's memory.
#[derive(Clone, Copy, Debug)]
struct Layout {
    entries: u32,
}

impl Layout {
    const fn userd(self) -> u64 {
        (self.entries as u64 * GP_ENTRY_BYTES).next_multiple_of(PAGE_SIZE)
    }

    /// The count of completed entries is also what waits look at.
    const fn semaphore(self) -> u64 {
        self.userd() + userd::PROGRESS
    }

    /// Methods that a channel made again from a saved one executes first.
    const fn preamble(self) -> u64 {
        self.userd() + PAGE_SIZE
    }

    const fn slot(self, number: u32) -> u64 {
        self.preamble() + SLOT_BYTES + number as u64 * SLOT_BYTES
    }
}

impl Channel {
    /// Creates a channel for `engine` and binds its classes.
    pub fn new(device: &Device, engine: EngineKind) -> Result<Self, GuestError> {
        Self::with_entries(device, engine, DEFAULT_ENTRIES)
    }

    /// Creates a channel with a ring of `entries` (a power of two).
    pub fn with_entries(
        device: &Device,
        engine: EngineKind,
        entries: u32,
    ) -> Result<Self, GuestError> {
        let most = device.info().max_gpfifo_entries;
        if !entries.is_power_of_two() || !(2..=most).contains(&entries) {
            return Err(GuestError::Invalid(format!(
                "a ring of {entries} entries: use a power of two from 2 to {most}"
            )));
        }
        let layout = Layout { entries };
        let memory = Buffer::guest(device, layout.slot(entries))?;
        let userd = memory.physical(layout.userd()).ok_or(GuestError::Lost)?;
        let mut methods = Methods::new();
        if engine == EngineKind::Compute {
            methods.set_object(host::SUBCHANNEL_COMPUTE, compute_class::CLASS);
            compute::set_up(&mut methods);
        }
        methods.set_object(host::SUBCHANNEL_COPY, copy_class::CLASS);
        // Submissions set everything else anew.
        memory.window().write(layout.preamble(), methods.words().as_bytes());
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
            preamble_va: memory.va() + layout.preamble(),
            preamble_dwords: methods.words().len() as u32,
            reserved: 0,
        })?;
        let mut channel = Self {
            device: device.clone(),
            created,
            memory,
            layout,
            need_wakeup: device.features().contains(mdev_core::abi::control::Features::NEED_WAKEUP),
            submitted: 0,
            copying: false,
            woken: Fence::new(0),
            counters: ChannelCounters::default(),
            wait_policy: WaitPolicy::default(),
        };
        let fence = channel.submit(&methods)?;
        channel.wait_for("Setting the channel up", fence, Duration::from_secs(5))?;
        Ok(channel)
    }

    /// Sets the policy for later waits.
    pub fn set_wait_policy(&mut self, policy: WaitPolicy) {
        self.wait_policy = policy;
    }

    /// Returns the vGPU of the channel.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns the channel's id and doorbell token.
    pub fn name(&self) -> ChannelCreated {
        self.created
    }

    /// Returns the channel's counters.
    pub fn counters(&self) -> ChannelCounters {
        self.counters
    }

    /// Queues methods. Returns at once unless the ring is full.
    pub fn submit(&mut self, methods: &Methods) -> Result<Fence, GuestError> {
        self.submit_with(methods, false)
    }

    /// Queues methods as [`Self::submit`] does, and has the vGPU interrupt once they are completed,
    /// if the platform has interrupts. For submissions that the caller waits for: [`Self::wait`]
    /// then sleeps until the interrupt.
    pub fn submit_and_interrupt(&mut self, methods: &Methods) -> Result<Fence, GuestError> {
        self.submit_with(methods, self.device.platform().interrupts())
    }

    fn submit_with(&mut self, methods: &Methods, interrupts: bool) -> Result<Fence, GuestError> {
        let words = methods.words();
        if words.len() > MAX_WORDS {
            return Err(GuestError::Invalid(format!(
                "{} words of methods: a submission takes at most {MAX_WORDS}",
                words.len()
            )));
        }
        // The semaphore must only grow, so wait for pending copies first.
        if self.copying && !methods.end_with_copies() {
            self.wait_idle()?;
        }
        self.copying = methods.end_with_copies();
        // One entry stays free: GP_PUT equal to GP_GET means an empty ring.
        let completed = self.completed();
        let in_flight = self.submitted.wrapping_sub(completed);
        if in_flight >= self.layout.entries - 1 {
            self.counters.ring_full += 1;
            let oldest = Fence::new(self.submitted.wrapping_sub(self.layout.entries - 2));
            self.wait_for("Room in the ring", oldest, self.wait_policy.limit)?;
        }
        let value = self.submitted.wrapping_add(1);
        let index = self.submitted & (self.layout.entries - 1);
        let slot = self.layout.slot(index);
        let semaphore = self.memory.va() + self.layout.semaphore();
        let mut end = Methods::new();
        // The last engine to work releases the semaphore: a copy engine runs in parallel with the
        // host engine and other engines.
        if methods.end_with_copies() {
            copy::release(&mut end, semaphore, value);
        } else {
            end.release(semaphore, value);
        }
        if interrupts {
            if methods.end_with_copies() {
                // The host engine does not wait for copies by itself.
                end.acquire(semaphore, value);
            }
            end.interrupt();
        }
        // A ring that never runs empty would block the other channels of its group.
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
        self.kick(value & (self.layout.entries - 1), Fence::new(completed));
        Ok(Fence { number: value, interrupts })
    }

    fn push_entry(&self, index: u32, entry: u64) {
        self.memory.window().write(u64::from(index) * GP_ENTRY_BYTES, &entry.to_le_bytes());
    }

    /// Publishes `put`, rings the doorbell, and wakes the GPU if it sleeps.
    ///
    /// `done` is a submission known to be completed.
    fn kick(&mut self, put: u32, done: Fence) {
        let window = self.memory.window();
        window.write32(self.layout.userd() + userd::GP_PUT, put);
        // GP_PUT must be visible before the doorbell write and before the read of NEED_WAKEUP. The
        // GPU sets NEED_WAKEUP and then reads GP_PUT once more, so at least one side sees the
        // other's write.
        fence(Ordering::SeqCst);
        self.device.platform().ring(self.created.token);
        self.counters.doorbells += 1;
        let asleep =
            self.need_wakeup && window.read32(self.layout.userd() + userd::NEED_WAKEUP) != 0;
        // While the work of the last wake-up is unfinished, the GPU will read GP_PUT again before
        // it sleeps. A burst of submissions therefore needs one wake-up.
        if !asleep {
            self.woken = done;
        } else if self.is_done(self.woken) {
            self.counters.wakes += 1;
            let previous = Fence::new(self.submitted.wrapping_sub(1));
            self.counters.wakes_while_busy += u64::from(!self.is_done(previous));
            self.woken = Fence::new(self.submitted);
            self.device.platform().write32(reg::WAKE, self.created.token);
        }
    }

    /// Returns the semaphore: the number of the last completed submission.
    pub fn completed(&self) -> u32 {
        self.memory.window().read32(self.layout.semaphore())
    }

    /// Returns whether a submission is completed.
    pub fn is_done(&self, fence: Fence) -> bool {
        fence.reached(self.completed())
    }

    /// Waits for a submission. Returns an error that describes the fault if the channel faults.
    pub fn wait(&self, fence: Fence) -> Result<(), GuestError> {
        self.wait_for("Work on the GPU", fence, self.wait_policy.limit)
    }

    fn wait_for(
        &self,
        what: &'static str,
        fence: Fence,
        limit: Duration,
    ) -> Result<(), GuestError> {
        let policy = WaitPolicy { limit, ..self.wait_policy };
        let pause = |short| {
            // The interrupt ends the pause.
            let longest = if fence.interrupts { policy.check_interval } else { short };
            self.device.platform().wait(longest);
        };
        if policy.wait(|| self.is_done(fence), || self.check(), pause)? {
            return Ok(());
        }
        self.check().and(Err(GuestError::Timeout { what, after: limit }))
    }

    /// Submits methods and waits for their completion.
    pub fn run(&mut self, methods: &Methods) -> Result<(), GuestError> {
        let fence = self.submit_and_interrupt(methods)?;
        self.wait(fence)
    }

    /// Waits until all submissions are completed.
    pub fn wait_idle(&self) -> Result<(), GuestError> {
        self.wait(Fence::new(self.submitted))
    }

    /// Queries the channel's state from the device.
    pub fn query(&self) -> Result<ChannelState, GuestError> {
        self.device.query_channel(self.created.channel)
    }

    /// Returns an error if the channel has faulted.
    pub fn check(&self) -> Result<(), GuestError> {
        let state = self.query()?;
        match state.error {
            0 => Ok(()),
            code => Err(GuestError::Channel { code, info: state.error_info }),
        }
    }

    /// Puts a raw entry in the ring, without a fence. For tests of invalid entries.
    #[doc(hidden)]
    pub fn submit_raw(&mut self, entry: u64) {
        let index = self.submitted & (self.layout.entries - 1);
        self.push_entry(index, entry);
        self.submitted = self.submitted.wrapping_add(1);
        self.kick_raw(self.submitted & (self.layout.entries - 1));
    }

    /// Writes any value to GP_PUT and rings the doorbell. For tests of invalid values.
    #[doc(hidden)]
    pub fn kick_raw(&mut self, put: u32) {
        let done = Fence::new(self.completed());
        self.woken = done;
        self.kick(put, done);
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // Must precede the release of the memory. A refusal means that the channel no longer
        // exists.
        let _ = self.device.destroy_channel(self.created.channel);
    }
}
