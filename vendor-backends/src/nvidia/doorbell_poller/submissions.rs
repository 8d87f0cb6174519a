//! Times at which a vGPU submitted work to the compute engine.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::nvidia::observers::ctxsw_log::SubmissionTimes;

/// Minimum time between two submissions that are kept: a launch of a CUDA graph rings several
/// times.
const SPACING: Duration = Duration::from_micros(50);

/// Maximum number of submissions that are kept until they are taken.
const MAX_TIMES: usize = 4096;

/// Times of submissions since they were last taken.
#[derive(Debug, Default)]
pub struct Submissions(Mutex<Vec<Instant>>);

impl Submissions {
    fn times(&self) -> MutexGuard<'_, Vec<Instant>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes a submission.
    pub(super) fn note(&self, now: Instant) {
        let mut times = self.times();
        let follows = |last: &Instant| now.saturating_duration_since(*last) < SPACING;
        if times.len() < MAX_TIMES && !times.last().is_some_and(follows) {
            times.push(now);
        }
    }
}

impl SubmissionTimes for Submissions {
    fn take(&self) -> Vec<Instant> {
        std::mem::take(&mut *self.times())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn submissions_close_to_each_other_count_once_and_memory_is_bounded() {
        let (submissions, start) = (Submissions::default(), Instant::now());
        for us in [0, 10, 49, 50, 60, 500] {
            submissions.note(start + Duration::from_micros(us));
        }
        let taken: Vec<_> = submissions.take().iter().map(|at| (*at - start).as_micros()).collect();
        assert_eq!(taken, [0, 50, 500]);
        assert_eq!(submissions.take(), []);
        (0..2 * MAX_TIMES as u32).for_each(|n| submissions.note(start + SPACING * n));
        assert_eq!(submissions.take().len(), MAX_TIMES);
    }
}
