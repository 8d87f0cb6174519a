//! Count and log of refused requests.

use std::collections::BTreeSet;

use nvidia_rm::table::{Label, Policy, Row, find, label};

use super::call::Stop;

/// Maximum number of different requests that are logged. Each is logged once.
const MAX_LOGGED: usize = 64;

/// Refused requests of a vGPU's programs.
#[derive(Debug, Default)]
pub struct Refusals {
    count: u64,
    logged: BTreeSet<(&'static str, Label)>,
}

impl Refusals {
    /// Returns the handler of a request, or `None` if the request succeeds without one. A request
    /// that the front end does not implement is counted, and fails with `unknown`.
    pub fn handler<H: Copy>(
        &mut self,
        rows: &'static [Row<H>],
        (what, number): (&'static str, u32),
        unknown: Stop,
    ) -> Result<Option<H>, Stop> {
        match find(rows, number).map(|row| row.policy) {
            Some(Policy::Succeed(_)) => Ok(None),
            Some(Policy::Refuse(status, _)) => Err(Stop::Status(status)),
            Some(Policy::Answer(handler) | Policy::Operate(handler)) => Ok(Some(handler)),
            Some(Policy::Query) | None => {
                self.note(what, label(rows, number));
                Err(unknown)
            }
        }
    }

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
