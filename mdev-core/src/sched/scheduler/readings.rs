//! Times of the readings of the GPU's counters.

use super::pace::Pace;
use crate::sched::policy::Config;

/// Time of repayment of a debt without averaging: two intervals, so that slices settle.
const REPAY_NS: u64 = 200_000_000;
/// Bounds of the time of repayment with averaging.
const MIN_REPAY_NS: u64 = 20_000_000;
const MAX_REPAY_NS: u64 = 1_000_000_000;
/// Longest interval between two readings while rounds are short.
const MAX_INTERVAL_NS: u64 = 100_000_000;
/// The same while a change of demand is to be known soon, at least; also for each vGPU, whose
/// reading costs its worker some 50 us.
const WATCHED_INTERVAL_NS: u64 = 25_000_000;
const WATCHED_EACH_NS: u64 = 1_500_000;
/// Longest interval between two readings: shorter than [`STALE_NS`].
const LONGEST_INTERVAL_NS: u64 = 800_000_000;
/// Rounds of the runlist in an interval, at least.
const ROUNDS: u64 = 2;
/// Time without a measured interval after which debts are unknown.
const STALE_NS: u64 = 1_000_000_000;

/// Returns the time over which a debt is repaid.
pub(super) fn repay_ns(config: &Config) -> u64 {
    config.averaging.map_or(REPAY_NS, |averaging| {
        let averaged_ns =
            u64::from(averaging.factor) * 1_000_000_000 / u64::from(averaging.frequency);
        averaged_ns.clamp(MIN_REPAY_NS, MAX_REPAY_NS)
    })
}

/// Returns the interval between two readings: at most half the time of repayment, so that slices
/// settle, and at least [`ROUNDS`] rounds of the runlist, so that each vGPU with work had its
/// slice.
fn interval_ns(config: &Config, pace: &Pace) -> u64 {
    let rounds_ns = pace.round_ns().saturating_mul(ROUNDS).min(LONGEST_INTERVAL_NS);
    let watched_ns = pace
        .watched()
        .map_or(MAX_INTERVAL_NS, |count| WATCHED_INTERVAL_NS.max(WATCHED_EACH_NS * count as u64));
    (repay_ns(config) / 2).min(MAX_INTERVAL_NS).min(watched_ns).max(rounds_ns)
}

/// Returns the shortest interval from which debts are settled.
///
/// On a GPU that does not preempt, a vGPU may keep the engine as long as its longest kernel, so the
/// interval has to be long.
fn min_interval_ns(config: &Config, preempts: bool, pace: &Pace) -> u64 {
    let interval_ns = interval_ns(config, pace);
    if preempts { interval_ns / 5 } else { interval_ns * 9 / 10 }
}

/// Times of the last reading, and of the last one that ended a measured interval.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Readings {
    last_ns: Option<u64>,
    measured_ns: Option<u64>,
}

impl Readings {
    /// Takes the time of a reading. Returns false if the reading is not newer than the last one.
    pub(super) fn accept(&mut self, now_ns: u64) -> bool {
        let newer = self.last_ns.is_none_or(|last_ns| now_ns > last_ns);
        if newer {
            self.last_ns = Some(now_ns);
        }
        newer
    }

    /// Ends a measured interval at `now_ns`. Returns false if the interval is too short.
    pub(super) fn end_interval(
        &mut self,
        now_ns: u64,
        config: &Config,
        preempts: bool,
        pace: &Pace,
    ) -> bool {
        let shortest_ns = min_interval_ns(config, preempts, pace);
        let too_short =
            self.measured_ns.is_some_and(|start_ns| now_ns < start_ns.saturating_add(shortest_ns));
        if !too_short {
            self.measured_ns = Some(now_ns);
        }
        !too_short
    }

    /// Returns the time at which the counters are to be read at the latest.
    pub(super) fn next_ns(&self, config: &Config, pace: &Pace) -> u64 {
        self.measured_ns.map_or(0, |at_ns| at_ns.saturating_add(interval_ns(config, pace)))
    }

    /// Returns true if no interval was measured for a second. The first call starts the time.
    pub(super) fn are_stale(&mut self, now_ns: u64) -> bool {
        let measured_ns = *self.measured_ns.get_or_insert(now_ns);
        now_ns.saturating_sub(measured_ns) > STALE_NS
    }
}
