//! Exclusion of the queue's thread and of messages of the VM that change guest memory.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
struct State {
    /// The thread is at work.
    busy: bool,
    /// The event loop holds the thread off.
    held: bool,
}

/// Lets either the queue's thread work, or the event loop change what the thread uses. Unlike a
/// lock, it is held from one call to a later one.
#[derive(Debug, Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until(&self, ready: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let waited = self.changed.wait_while(self.lock(), |state| !ready(state));
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the thread work from now on: it is the first to do so.
    pub fn reserve(&self) {
        self.lock().busy = true;
    }

    /// Begins work of the thread, once the event loop does not hold it off. The work ends when the
    /// result is dropped.
    pub fn enter(&self) -> Entered<'_> {
        self.wait_until(|state| !state.held).busy = true;
        Entered(self)
    }

    /// Holds the thread off, once it is not at work.
    pub fn hold(&self) {
        self.wait_until(|state| !state.busy).held = true;
    }

    /// Returns whether the thread is held off.
    pub fn is_held(&self) -> bool {
        self.lock().held
    }

    /// Lets the thread work again.
    pub fn release(&self) {
        self.lock().held = false;
        self.changed.notify_all();
    }
}

/// Work of the thread.
#[derive(Debug)]
pub struct Entered<'a>(&'a Gate);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.0.lock().busy = false;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use super::*;

    #[test]
    fn the_thread_and_the_event_loop_exclude_each_other() {
        const ROUNDS: u32 = 1000;
        let (gate, inside) = (Gate::default(), AtomicBool::new(false));
        let rounds = AtomicU32::new(0);
        gate.reserve();
        let section = || {
            assert!(!inside.swap(true, Ordering::SeqCst), "both at once");
            rounds.fetch_add(1, Ordering::SeqCst);
            inside.store(false, Ordering::SeqCst);
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(rounds.load(Ordering::SeqCst), 0, "the thread is the first");
                for _ in 0..ROUNDS {
                    let _entered = gate.enter();
                    section();
                }
            });
            for _ in 0..ROUNDS {
                gate.hold();
                section();
                gate.release();
            }
        });
        assert_eq!(rounds.into_inner(), 2 * ROUNDS);
    }
}
