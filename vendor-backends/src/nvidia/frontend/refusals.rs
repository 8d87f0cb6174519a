//! Count and log of refused requests.

use std::collections::BTreeSet;

use nvidia_rm::table::Label;

/// Maximum number of different requests that are logged. Each is logged once.
const MAX_LOGGED: usize = 64;

/// Refused requests of a vGPU's programs.
#[derive(Debug, Default)]
pub struct Refusals {
    count: u64,
    logged: BTreeSet<(&'static str, Label)>,
}

impl Refusals {
    /// Counts a request that the front end does not implement, and logs it the first time.
    pub fn note(&mut self, what: &'static str, label: Label) {
        self.count += 1;
        if self.logged.len() < MAX_LOGGED && self.logged.insert((what, label)) {
            log::info!("A CUDA program was refused {what} {label}, which vGPUs do not have");
        }
    }

    /// Returns the number of refused requests.
    pub fn count(&self) -> u64 {
        self.count
    }
}
