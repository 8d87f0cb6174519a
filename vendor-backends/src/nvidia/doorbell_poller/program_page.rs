//! Doorbell page of programs, which ring it without a look whether the thread sleeps.
//!
//! The thread watches the page while a program can have it. The driver of a VM takes the page away
//! from its programs when the thread is to sleep ([`DoorbellWatch`]).

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

use ipc::mem::Mapping;
use mdev_core::abi::doorbell;
use mdev_core::gpu::DoorbellWatch;
use mdev_core::ids::Token;

use super::{DoorbellPoller, SLOW_INTERVAL};
use programs::ring_clock::RingClock;

/// Interval between two looks at all channels of programs without a ring. A look costs a cache line
/// for each channel, of which a program has 20.
pub(super) const LOOK: Duration = Duration::from_micros(20);
/// Number of looks at the page before the clock is read again: a few microseconds.
const SPINS: u32 = 32;
/// Value of the page's word after the thread has seen a ring. No channel has this token.
pub(super) const SEEN: u32 = u32::MAX;

/// Poll interval of an idle program.
const IDLE_INTERVAL: Duration = Duration::from_millis(1);
/// Time since the last new entry after which a program counts as idle.
const IDLE_AFTER: Duration = Duration::from_secs(10);

/// Spins for a moment, or until a program rings. A clock that is read more often than that slows
/// the other thread of the core.
pub(super) fn spin_for_ring(page: Option<&Mapping>) {
    let Some(page) = page else { return std::hint::spin_loop() };
    for _ in 0..SPINS {
        if page.load_u32(doorbell::TOKEN) != Some(SEEN) {
            return;
        }
        std::hint::spin_loop();
    }
}

/// Takes a program's ring from the page that it rings. Returns what the program has stored.
pub(super) fn take_ring(page: &Mapping) -> Option<Token> {
    let rung = page.load_u32(doorbell::TOKEN).filter(|token| *token != SEEN)?;
    // Before the channels are looked at: a ring in between is then seen later. A program stores
    // GP_PUT before it rings.
    page.store_u32(doorbell::TOKEN, SEEN);
    fence(Ordering::SeqCst);
    Some(Token(rung))
}

/// Returns the poll interval for programs that have rung for nothing in this time, which is more
/// than [`SLOW_UNTIL`](super::SLOW_UNTIL).
pub(super) fn idle_interval(quiet: Duration) -> Duration {
    if quiet < IDLE_AFTER { SLOW_INTERVAL } else { IDLE_INTERVAL }
}

/// Whether programs can have the page, and when one has rung.
#[derive(Debug, Default)]
pub(super) struct PageUse {
    clock: RingClock,
    /// No program has the page.
    withdrawn: AtomicBool,
}

impl PageUse {
    pub fn note_ring(&self) {
        self.clock.note_ring();
    }

    /// Returns whether a program may ring without waking the thread.
    pub fn is_given(&self) -> bool {
        !self.withdrawn.load(Ordering::SeqCst)
    }

    /// Notes that programs have a page, or none.
    pub fn set_given(&self, given: bool) {
        if self.withdrawn.swap(!given, Ordering::SeqCst) && given {
            self.note_ring();
        }
    }
}

impl DoorbellWatch for DoorbellPoller {
    fn quiet_for(&self) -> Duration {
        self.page_use.clock.quiet_for()
    }

    fn pause(&self) {
        self.page_use.set_given(false);
    }

    fn resume(&self) {
        self.page_use.set_given(true);
        self.unpark();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use ipc::mem::SharedMemory;
    use mdev_core::abi::userd;
    use mdev_core::gpu::EngineKind;

    use super::super::SLOW_UNTIL;
    use super::*;

    /// Waits for a condition.
    fn wait(what: &str, condition: impl Fn() -> bool) {
        let deadline = Instant::now() + Duration::from_secs(20);
        while !condition() {
            assert!(Instant::now() < deadline, "{what}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn the_thread_sleeps_while_no_program_has_the_page() {
        let page = || SharedMemory::new(c"test", 4096).unwrap().mapping;
        let (memory, rung) = (page(), page());
        let poller = DoorbellPoller::new(page());
        poller.set_program_page(rung.clone());
        let registration = poller.add(EngineKind::Copy, [Token(7); 2], memory.clone(), 0, false);
        let running = Arc::clone(&poller);
        let thread = std::thread::spawn(move || running.run());
        let ring = |put| {
            memory.store_u32(userd::GP_PUT, put).unwrap();
            rung.store_u32(doorbell::TOKEN, 7).unwrap();
        };
        ring(1);
        wait("ring 1", || registration.submissions() == 1);
        std::thread::sleep(2 * SLOW_UNTIL);
        assert!(!poller.asleep.load(Ordering::SeqCst), "a program has the page");
        assert!(poller.quiet_for() >= SLOW_UNTIL);
        poller.pause();
        wait("sleep", || poller.asleep.load(Ordering::SeqCst));
        // A program gets the page back, and rings.
        poller.resume();
        assert!(poller.quiet_for() < SLOW_UNTIL, "it is given for a while");
        ring(2);
        wait("ring 2", || registration.submissions() == 2);
        // A guest that rings without telling is noticed later.
        poller.pause();
        wait("second sleep", || poller.asleep.load(Ordering::SeqCst));
        ring(3);
        wait("ring 3", || registration.submissions() == 3);
        poller.stop();
        thread.join().unwrap();
    }
}
