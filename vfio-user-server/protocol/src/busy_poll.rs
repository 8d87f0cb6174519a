//! Busy polling: when to spin on a socket before sleeping.
//!
//! A guest's driver often reads registers in bursts, and between two reads a sleeping server must
//! be woken. If another CPU is idle, waking costs more than the rest of the round trip. If client
//! and server share a busy CPU, waking costs nothing, and polling makes the scheduler separate the
//! two. [`BusyPoll`] therefore measures:
//!
//! * Polling starts after [`BURST`] messages in quick succession and lasts at most [`WINDOW`] after
//!   each message. A poll that finds nothing within the window ends the burst, so an idle device
//!   never polls.
//! * A trial handles [`TRIAL`] messages with sleeping and as many with polling. The faster mode is
//!   kept for [`TERM`] messages, or until messages take twice as long as in the trial: the
//!   scheduler may have moved a thread. Polling must be faster by a tenth.
//! * Polling needs at least two CPUs for this process.
//! * Each poll is followed by a yield of the CPU. If another thread runs for long after a yield,
//!   the CPU is contended, and polling pauses, longer each time.

use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};

/// Longest polling time after a message.
pub const WINDOW: Duration = Duration::from_micros(200);
/// Consecutive messages in quick succession after which polling begins.
pub const BURST: u32 = 8;
/// Messages per trial.
pub const TRIAL: u32 = 24;
/// Messages with sleeping before a sleeping trial counts. The scheduler needs them to bring client
/// and server together again after polling has separated them.
pub const SETTLE: u32 = 3 * TRIAL;
/// Messages for which a trial's result holds. Trials take less than a hundredth of them.
pub const TERM: u32 = 682 * TRIAL;
/// Longest time between two answers of a burst.
const MAX_GAP: Duration = Duration::from_micros(250);
/// Poll duration above which context switches are checked. A poll takes a few microseconds; a
/// hypervisor, an interrupt or another thread makes it longer.
const LONG_POLL: Duration = Duration::from_micros(25);
/// First pause of polling after the CPU was found contended.
const MIN_PAUSE: Duration = Duration::from_millis(5);
/// Longest pause of polling; pauses double up to it.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// Phase of the comparison between sleeping and polling.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A trial with sleeping.
    SleepTrial,
    /// A trial with polling, after a trial with sleeping of this duration.
    PollTrial(Duration),
    /// The faster mode is in use.
    Settled {
        polling: bool,
        /// Duration of the faster trial.
        trial_time: Duration,
    },
}

/// Policy that decides between polling and sleeping.
#[derive(Debug)]
pub struct BusyPoll {
    enabled: bool,
    /// Time of the last answer.
    answered: Option<Instant>,
    /// Consecutive messages in quick succession.
    burst: u32,
    phase: Phase,
    /// Messages left in the phase.
    left: u32,
    /// Time that the messages of the current trial, or of as many messages, took so far.
    elapsed: Duration,
    /// True if the last [`TRIAL`] messages took twice the trial's time.
    slow: bool,
    /// Time of the last poll since the last answer.
    polled: Option<Instant>,
    /// Length of the next pause.
    pause: Duration,
    paused_until: Option<Instant>,
    /// Involuntary context switches when last read.
    switch_count: i64,
    /// Source of the context switch count; tests replace it.
    read_switches: fn() -> i64,
}

impl Default for BusyPoll {
    /// Returns a policy that polls if the process may use at least two CPUs.
    fn default() -> Self {
        Self::new(thread::available_parallelism().is_ok_and(|cpus| cpus > NonZero::<usize>::MIN))
    }
}

impl BusyPoll {
    /// Returns a policy that polls if `enabled`, and always sleeps otherwise.
    pub const fn new(enabled: bool) -> Self {
        Self {
            enabled,
            answered: None,
            burst: 0,
            phase: Phase::SleepTrial,
            left: SETTLE + TRIAL,
            elapsed: Duration::ZERO,
            slow: false,
            polled: None,
            pause: MIN_PAUSE,
            paused_until: None,
            switch_count: 0,
            read_switches: involuntary_switches,
        }
    }

    /// Returns true if polling is enabled. When false, callers skip the policy and the clock reads.
    pub const fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// Records that a message, or a batch of messages, was answered.
    pub fn record_answer(&mut self, now: Instant) {
        if !self.enabled {
            return;
        }
        let gap = self.answered.map(|before| now.duration_since(before));
        (self.answered, self.polled) = (Some(now), None);
        let Some(gap) = gap.filter(|gap| *gap < MAX_GAP) else {
            self.burst = 0;
            return;
        };
        self.burst = self.burst.saturating_add(1);
        if self.burst <= BURST || self.is_paused(now) {
            return;
        }
        self.elapsed += gap;
        self.left = self.left.saturating_sub(1);
        let trial_complete = self.left.is_multiple_of(TRIAL);
        match self.phase {
            Phase::SleepTrial if self.left >= TRIAL => {
                self.elapsed = Duration::ZERO;
                return;
            }
            _ if self.left > 0 && !trial_complete => return,
            _ => {}
        }
        let elapsed = std::mem::take(&mut self.elapsed);
        (self.phase, self.left) = match self.phase {
            Phase::SleepTrial => (Phase::PollTrial(elapsed), TRIAL),
            Phase::PollTrial(sleeping) => {
                self.switch_count = (self.read_switches)();
                let polling = elapsed < sleeping * 9 / 10;
                let trial_time = if polling { elapsed } else { sleeping };
                (Phase::Settled { polling, trial_time }, TERM)
            }
            Phase::Settled { trial_time, .. } if self.left > 0 => {
                // A single slow trial length can be noise.
                let slow = elapsed > trial_time * 2;
                if !(std::mem::replace(&mut self.slow, slow) && slow) {
                    return;
                }
                (Phase::SleepTrial, SETTLE + TRIAL)
            }
            Phase::Settled { .. } => (Phase::SleepTrial, SETTLE + TRIAL),
        };
        self.slow = false;
    }

    fn is_paused(&self, now: Instant) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// Returns true if the caller should poll once more, false if it should sleep.
    pub fn should_poll(&mut self, now: Instant) -> bool {
        let Some(answered) = self.answered.filter(|_| self.burst >= BURST) else { return false };
        let polling =
            matches!(self.phase, Phase::PollTrial(_) | Phase::Settled { polling: true, .. });
        if !polling || self.is_paused(now) {
            return false;
        }
        // The first poll follows the answer at once. A later call means that the caller slept and
        // another event woke it.
        let late = self.polled.is_none() && now.duration_since(answered) > LONG_POLL;
        if late {
            return false;
        }
        let before = self.polled.replace(now).unwrap_or(answered);
        if now.duration_since(before) > LONG_POLL && self.was_preempted() {
            self.paused_until = Some(now + self.pause);
            self.pause = (self.pause * 2).min(MAX_PAUSE);
            self.burst = 0;
            return false;
        }
        if now.duration_since(answered) > WINDOW {
            // The polls found no message, but no other thread needed the CPU either.
            self.pause = MIN_PAUSE;
            self.burst = 0;
            return false;
        }
        true
    }

    /// Returns true if another thread has preempted this one since the last call.
    fn was_preempted(&mut self) -> bool {
        let count = (self.read_switches)();
        count > std::mem::replace(&mut self.switch_count, count)
    }

    /// Yields the CPU to other threads. Callers do this after each poll without a message.
    pub fn yield_cpu() {
        thread::yield_now();
    }
}

/// Returns how often another thread has preempted this one.
fn involuntary_switches() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.involuntary_context_switches())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::*;

    const STEP: Duration = Duration::from_micros(3);

    /// Records a burst of messages. Polling halves their time if `polling_helps`, and doubles it
    /// otherwise.
    fn burst(
        busy_poll: &mut BusyPoll,
        mut now: Instant,
        count: u32,
        polling_helps: bool,
    ) -> Instant {
        for _ in 0..count {
            let polling = busy_poll.should_poll(now);
            now += if polling == polling_helps { STEP } else { STEP * 2 };
            busy_poll.record_answer(now);
        }
        now
    }

    /// Returns a context switch count that grows with each call.
    fn always_preempted() -> i64 {
        static SWITCHES: AtomicI64 = AtomicI64::new(1);
        SWITCHES.fetch_add(1, Ordering::Relaxed)
    }

    /// Returns a policy whose trials have chosen polling.
    fn settled() -> (BusyPoll, Instant) {
        let mut busy_poll = BusyPoll { read_switches: always_preempted, ..BusyPoll::new(true) };
        let end = burst(&mut busy_poll, Instant::now(), 2 * (BURST + TRIAL) + SETTLE, true);
        assert!(matches!(busy_poll.phase, Phase::Settled { polling: true, .. }));
        (busy_poll, end)
    }

    /// Returns how long the policy polls before it sleeps.
    fn polling_time(busy_poll: &mut BusyPoll, start: Instant) -> Duration {
        let mut now = start;
        while busy_poll.should_poll(now) {
            now += STEP;
        }
        now.duration_since(start)
    }

    #[test]
    fn polls_for_one_window_after_a_burst() {
        let mut busy_poll = BusyPoll::new(true);
        let idle = polling_time(&mut busy_poll, Instant::now());
        assert_eq!(idle, Duration::ZERO, "idle from the start");
        let (mut busy_poll, end) = settled();
        let polled = polling_time(&mut busy_poll, end);
        assert!(polled > WINDOW / 2 && polled < WINDOW * 2, "{polled:?}");
        let later = polling_time(&mut busy_poll, end + polled);
        assert_eq!(later, Duration::ZERO, "sleeps until the next burst");
    }

    #[test]
    fn sleeps_if_polling_does_not_help() {
        let mut busy_poll = BusyPoll::new(true);
        let start = Instant::now();
        let mut now = burst(&mut busy_poll, start, 2 * (BURST + TRIAL) + SETTLE, false);
        assert!(matches!(busy_poll.phase, Phase::Settled { polling: false, .. }));
        let mut polls = 0;
        for _ in 0..10 * TERM {
            polls += u32::from(busy_poll.should_poll(now));
            now = burst(&mut busy_poll, now, 1, false);
        }
        assert!((1..=10 * TERM / 200).contains(&polls), "a trial now and then: {polls}");
    }

    #[test]
    fn does_not_poll_for_sparse_messages() {
        let (mut busy_poll, mut now) = settled();
        polling_time(&mut busy_poll, now);
        for _ in 0..1000 {
            now += Duration::from_millis(1);
            busy_poll.record_answer(now);
            assert_eq!(polling_time(&mut busy_poll, now), Duration::ZERO);
        }
    }

    #[test]
    fn pauses_longer_each_time_the_cpu_is_contended() {
        let (mut busy_poll, mut now) = settled();
        let mut expected = MIN_PAUSE;
        for _ in 0..12 {
            let end = burst(&mut busy_poll, now, BURST + 1, true);
            assert!(busy_poll.should_poll(end));
            now = end + LONG_POLL * 2; // Instead of the next poll.
            assert!(!busy_poll.should_poll(now), "another thread ran in between");
            let within = burst(&mut busy_poll, now, BURST + 1, true);
            assert!(!busy_poll.should_poll(within), "paused");
            now += expected + STEP;
            expected = (expected * 2).min(MAX_PAUSE);
        }
        assert_eq!(busy_poll.pause, MAX_PAUSE);
    }

    #[test]
    fn a_long_poll_without_preemption_does_not_pause() {
        let (mut busy_poll, mut now) = settled();
        busy_poll.read_switches = || 0;
        for _ in 0..3 {
            assert!(busy_poll.should_poll(now));
            now += LONG_POLL * 2;
        }
        assert!(busy_poll.should_poll(now), "the delay was the hypervisor's or an interrupt's");
    }

    #[test]
    fn repeats_the_trials_if_messages_become_slow() {
        let (mut busy_poll, mut now) = settled();
        for (batch, repeats) in [(0, false), (1, true)] {
            for _ in 0..TRIAL {
                now += STEP * 4;
                busy_poll.record_answer(now);
            }
            assert_eq!(busy_poll.phase == Phase::SleepTrial, repeats, "slow batch {batch}");
        }
    }

    #[test]
    fn never_polls_if_disabled() {
        let mut busy_poll = BusyPoll::new(false);
        let end = burst(&mut busy_poll, Instant::now(), 1000, true);
        assert!(!busy_poll.should_poll(end));
    }
}
