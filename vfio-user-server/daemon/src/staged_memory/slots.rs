//! Order of the work in the slots of staging memory.
//!
//! The work is a list of pieces, which belong to batches. A batch has a slot while its pieces are
//! worked on and while it is copied: one after the other, in this or in the other order.

use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mdev_core::sigbus::held::HeldThread;

/// Interval after which accesses that make no progress are ended.
const STUCK: Duration = Duration::from_secs(2);

/// State of the work, shared by the threads.
#[derive(Debug)]
pub struct Work<E> {
    state: Mutex<State<E>>,
    /// More pieces may be taken, or the work has failed.
    opened: Condvar,
    /// A piece is finished, or the work has failed.
    finished: Condvar,
}

#[derive(Debug)]
struct State<E> {
    /// Next piece that is not taken.
    next: usize,
    /// Whether each piece is finished.
    finished: Vec<bool>,
    /// Pieces of each batch that are not finished.
    left: Vec<usize>,
    /// Batches and pieces before these may be worked on.
    open_batches: usize,
    open_pieces: usize,
    failed: Option<E>,
    threads: Vec<HeldThread>,
}

impl<E: From<io::Error>> Work<E> {
    /// Begins work on batches with these numbers of pieces.
    pub fn new(batches: Vec<usize>) -> Self {
        let state = State {
            next: 0,
            finished: vec![false; batches.iter().sum()],
            left: batches,
            open_batches: 0,
            open_pieces: usize::MAX,
            failed: None,
            threads: Vec::new(),
        };
        Self { state: Mutex::new(state), opened: Condvar::new(), finished: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Works on pieces until there are none, or one has failed. `batch_of` returns the batch of a
    /// piece.
    pub fn run(
        &self,
        batch_of: impl Fn(usize) -> usize,
        mut piece: impl FnMut(usize) -> Result<(), E>,
    ) {
        match HeldThread::current() {
            Ok(thread) => self.lock().threads.push(thread),
            Err(error) => return self.fail(error.into()),
        }
        while let Some(index) = self.take(&batch_of) {
            let done = piece(index);
            let mut state = self.lock();
            match done {
                Ok(()) => {
                    state.finished[index] = true;
                    state.left[batch_of(index)] -= 1;
                }
                Err(error) => {
                    state.failed.get_or_insert(error);
                    self.opened.notify_all();
                }
            }
            drop(state);
            self.finished.notify_all();
        }
    }

    /// Takes the next piece, when it may be worked on.
    fn take(&self, batch_of: &impl Fn(usize) -> usize) -> Option<usize> {
        let mut state = self.lock();
        loop {
            let index = state.next;
            if state.failed.is_some() || index >= state.finished.len() {
                return None;
            }
            if batch_of(index) < state.open_batches && index < state.open_pieces {
                state.next += 1;
                return Some(index);
            }
            state = self.opened.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Allows work on the batches before this one.
    pub fn open_batches(&self, batches: usize) {
        self.lock().open_batches = batches;
        self.opened.notify_all();
    }

    /// Allows work on the pieces before this one only.
    pub fn open_pieces(&self, pieces: usize) {
        self.lock().open_pieces = pieces;
        self.opened.notify_all();
    }

    /// Ends the work with an error, unless one has ended it.
    pub fn fail(&self, error: E) {
        self.lock().failed.get_or_insert(error);
        self.opened.notify_all();
        self.finished.notify_all();
    }

    /// Waits until all pieces of a batch are finished. Returns false if a piece has failed.
    pub fn wait_for_batch(&self, batch: usize) -> bool {
        self.wait_until(|state| state.left[batch] == 0)
    }

    /// Waits until a piece is finished. Returns false if any piece has failed.
    pub fn wait_for_piece(&self, index: usize) -> bool {
        self.wait_until(|state| state.finished[index])
    }

    /// A worker that was compromised can make an access to its memory last. It is ended then, and
    /// the memory is poisoned.
    fn wait_until(&self, done: impl Fn(&State<E>) -> bool) -> bool {
        let mut state = self.lock();
        while state.failed.is_none() && !done(&state) {
            let waited = self.finished.wait_timeout(state, STUCK);
            let (next, wait) = waited.unwrap_or_else(PoisonError::into_inner);
            state = next;
            if wait.timed_out() {
                state.threads.iter().for_each(HeldThread::release);
            }
        }
        state.failed.is_none()
    }

    /// Returns the error that has ended the work, if any.
    pub fn finish(self) -> Result<(), E> {
        let state = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        state.failed.map_or(Ok(()), Err)
    }
}
