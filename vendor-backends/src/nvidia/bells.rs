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
use mdev_core::gpu::GpuError;
use mdev_core::ids::Token;

use super::memory::Place;
use crate::mem::Mapping;

/// The least time between two rings, on average: 16 guests at it are fewer than the GPU takes.
const RING_EVERY: Duration = Duration::from_micros(3);

/// How long after the last new entry the next one is awaited at full speed. Whoever waits for one kernel before it starts
/// the next has kernels that long.
const SPIN: Duration = Duration::from_millis(1);

/// After that, how long and how often it is looked at: first often, then so often that a long kernel does not matter.
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

    /// Looks after a channel from now on.
    pub fn add(self: &Arc<Self>, token: Token, userd: &Place) -> Result<Watched, GpuError> {
        let view = userd.view.clone();
        let view = view.ok_or(GpuError::Unsupported("a USERD outside of guest memory"))?;
        let (gone, rung) = (AtomicBool::new(false), Mutex::new(0));
        let ring = Arc::new(Ring { token, view, userd: userd.offset, gone, rung });
        ring.say(false);
        self.rings().push(ring.clone());
        self.changes.fetch_add(1, Ordering::Release);
        self.wake_up();
        Ok(Watched { bells: self.clone(), ring })
    }

    /// Rings for a channel if it has new entries.
    fn look(&self, one: &Ring) -> bool {
        let new = one.use_it(|rung| {
            let put = one.put().filter(|put| put != rung)?;
            *rung = put;
            ring(&self.doorbell, one.token);
            Some(())
        });
        new.flatten().is_some()
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
        let (mut rings, mut seen) = (Vec::new(), None);
        let mut last = Instant::now();
        let mut next = last;
        while !self.stopped.load(Ordering::SeqCst) {
            let changes = self.changes.load(Ordering::Acquire);
            if seen != Some(changes) {
                rings.clone_from(&self.rings());
                seen = Some(changes);
                last = Instant::now();
            }
            let now = Instant::now();
            if now >= next {
                let new = rings.iter().filter(|one| self.look(one)).count() as u32;
                if new > 0 {
                    self.polled.fetch_add(new.into(), Ordering::Relaxed);
                    last = now;
                    next = now + RING_EVERY * new;
                }
            }
            match now.duration_since(last) {
                quiet if quiet < SPIN => std::hint::spin_loop(),
                quiet if quiet < OFTEN.0 => std::thread::sleep(OFTEN.1),
                quiet if quiet < SELDOM.0 => std::thread::sleep(SELDOM.1),
                _ => {
                    self.sleep(&rings);
                    last = Instant::now();
                }
            }
        }
    }

    /// Sleeps until there is something new, or somebody says so.
    fn sleep(&self, rings: &[Arc<Ring>]) {
        let before = self.changes.load(Ordering::Acquire);
        self.asleep.store(true, Ordering::SeqCst);
        for ring in rings {
            ring.say(true);
        }
        // A guest writes GP_PUT, fences and reads NEED_WAKEUP; this writes NEED_WAKEUP, fences and reads GP_PUT.
        fence(Ordering::SeqCst);
        while self.asleep.load(Ordering::SeqCst)
            && !self.stopped.load(Ordering::SeqCst)
            && self.changes.load(Ordering::Acquire) == before
            && !rings.iter().any(|ring| ring.has_new())
        {
            std::thread::park_timeout(ASLEEP);
        }
        self.asleep.store(false, Ordering::SeqCst);
        for ring in rings {
            ring.say(false);
        }
    }
}
