//! Count and log of refused requests.

use std::collections::BTreeSet;

/// Maximum number of different requests that are logged. Each is logged once.
const MAX_LOGGED: usize = 64;

/// Refused requests of a vGPU's programs.
#[derive(Debug, Default)]
pub struct Refusals {
    count: u64,
    logged: BTreeSet<(&'static str, u32)>,
}

impl Refusals {
    /// Counts a request that the front end does not implement, and logs it the first time.
    pub fn note(&mut self, what: &'static str, number: u32) {
        self.count += 1;
        if self.logged.len() < MAX_LOGGED && self.logged.insert((what, number)) {
            log::info!("A CUDA program was refused {what} {number:#x}, which vGPUs do not have");
        }
    }

    /// Returns the number of refused requests.
    pub fn count(&self) -> u64 {
        self.count
    }
}
