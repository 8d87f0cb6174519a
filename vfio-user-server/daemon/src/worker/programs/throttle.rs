//! Processes whose requests wait for CPU time of the worker.

use std::time::{Duration, Instant};

use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, TimerSetTimeFlags};
use nix::sys::timerfd::TimerFd;

use super::{Programs, Source};

/// What begins and ends to wait.
#[derive(Debug, Default)]
pub struct Throttled {
    /// Processes that wait from now on, with their process IDs.
    pub begun: Vec<(Source, i32)>,
    /// Processes that wait no longer.
    pub ended: Vec<Source>,
    /// Whether new processes wait, if that has changed.
    pub listener: Option<bool>,
}

impl Programs {
    /// Returns the timer that ends waits.
    pub fn timer(&self) -> &TimerFd {
        &self.timer
    }

    /// Takes the CPU time that an event of `source`, or of a new process, has used. Returns what
    /// begins to wait.
    pub fn charge(&mut self, source: Option<Source>, used: Duration, now: Instant) -> Throttled {
        self.budget.charge(used, now);
        if let Some(connection) =
            source.and_then(|source| self.connections.get_mut_unnoted(&source))
        {
            connection.budget.charge(used, now);
        }
        let all = self.budget.is_exhausted();
        let mut throttled = Throttled::default();
        for (source, connection) in self.connections.iter_mut_unnoted() {
            let exhausted = connection.budget.is_exhausted();
            if !connection.waits && (exhausted || all && !connection.budget.is_ample()) {
                connection.waits = true;
                throttled.begun.push((*source, connection.process.pid));
            }
        }
        if all && !self.listener_waits {
            self.listener_waits = true;
            throttled.listener = Some(true);
        }
        if throttled.listener.is_some() || !throttled.begun.is_empty() {
            self.set_timer(now);
        }
        throttled
    }

    /// Ends waits, when the timer has run out.
    pub fn on_timer(&mut self, now: Instant) -> Throttled {
        let _ = self.timer.wait();
        let mut throttled = Throttled::default();
        let all = self.budget.wait(now).is_some();
        for (source, connection) in self.connections.iter_mut_unnoted() {
            let waits = connection.budget.wait(now).is_some();
            if connection.waits && !waits && (!all || connection.budget.is_ample()) {
                connection.waits = false;
                throttled.ended.push(*source);
            }
        }
        if self.listener_waits && !all {
            self.listener_waits = false;
            throttled.listener = Some(false);
        }
        self.set_timer(now);
        throttled
    }

    /// Sets the timer to the end of the first wait.
    fn set_timer(&mut self, now: Instant) {
        let all = self.budget.wait(now);
        let waiting =
            self.connections.iter_mut_unnoted().filter(|(_, connection)| connection.waits);
        let waits = waiting.map(|(_, connection)| connection.budget.wait(now).max(all));
        let first = waits.chain(self.listener_waits.then_some(all)).min();
        let Some(first) = first else { return };
        // A wait that has ended already ends with the timer, too.
        let first = first.unwrap_or_default().max(Duration::from_micros(1));
        let expiration = Expiration::OneShot(TimeSpec::from(first));
        if let Err(error) = self.timer.set(expiration, TimerSetTimeFlags::empty()) {
            log::error!("Cannot set a timer: {error}");
        }
    }
}
