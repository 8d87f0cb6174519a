//! Limit of one run on the engine.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::clock::now_ns;
use crate::mediator::context_process::turns::OwnTurn;

/// Limit of one run on the engine. Operations check the limit after chunks of at most about 20 us.
#[derive(Debug)]
pub struct RunLimit<'a> {
    /// Deadline, in the time of [`now_ns`].
    pub end_ns: u64,
    /// Number of control requests that wait for the vGPU's lock.
    pub waiting_requests: &'a AtomicU32,
    /// Whether the vGPU's gate is open.
    pub gate_open: &'a AtomicBool,
    /// The turn of a context.
    pub turn: Option<&'a OwnTurn>,
}

impl RunLimit<'_> {
    /// Returns true if the run must end at once.
    pub fn reached(&self) -> bool {
        self.waiting_requests.load(Ordering::Relaxed) != 0
            || !self.gate_open.load(Ordering::Relaxed)
            || self.turn.is_some_and(OwnTurn::is_revoked)
            || now_ns() >= self.end_ns
    }
}
