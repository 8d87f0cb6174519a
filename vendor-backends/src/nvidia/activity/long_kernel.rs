//! Detection of long kernels of CUDA programs.
//!
//! The GPU preempts these kernels at any instruction, so a long kernel is no hang. But other vGPUs
//! wait for each of its slices, and a long kernel loses little by shorter ones.

use std::time::{Duration, Instant};

/// Engine time without progress after which a kernel is long.
const LONG: Duration = Duration::from_millis(100);

/// Time after the last use of the engine for which a kernel counts as running.
const RECENT: Duration = Duration::from_millis(300);

/// Time without progress before the engine time is looked at.
const QUIET: Duration = Duration::from_millis(20);

/// Engine time that a vGPU has used since its rings last showed progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct LongKernel {
    progress_at: Instant,
    /// Total engine time when it was first looked at after the last progress, in nanoseconds.
    base_ns: Option<u64>,
    /// Total engine time, and when it last grew.
    seen: (u64, Instant),
}

impl LongKernel {
    /// Creates the state of a vGPU without work.
    pub(super) fn new(now: Instant) -> Self {
        Self { progress_at: now, base_ns: None, seen: (0, now) }
    }

    /// Notes that entries were submitted or fetched.
    pub(super) fn note_progress(&mut self, now: Instant) {
        self.progress_at = now;
        self.base_ns = None;
    }

    /// Returns whether the engine time matters: there was no progress lately.
    pub(super) fn is_suspected(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.progress_at) >= QUIET
    }

    /// Notes the total engine time of the vGPU's kernels.
    pub(super) fn note_engine_time(&mut self, now: Instant, total_ns: u64) {
        self.base_ns.get_or_insert(total_ns);
        if total_ns > self.seen.0 {
            self.seen = (total_ns, now);
        }
    }

    /// Returns whether a long kernel runs.
    pub(super) fn is_running(&self, now: Instant) -> bool {
        let (total_ns, grown_at) = self.seen;
        let used_ns = self.base_ns.map_or(0, |base_ns| total_ns.saturating_sub(base_ns));
        Duration::from_nanos(used_ns) > LONG && now.saturating_duration_since(grown_at) < RECENT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_kernel_is_long_by_its_engine_time_and_until_the_next_progress() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut kernel = LongKernel::new(start);
        kernel.note_progress(at(1000));
        assert!(!kernel.is_suspected(at(1019)) && kernel.is_suspected(at(1020)));
        // A quarter of the engine.
        for ms in (1020..1420).step_by(5) {
            kernel.note_engine_time(at(ms), 7000 * MS + (ms - 1020) / 4 * MS);
            assert!(!kernel.is_running(at(ms)), "{ms}");
        }
        kernel.note_engine_time(at(1440), 7105 * MS);
        assert!(kernel.is_running(at(1440)));
        kernel.note_progress(at(1450));
        assert!(!kernel.is_running(at(1450)));
    }

    #[test]
    fn work_that_has_ended_is_no_long_kernel() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut kernel = LongKernel::new(start);
        kernel.note_engine_time(at(20), 0);
        kernel.note_engine_time(at(200), 150 * MS);
        assert!(kernel.is_running(at(400)));
        kernel.note_engine_time(at(500), 150 * MS);
        assert!(!kernel.is_running(at(500)), "the engine time does not grow");
        // The next one is judged by its own time.
        kernel.note_progress(at(600));
        kernel.note_engine_time(at(620), 160 * MS);
        kernel.note_engine_time(at(700), 240 * MS);
        assert!(!kernel.is_running(at(700)));
    }
}
