//! Doorbells that are rung for a guest, which has a page of memory in the place of the GPU's own.
//!
//! The GPU's doorbell page is the same for everybody, and takes some 8 million rings a second. Whoever writes to it
//! faster than that makes all others wait, whatever its group's slice is and whether or not its channels are enabled: a
//! guest must not have it. So a thread looks at `GP_PUT` of each channel and rings for what is new, and at most so often.
//! A guest that has been quiet is told to wake it ([`userd::NEED_WAKEUP`]).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::Thread;
use std::time::{Duration, Instant};

use mdev_core::abi::{doorbell, userd};
use mdev_core::ids::Token;

use crate::mem::Mapping;

/// The least time between two rings, on average: 16 guests at it are fewer than the GPU takes.
const RING_EVERY: Duration = Duration::from_micros(3);

/// How long after the last new entry the next one is awaited at full speed. Whoever waits for one kernel before it starts
/// the next has kernels that long.
const SPIN: Duration = Duration::from_millis(1);

/// How long the GPU has fetched nothing of what it was rung for, before that counts as a queue that it is behind with: the
/// next entry can wait a little then, and nobody has to look all the time. And how often it is looked at.
const BEHIND: (Duration, Duration) = (Duration::from_micros(20), Duration::from_micros(30));

/// Then, how long and how often it is looked at: first often, then so often that a long kernel does not matter.
const OFTEN: (Duration, Duration) = (Duration::from_millis(10), Duration::from_micros(10));
const SELDOM: (Duration, Duration) = (Duration::from_millis(250), Duration::from_micros(100));

/// How often somebody looks who is asleep: a guest may think that it has woken him already.
const ASLEEP: Duration = Duration::from_millis(50);

/// Rings the GPU's doorbell.
pub fn ring(doorbell: &Mapping, token: Token) {
    fence(Ordering::SeqCst);
    let _ = doorbell.store_u32(doorbell::TOKEN, token.0);
}

/// A channel that is rung for.
#[derive(Debug)]
struct Ring {
    token: Token,
    view: Arc<Mapping>,
    userd: u64,
    /// Set before `rung` is locked for good: whoever looks all the time would not let go of it.
    gone: AtomicBool,
    /// `GP_PUT` when it was last rung for. Locked while its USERD is used.
    rung: Mutex<u32>,
}

impl Ring {
    /// Its USERD, unless it is gone or somebody else looks at it.
    fn use_it<T>(&self, work: impl FnOnce(&mut u32) -> T) -> Option<T> {
        if self.gone.load(Ordering::Acquire) {
            return None;
        }
        match self.rung.try_lock() {
            Ok(mut rung) => Some(work(&mut rung)),
            Err(TryLockError::Poisoned(rung)) => Some(work(&mut rung.into_inner())),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn put(&self) -> Option<u32> {
        self.view.load_u32(self.userd + userd::GP_PUT)
    }

    fn get(&self) -> Option<u32> {
        self.view.load_u32(self.userd + userd::GP_GET)
    }

    fn has_new(&self) -> bool {
        self.use_it(|rung| self.put().is_some_and(|put| put != *rung)).unwrap_or(false)
    }

    /// Says whether the guest has to wake whoever looks.
    fn say(&self, asleep: bool) {
        if !self.gone.load(Ordering::Acquire) {
            let _rung = self.rung.lock();
            let _ = self.view.store_u32(self.userd + userd::NEED_WAKEUP, asleep.into());
        }
    }
}

/// One look at a channel.
#[derive(Debug)]
struct Look {
    /// Whether it had new entries.
    new: bool,
    /// `GP_GET`.
    get: Option<u32>,
    /// Whether the GPU has not fetched everything.
    queued: bool,
}

/// What was seen of a channel.
#[derive(Debug)]
struct Seen {
    ring: Arc<Ring>,
    /// When it had something new.
    new_at: Instant,
    /// `GP_GET`, and since when it is that.
    get: Option<u32>,
    fetched_at: Instant,
    /// Whether the GPU has not fetched everything.
    queued: bool,
}

impl Seen {
    fn new(ring: Arc<Ring>, now: Instant) -> Self {
        Self { ring, new_at: now, get: None, fetched_at: now, queued: false }
    }

    /// Takes down a look; whether there was something new.
    fn note(&mut self, look: &Look, now: Instant) -> bool {
        if look.new {
            self.new_at = now;
        }
        if look.get != self.get {
            (self.get, self.fetched_at) = (look.get, now);
        }
        self.queued = look.queued;
        look.new
    }

    /// Whether it had something new just now, so that the next entry may come at once.
    fn is_in_use(&self, now: Instant) -> bool {
        now.duration_since(self.new_at) < SPIN
    }

    /// Whether that entry would have to wait for others anyway.
    fn is_behind(&self, now: Instant) -> bool {
        self.queued && now.duration_since(self.fetched_at) > BEHIND.0
    }
}

/// A channel's place among those that are rung for; dropped before its USERD's memory goes.
#[derive(Debug)]
pub struct Watched {
    bells: Arc<Bells>,
    ring: Arc<Ring>,
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.ring.gone.store(true, Ordering::Release);
        drop(self.ring.rung.lock());
        self.bells.rings().retain(|ring| !Arc::ptr_eq(ring, &self.ring));
        self.bells.changes.fetch_add(1, Ordering::Release);
        // Whoever sleeps has hold of its memory.
        self.bells.wake_up();
    }
}

/// The channels that are rung for, and who does.
#[derive(Debug)]
pub struct Bells {
    doorbell: Arc<Mapping>,
    rings: Mutex<Vec<Arc<Ring>>>,
    /// How often `rings` has changed.
    changes: AtomicU64,
    asleep: AtomicBool,
    stopped: AtomicBool,
    thread: OnceLock<Thread>,
    /// Rings for what was found by looking.
    pub polled: AtomicU64,
    /// Times that a guest has woken it.
    pub woken: AtomicU64,
}

impl Bells {
    /// No channels yet.
    pub fn new(doorbell: Arc<Mapping>) -> Arc<Self> {
        Arc::new(Self {
            doorbell,
            rings: Mutex::default(),
            changes: AtomicU64::new(0),
            asleep: AtomicBool::new(false),
            stopped: AtomicBool::new(false),
            thread: OnceLock::new(),
            polled: AtomicU64::new(0),
            woken: AtomicU64::new(0),
        })
    }

    fn rings(&self) -> MutexGuard<'_, Vec<Arc<Ring>>> {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Looks after a channel from now on, whose USERD is in memory of the guest's.
    pub fn add(self: &Arc<Self>, token: Token, view: Arc<Mapping>, userd: u64) -> Watched {
        let (gone, rung) = (AtomicBool::new(false), Mutex::new(0));
        let ring = Arc::new(Ring { token, view, userd, gone, rung });
        ring.say(false);
        self.rings().push(ring.clone());
        self.changes.fetch_add(1, Ordering::Release);
        self.wake_up();
        Watched { bells: self.clone(), ring }
    }

    /// Rings for a channel if it has new entries: whether it had, and whether the GPU has fetched all that it was rung for.
    /// Nothing where the channel is gone or somebody else looks at it.
    fn look(&self, one: &Ring) -> Option<Look> {
        one.use_it(|rung| {
            let (put, get) = (one.put(), one.get());
            let new = put.filter(|put| put != rung);
            if let Some(put) = new {
                *rung = put;
                ring(&self.doorbell, one.token);
            }
            Look { new: new.is_some(), get, queued: get != Some(*rung) }
        })
    }

    /// A guest has trapped: its channel is looked at now, and all of them after it.
    pub fn wake(&self, token: Token) {
        self.woken.fetch_add(1, Ordering::Relaxed);
        for one in self.rings().iter().filter(|ring| ring.token == token) {
            self.look(one);
        }
        self.wake_up();
    }

    fn wake_up(&self) {
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Some(thread) = self.thread.get()
        {
            thread.unpark();
        }
    }

    /// Ends [`Self::run`].
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.wake_up();
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }

    /// Looks until it is over.
    pub fn run(&self) {
        let _ = self.thread.set(std::thread::current());
        // Naps are short: the kernel would otherwise add 50 us to each.
        let _ = nix::sys::prctl::set_timerslack(1000);
        let (mut all, mut known) = (Vec::<Seen>::new(), None);
        let mut last = Instant::now();
        let mut next = last;
        while !self.stopped.load(Ordering::SeqCst) {
            let now = Instant::now();
            let changes = self.changes.load(Ordering::Acquire);
            if known != Some(changes) {
                all = self.rings().iter().map(|ring| Seen::new(Arc::clone(ring), now)).collect();
                known = Some(changes);
                last = now;
            }
            if now >= next {
                let mut new = 0;
                for seen in &mut all {
                    let look = self.look(&seen.ring);
                    new += u32::from(look.is_some_and(|look| seen.note(&look, now)));
                }
                if new > 0 {
                    self.polled.fetch_add(new.into(), Ordering::Relaxed);
                    last = now;
                    next = now + RING_EVERY * new;
                }
            }
            let mut in_use = all.iter().filter(|seen| seen.is_in_use(now));
            match now.duration_since(last) {
                quiet if quiet < SPIN && in_use.any(|seen| !seen.is_behind(now)) => {
                    std::hint::spin_loop();
                }
                quiet if quiet < SPIN => std::thread::sleep(BEHIND.1),
                quiet if quiet < OFTEN.0 => std::thread::sleep(OFTEN.1),
                quiet if quiet < SELDOM.0 => std::thread::sleep(SELDOM.1),
                _ => {
                    self.sleep(&all);
                    last = Instant::now();
                    for seen in &mut all {
                        seen.new_at = last;
                    }
                }
            }
        }
    }

    /// Sleeps until there is something new, or somebody says so.
    fn sleep(&self, all: &[Seen]) {
        let before = self.changes.load(Ordering::Acquire);
        self.asleep.store(true, Ordering::SeqCst);
        for seen in all {
            seen.ring.say(true);
        }
        // A guest writes GP_PUT, fences and reads NEED_WAKEUP; this writes NEED_WAKEUP, fences and reads GP_PUT.
        fence(Ordering::SeqCst);
        while self.asleep.load(Ordering::SeqCst)
            && !self.stopped.load(Ordering::SeqCst)
            && self.changes.load(Ordering::Acquire) == before
            && !all.iter().any(|seen| seen.ring.has_new())
        {
            std::thread::park_timeout(ASLEEP);
        }
        self.asleep.store(false, Ordering::SeqCst);
        for seen in all {
            seen.ring.say(false);
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::time::{ClockId, clock_gettime};

    use super::*;
    use crate::mem::SharedMemory;

    /// Processor time, of all, that is spent on one channel with something new every 0.2 ms.
    fn spent(gets: impl Fn(u32) -> u32) -> f64 {
        let page = || SharedMemory::new(c"test", 4096).unwrap().mapping;
        let (doorbell, view) = (page(), page());
        let bells = Bells::new(doorbell.clone());
        let watched = bells.add(Token(7), view.clone(), 0);
        let (runs, started) = (Arc::clone(&bells), Instant::now());
        let thread = std::thread::spawn(move || {
            runs.run();
            Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).unwrap())
        });
        for put in 1..1000 {
            view.store_u32(userd::GP_GET, gets(put)).unwrap();
            view.store_u32(userd::GP_PUT, put).unwrap();
            std::thread::sleep(Duration::from_micros(200));
        }
        bells.stop();
        let time = thread.join().unwrap();
        assert_eq!(doorbell.load_u32(doorbell::TOKEN), Some(7));
        drop(watched);
        time.as_secs_f64() / started.elapsed().as_secs_f64()
    }

    #[test]
    fn no_core_is_spent_on_a_guest_whose_queue_the_gpu_is_behind_with() {
        let behind = spent(|_| 0);
        assert!(behind < 0.5, "{behind:.2} of a core");
        // And where it is not behind, the next one is awaited: more is spent than on naps.
        let awaited = spent(|put| put);
        assert!(awaited > behind, "{awaited:.2}, {behind:.2} of a core");
    }
}
