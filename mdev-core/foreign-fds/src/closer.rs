//! Closing descriptors without waiting for their files.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Maximum number of descriptors that are being closed. Others wait.
pub(crate) const MAX_CLOSING: usize = 16;

/// Time after which a descriptor that is being closed counts as one that cannot be closed.
const STUCK: Duration = Duration::from_secs(1);
/// Time for which a thread waits for the next descriptor.
const IDLE: Duration = Duration::from_millis(100);
const STACK_BYTES: usize = 64 << 10;

/// What a thread does.
#[derive(Clone, Copy, Debug)]
enum Slot {
    /// There is no thread.
    Free,
    /// The thread takes the next descriptor.
    Ready,
    /// The thread is closing a descriptor, since then.
    Closing(Instant),
}

/// Descriptors to be closed, and the threads that close them.
#[derive(Debug)]
pub struct Closer {
    state: Mutex<State>,
    work: Condvar,
}

#[derive(Debug)]
struct State {
    /// No more than the process may have open.
    queue: VecDeque<OwnedFd>,
    slots: [Slot; MAX_CLOSING],
}

impl Closer {
    pub const fn new() -> Self {
        let state = State { queue: VecDeque::new(), slots: [Slot::Free; MAX_CLOSING] };
        Self { state: Mutex::new(state), work: Condvar::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Closes a descriptor on a thread.
    pub fn close(&'static self, fd: OwnedFd) {
        let mut state = self.state();
        state.queue.push_back(fd);
        let ready = state.slots.iter().filter(|slot| matches!(slot, Slot::Ready)).count();
        if ready >= state.queue.len() {
            return self.work.notify_one();
        }
        let free = state.slots.iter().position(|slot| matches!(slot, Slot::Free));
        let Some(slot) = free else { return };
        let thread = thread::Builder::new().name("close".into()).stack_size(STACK_BYTES);
        // Without a thread, the descriptor waits for the next attempt.
        if thread.spawn(move || self.serve(slot)).is_ok() {
            state.slots[slot] = Slot::Ready;
        }
    }

    /// Closes descriptors until none comes for some time.
    fn serve(&self, slot: usize) {
        let mut state = self.state();
        loop {
            let Some(fd) = state.queue.pop_front() else {
                let waited = self.work.wait_timeout(state, IDLE);
                let (after, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
                state = after;
                if timeout.timed_out() && state.queue.is_empty() {
                    state.slots[slot] = Slot::Free;
                    return;
                }
                continue;
            };
            state.slots[slot] = Slot::Closing(Instant::now());
            drop(state);
            drop(fd);
            state = self.state();
            state.slots[slot] = Slot::Ready;
        }
    }

    /// Returns whether descriptors wait, and no thread gets round to them.
    pub fn is_exhausted(&self) -> bool {
        let state = self.state();
        let is_lost = |slot: &Slot| match slot {
            Slot::Free => true,
            Slot::Ready => false,
            Slot::Closing(since) => since.elapsed() >= STUCK,
        };
        !state.queue.is_empty() && state.slots.iter().all(is_lost)
    }
}
