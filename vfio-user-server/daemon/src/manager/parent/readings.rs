//! Readings of a parent's usage counters: when they are due, and their way into the scheduler.

use std::time::{Duration, Instant};

use nix::time::ClockId;

use super::Parent;
use super::scheduling::apply;

/// Age up to which a reading is recent enough for statistics.
const MAX_AGE: Duration = Duration::from_millis(25);

/// Shortest pause between two readings. A reading is one small packet in each direction.
const MIN_PAUSE: Duration = Duration::from_micros(250);

/// Pause after a failed reading, which limits the lines in the log.
const PAUSE_AFTER_ERROR: Duration = Duration::from_secs(1);

impl Parent {
    /// Plans the next reading for when the scheduler wants one. Without vGPUs none is planned, and
    /// an idle manager sleeps.
    pub(super) fn plan_reading(&mut self) {
        let deadline = self.scheduling.wanted_reading_ns().filter(|_| self.is_ready());
        self.scheduling.next_reading = deadline.map(|at| {
            let pause = Duration::from_nanos(at.saturating_sub(monotonic_ns()));
            Instant::now() + pause.max(MIN_PAUSE)
        });
    }

    /// Reads the usage counters if a reading is due.
    pub fn read_if_due(&mut self, now: Instant) {
        if self.scheduling.next_reading().is_some_and(|at| at <= now) {
            self.read_counters();
        }
    }

    /// Reads the usage counters unless the last reading is recent.
    pub(super) fn read_if_stale(&mut self) {
        let fresh = self.scheduling.last_reading.is_some_and(|at| at.elapsed() < MAX_AGE);
        if !fresh && self.scheduling.next_reading().is_some() {
            self.read_counters();
        }
    }

    /// Reads the usage counters and applies the scheduler's actions.
    fn read_counters(&mut self) {
        self.scheduling.last_reading = Some(Instant::now());
        let read = self.call_gpu(|gpu| gpu.usage()).and_then(|report| {
            let actions = self.scheduling.read(&report);
            self.call_gpu(|gpu| apply(gpu, &actions))
        });
        self.plan_reading();
        if let Err(error) = read {
            log::warn!("Cannot schedule parent {}: {error}", self.name());
            let later = Instant::now() + PAUSE_AFTER_ERROR;
            let next = &mut self.scheduling.next_reading;
            *next = next.map(|at| at.max(later));
        }
    }
}

/// Returns `CLOCK_MONOTONIC` in nanoseconds, the clock of usage reports.
pub fn monotonic_ns() -> u64 {
    let now = ClockId::CLOCK_MONOTONIC.now().map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}
