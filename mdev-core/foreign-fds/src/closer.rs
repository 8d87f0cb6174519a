//! Closing descriptors without waiting for their files.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of threads that close descriptors. Other descriptors wait.
///
/// A thread that waits for a descriptor is replaced by another one up to this number. At the
/// number, descriptors stay open until a thread is free again, and no more should be taken from
/// other processes ([`Closer::is_exhausted`]).
pub const MAX_CLOSING: usize = 16;

/// Time after which a thread that closes a descriptor counts as lost.
const STUCK: Duration = Duration::from_secs(1);
/// Time for which a thread waits for the next descriptor.
const IDLE: Duration = Duration::from_millis(100);
const STACK_BYTES: usize = 64 << 10;

/// Descriptors of other processes that are not closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backlog {
    /// Number of threads that have waited for a descriptor for a second or longer.
    pub lost_threads: usize,
    /// Number of messages whose descriptors wait for a thread.
    pub waiting: usize,
}

/// What a thread does.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// There is no thread.
    Free,
    /// The thread takes the next descriptors.
    Ready,
    /// The thread is closing descriptors, and has begun with one of them then.
    Closing(Instant),
}

impl Slot {
    /// Returns whether a thread waits for a descriptor.
    fn is_lost(&self, now: Instant) -> bool {
        matches!(self, Self::Closing(since) if now.saturating_duration_since(*since) >= STUCK)
    }
}

/// Descriptors to be closed, and the threads that close them.
#[derive(Debug)]
pub struct Closer {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Debug)]
struct State {
    /// Descriptors, each entry for one thread. No more than the process may have open.
    queue: VecDeque<Vec<OwnedFd>>,
    slots: [Slot; MAX_CLOSING],
    /// Number of lost threads up to which the log has a warning.
    warned: usize,
}

impl State {
    fn lost(&self) -> usize {
        let now = Instant::now();
        self.slots.iter().filter(|slot| slot.is_lost(now)).count()
    }

    /// Returns the number of lost threads if the log needs a warning: each time that it has doubled
    /// since there was none.
    fn due_warning(&mut self) -> Option<usize> {
        let lost = self.lost();
        if lost == 0 {
            self.warned = 0;
        }
        if lost == 0 || lost < 2 * self.warned {
            return None;
        }
        self.warned = lost;
        Some(lost)
    }
}

impl Closer {
    pub const fn new() -> Self {
        let slots = [Slot::Free; MAX_CLOSING];
        let state = State { queue: VecDeque::new(), slots, warned: 0 };
        Self { state: Mutex::new(state), work: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes descriptors on one thread, one after the other.
    pub fn close(&'static self, fds: Vec<OwnedFd>) {
        let mut state = self.state();
        state.queue.push_back(fds);
        let lost = state.due_warning();
        let ready = state.slots.iter().filter(|slot| matches!(slot, Slot::Ready)).count();
        let free = state.slots.iter().position(|slot| matches!(slot, Slot::Free));
        if ready >= state.queue.len() {
            self.work.notify_one();
        } else if let Some(slot) = free {
            let thread = thread::Builder::new().name("close".into()).stack_size(STACK_BYTES);
            // Without a thread, the descriptors wait for the next attempt.
            if thread.spawn(move || self.serve(slot)).is_ok() {
                state.slots[slot] = Slot::Ready;
            }
        }
        drop(state);
        if let Some(lost) = lost {
            log::warn!(
                "{lost} of {MAX_CLOSING} threads wait for descriptors of other processes to be closed"
            );
        }
    }

    /// Closes descriptors until none comes for some time.
    fn serve(&self, slot: usize) {
        let mut state = self.state();
        loop {
            let Some(fds) = state.queue.pop_front() else {
                let waited = self.work.wait_timeout(state, IDLE);
                let (after, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                state = after;
                if timeout.timed_out() && state.queue.is_empty() {
                    state.slots[slot] = Slot::Free;
                    return;
                }
                continue;
            };
            for fd in fds {
                state.slots[slot] = Slot::Closing(Instant::now());
                drop(state);
                drop(fd);
                state = self.state();
            }
            state.slots[slot] = Slot::Ready;
        }
    }

    /// Returns what is not closed.
    pub fn backlog(&self) -> Backlog {
        let state = self.state();
        Backlog { lost_threads: state.lost(), waiting: state.queue.len() }
    }

    /// Returns whether descriptors wait, and no thread gets round to them.
    pub fn is_exhausted(&self) -> bool {
        let state = self.state();
        let now = Instant::now();
        let is_gone = |slot: &Slot| matches!(slot, Slot::Free) || slot.is_lost(now);
        !state.queue.is_empty() && state.slots.iter().all(is_gone)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warning_comes_each_time_that_the_lost_threads_have_doubled() {
        let long_ago = Instant::now().checked_sub(2 * STUCK).unwrap();
        let closer = Closer::new();
        let mut state = closer.state();
        let mut warned = Vec::new();
        for lost in (0..=MAX_CLOSING).chain([0, 1]) {
            for (number, slot) in state.slots.iter_mut().enumerate() {
                *slot = if number < lost { Slot::Closing(long_ago) } else { Slot::Ready };
            }
            warned.extend(state.due_warning());
        }
        assert_eq!(warned, [1, 2, 4, 8, 16, 1]);
    }
}
