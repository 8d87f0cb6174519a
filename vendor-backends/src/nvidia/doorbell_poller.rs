//! Doorbell polling: a thread that rings the GPU's doorbell on behalf of a guest.
//!
//! All clients of a GPU share one doorbell page. The GPU accepts about 8 million rings a second. A
//! guest that writes to the page faster delays all other vGPUs, whatever the time slices are and
//! whether or not its channels are enabled. The guest therefore gets ordinary memory instead of the
//! page. This thread polls `GP_PUT` of each channel and rings for new entries at a bounded rate.
//! After a quiet period the thread sleeps, and the guest has to wake it ([`userd::NEED_WAKEUP`]).
//! CUDA programs know nothing of that: the thread watches the word that they ring, and sleeps only
//! while no program has the page.
//!
//! * `polled_channel`: a channel, and its recent activity
//! * `program_page`: the doorbell page of CUDA programs
//! * `submissions`: when the compute engine got work
//! * `pace`: how often to ring, and when to expect the next entry

mod pace;
mod polled_channel;
mod program_page;
mod submissions;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use ipc::mem::Mapping;
use mdev_core::abi::doorbell;
#[cfg(any(doc, test))]
use mdev_core::abi::userd;
use mdev_core::gpu::EngineKind;
use mdev_core::ids::Token;

use self::pace::{Allowance, Pace};
use self::polled_channel::{Channel, ChannelActivity, Poll, SPIN};
use self::program_page::{PageUse, SEEN, spin_for_ring, take_ring};
pub use self::submissions::Submissions;

/// Minimum mean time between two rings. 16 guests at this rate stay below the GPU's limit.
const RING_INTERVAL: Duration = Duration::from_micros(3);
/// Rings that may follow each other without that time: one launch of a CUDA graph rings for several
/// channels.
const RING_BURST: u32 = 16;

/// Poll interval while the GPU is backlogged.
const BACKLOG_INTERVAL: Duration = Duration::from_micros(30);

/// Time since the last new entry up to which the thread polls every [`FAST_INTERVAL`].
const FAST_UNTIL: Duration = Duration::from_millis(100);
/// Poll interval after spinning.
const FAST_INTERVAL: Duration = Duration::from_micros(10);

/// Time since the last new entry up to which the thread polls every [`SLOW_INTERVAL`]. After that
/// it sleeps, unless there are channels of programs.
const SLOW_UNTIL: Duration = Duration::from_secs(1);
/// Poll interval before the thread sleeps.
const SLOW_INTERVAL: Duration = Duration::from_micros(50);

/// Poll interval of the sleeping thread, for guests that miss [`userd::NEED_WAKEUP`].
const SLEEP_INTERVAL: Duration = Duration::from_millis(50);

/// Registration of a channel with the poller. Must be dropped before the memory of the USERD goes.
#[derive(Debug)]
pub struct Registration {
    poller: Arc<DoorbellPoller>,
    channel: Arc<Channel>,
}

impl Registration {
    /// Rings for the channel, whatever its `GP_PUT` is.
    pub fn ring(&self) {
        self.channel.ring(&self.poller.doorbell);
    }

    /// Notes that an earlier process has rung for the channel.
    pub fn note_used(&self) {
        self.channel.rings.fetch_max(1, Ordering::Relaxed);
    }

    /// Returns the number of rings for the channel. The GPU executes no work without a ring.
    pub fn rings(&self) -> u64 {
        self.channel.rings.load(Ordering::Relaxed)
    }

    /// Returns the number of rings for new entries.
    pub fn submissions(&self) -> u64 {
        self.channel.submissions.load(Ordering::Relaxed)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.channel.removed.store(true, Ordering::Release);
        drop(self.channel.rung_put.lock());
        self.poller.channels().retain(|channel| !Arc::ptr_eq(channel, &self.channel));
        self.poller.changes.fetch_add(1, Ordering::Release);
        // A sleeping poller keeps a reference to the memory.
        self.poller.unpark();
    }
}

/// The polled channels of a vGPU, and the state of the thread that polls them.
#[derive(Debug)]
pub struct DoorbellPoller {
    doorbell: Arc<Mapping>,
    /// The page that programs ring, whichever channel they ring for.
    program_page: Mutex<Option<Arc<Mapping>>>,
    page_use: PageUse,
    channels: Mutex<Vec<Arc<Channel>>>,
    /// Number of changes of `channels`.
    changes: AtomicU64,
    asleep: AtomicBool,
    /// The gate is closed: no channel is rung for.
    gated: AtomicBool,
    stopped: AtomicBool,
    thread: OnceLock<Thread>,
    /// When the compute engine got work.
    pub submissions: Arc<Submissions>,
    /// Number of rings for entries that polling found.
    pub polled: AtomicU64,
    /// Number of wakeups by the guest.
    pub wakeups: AtomicU64,
}

impl DoorbellPoller {
    /// Creates a poller without channels.
    pub fn new(doorbell: Arc<Mapping>) -> Arc<Self> {
        Arc::new(Self {
            doorbell,
            program_page: Mutex::default(),
            page_use: PageUse::default(),
            channels: Mutex::default(),
            changes: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            gated: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            thread: OnceLock::new(),
            submissions: Arc::default(),
            polled: AtomicU64::new(0),
            wakeups: AtomicU64::new(0),
        })
    }

    fn channels(&self) -> MutexGuard<'_, Vec<Arc<Channel>>> {
        self.channels.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the page that programs ring.
    pub fn set_program_page(&self, page: Arc<Mapping>) {
        page.store_u32(doorbell::TOKEN, SEEN);
        *self.program_page.lock().unwrap_or_else(PoisonError::into_inner) = Some(page);
        self.page_use.set_given(true);
        self.changes.fetch_add(1, Ordering::Release);
        self.unpark();
    }

    /// Adds a channel of `engine` with a USERD at `userd_offset` of the guest's `memory`, and with
    /// the tokens of the guest and of the GPU. `wakes` says whether the guest knows
    /// [`userd::NEED_WAKEUP`].
    pub fn add(
        self: &Arc<Self>,
        engine: EngineKind,
        [token, gpu_token]: [Token; 2],
        memory: Arc<Mapping>,
        userd_offset: u64,
        wakes: bool,
    ) -> Registration {
        let channel = Arc::new(Channel {
            engine,
            token,
            gpu_token,
            memory,
            userd_offset,
            wakes,
            removed: AtomicBool::new(false),
            rings: AtomicU64::new(0),
            submissions: AtomicU64::new(0),
            rung_put: Mutex::new(0),
        });
        channel.set_need_wakeup(false);
        self.channels().push(channel.clone());
        self.changes.fetch_add(1, Ordering::Release);
        self.unpark();
        Registration { poller: self.clone(), channel }
    }

    /// Stops ringing behind a closed gate, or rings again. Entries that are new meanwhile are rung
    /// for when the gate opens.
    pub fn set_gated(&self, gated: bool) {
        if self.gated.swap(gated, Ordering::SeqCst) && !gated {
            self.unpark();
        }
    }

    /// Polls a channel and rings for new entries. None if the channel is removed, if the gate is
    /// closed, or if another thread polls the channel.
    fn poll(&self, channel: &Channel) -> Option<Poll> {
        if self.gated.load(Ordering::Relaxed) {
            return None;
        }
        channel.try_access(|rung_put| {
            let (put, gp_get) = (channel.gp_put(), channel.gp_get());
            let new = put.filter(|put| put != rung_put);
            if let Some(put) = new {
                *rung_put = put;
                channel.submissions.fetch_add(1, Ordering::Relaxed);
                channel.ring(&self.doorbell);
                if channel.engine == EngineKind::Compute {
                    self.submissions.note(Instant::now());
                }
            }
            Poll { new_entries: new.is_some(), gp_get, queued: gp_get != Some(*rung_put) }
        })
    }

    /// Handles a trapped doorbell write: polls the channel at once, and wakes the thread.
    pub fn wake(&self, token: Token) {
        self.wakeups.fetch_add(1, Ordering::Relaxed);
        for channel in self.channels().iter().filter(|channel| channel.token == token) {
            self.poll(channel);
        }
        self.unpark();
    }

    fn unpark(&self) {
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Ends [`Self::run`].
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.unpark();
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Returns the page to watch, if there are channels of programs.
    fn page_to_watch(&self, all: &[ChannelActivity]) -> Option<Arc<Mapping>> {
        let programs = !all.iter().all(|one| one.channel.wakes);
        let page = self.program_page.lock().unwrap_or_else(PoisonError::into_inner);
        page.clone().filter(|_| programs)
    }

    /// Polls all channels, first the one that a program has rung for. Returns the number of rings.
    fn poll_all(&self, all: &mut [ChannelActivity], rung: Option<Token>, now: Instant) -> u32 {
        let mut rings = 0;
        let mut poll = |one: &mut ChannelActivity| {
            let poll = self.poll(&one.channel);
            rings += u32::from(poll.is_some_and(|poll| one.record(&poll, now)));
        };
        if let Some(first) = all.iter_mut().find(|one| Some(one.token) == rung) {
            poll(first);
        }
        // A ring for another channel may have taken the place of this one's.
        all.iter_mut().for_each(poll);
        self.polled.fetch_add(rings.into(), Ordering::Relaxed);
        rings
    }

    /// Polls until [`Self::stop`] is called.
    pub fn run(&self) {
        let _ = self.thread.set(std::thread::current());
        // The default timer slack adds 50 us to each sleep.
        let _ = nix::sys::prctl::set_timerslack(1000);
        let (mut all, mut known, mut page) = (Vec::<ChannelActivity>::new(), None, None);
        let (mut last, mut spin) = (Instant::now(), false);
        let mut next_look = last;
        let (mut allowance, mut pace) = (Allowance { next: last }, Pace::default());
        while !self.stopped.load(Ordering::SeqCst) {
            let now = Instant::now();
            let changes = self.changes.load(Ordering::Acquire);
            if known != Some(changes) {
                let activity = |channel: &Arc<_>| ChannelActivity::new(Arc::clone(channel), now);
                all = self.channels().iter().map(activity).collect();
                page = self.page_to_watch(&all);
                known = Some(changes);
                (last, next_look) = (now, now);
            }
            let rung = page.as_deref().and_then(take_ring);
            if rung.is_some() {
                next_look = now;
                self.page_use.note_ring();
            }
            if now >= allowance.next && now >= next_look {
                let rings = self.poll_all(&mut all, rung, now);
                if rings > 0 {
                    pace.record(now.duration_since(last));
                    last = now;
                    allowance.take(rings, now);
                }
                if page.is_some() {
                    next_look = now + program_page::LOOK;
                }
                spin = all.iter().any(|one| one.is_active(now) && !one.is_backlogged(now));
            }
            let quiet = now.duration_since(last);
            let interval = match quiet {
                quiet if quiet < SPIN && !spin => Some(BACKLOG_INTERVAL),
                quiet if quiet < SPIN => pace.sleep(quiet),
                quiet if quiet < FAST_UNTIL => Some(pace.sleep(quiet).unwrap_or(FAST_INTERVAL)),
                quiet if quiet < SLOW_UNTIL => Some(SLOW_INTERVAL),
                quiet if page.is_some() && self.page_use.is_given() => {
                    Some(program_page::idle_interval(quiet))
                }
                _ => {
                    self.sleep(&all, page.is_some());
                    last = Instant::now();
                    for one in &mut all {
                        one.new_entries_at = last;
                    }
                    continue;
                }
            };
            match interval {
                Some(interval) => std::thread::sleep(interval),
                None => spin_for_ring(page.as_deref()),
            }
        }
    }

    /// Sleeps until a channel has new entries, the channels change, the thread is woken, or
    /// programs have their page again.
    fn sleep(&self, all: &[ChannelActivity], programs: bool) {
        let before = self.changes.load(Ordering::Acquire);
        self.asleep.store(true, Ordering::SeqCst);
        for one in all {
            one.channel.set_need_wakeup(true);
        }
        // A guest writes GP_PUT, fences and reads NEED_WAKEUP. The poller writes NEED_WAKEUP,
        // fences and reads GP_PUT. At least one of them sees the other's write.
        fence(Ordering::SeqCst);
        while self.asleep.load(Ordering::SeqCst)
            && !self.stopped.load(Ordering::SeqCst)
            && self.changes.load(Ordering::Acquire) == before
            && !(programs && self.page_use.is_given())
            && (self.gated.load(Ordering::SeqCst)
                || !all.iter().any(|one| one.channel.has_new_entries()))
        {
            std::thread::park_timeout(SLEEP_INTERVAL);
        }
        self.asleep.store(false, Ordering::SeqCst);
        for one in all {
            one.channel.set_need_wakeup(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use ipc::mem::SharedMemory;
    use nix::time::{ClockId, clock_gettime};

    use super::*;

    /// Returns the share of a core that the thread uses for a channel with new entries after these
    /// pauses in turn, in microseconds. `get_of` maps `GP_PUT` to `GP_GET`.
    fn cpu_share(pauses: &[u64], get_of: impl Fn(u32) -> u32) -> f64 {
        let page = || SharedMemory::new(c"test", 4096).unwrap().mapping;
        let (doorbell, memory) = (page(), page());
        let poller = DoorbellPoller::new(doorbell.clone());
        let registration = poller.add(EngineKind::Compute, [Token(7); 2], memory.clone(), 0, true);
        let (running, started) = (Arc::clone(&poller), Instant::now());
        let thread = std::thread::spawn(move || {
            running.run();
            Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap())
        });
        for (put, pause) in (1..1000).zip(pauses.iter().cycle()) {
            memory.store_u32(userd::GP_GET, get_of(put)).unwrap();
            memory.store_u32(userd::GP_PUT, put).unwrap();
            std::thread::sleep(Duration::from_micros(*pause));
        }
        poller.stop();
        let cpu_time = thread.join().unwrap();
        assert_eq!(doorbell.load_u32(doorbell::TOKEN), Some(7));
        drop(registration);
        cpu_time.as_secs_f64() / started.elapsed().as_secs_f64()
    }

    #[test]
    fn a_ring_of_a_program_is_seen_on_its_page() {
        let page = || SharedMemory::new(c"test", 4096).unwrap().mapping;
        let (doorbell, memory, rung) = (page(), page(), page());
        let poller = DoorbellPoller::new(doorbell.clone());
        poller.set_program_page(rung.clone());
        let registration = poller.add(EngineKind::Compute, [Token(7); 2], memory.clone(), 0, false);
        let running = Arc::clone(&poller);
        let thread = std::thread::spawn(move || running.run());
        let deadline = Instant::now() + Duration::from_secs(20);
        // Also after quiet times: programs wake nothing.
        for (put, quiet) in [(1, 0), (2, 30), (3, 400)] {
            std::thread::sleep(Duration::from_millis(quiet));
            memory.store_u32(userd::GP_PUT, put).unwrap();
            rung.store_u32(doorbell::TOKEN, 7).unwrap();
            while registration.submissions() < u64::from(put) {
                assert!(Instant::now() < deadline, "ring {put}");
                std::thread::yield_now();
            }
        }
        assert_eq!(doorbell.load_u32(doorbell::TOKEN), Some(7));
        assert_eq!(memory.load_u32(userd::NEED_WAKEUP), Some(0), "it is the program's memory");
        poller.stop();
        thread.join().unwrap();
        assert_eq!(poller.wakeups.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn the_thread_spins_only_where_a_ring_is_due() {
        const REGULAR: [u64; 1] = [250];
        const IRREGULAR: [u64; 4] = [10, 10, 10, 900];
        let spinning = cpu_share(&IRREGULAR, |put| put);
        let backlogged = cpu_share(&IRREGULAR, |_| 0);
        assert!(spinning > backlogged, "{spinning:.2}, {backlogged:.2} of a core");
        let predicted = cpu_share(&REGULAR, |put| put);
        assert!(spinning > predicted, "{spinning:.2}, {predicted:.2} of a core");
    }
}
