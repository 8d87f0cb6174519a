//! How long to keep looking for the next message before going to sleep.
//!
//! A guest's driver often reads registers one after the other, and between two of them a server that sleeps has to be
//! woken. Where another CPU is idle that costs more than all the rest; where the client and the server share a busy
//! one, it costs nothing, and waiting awake drives them apart. So [`Patience`] does not guess but measures:
//!
//! * only after messages have followed each other closely, [`ENOUGH`] times in a row, and for at most [`WINDOW`] after
//!   each; the first look that finds nothing within it ends that, so that an idle device never looks;
//! * [`TRIAL`] messages are waited for asleep, as many awake, and whichever made the client faster is kept for the next
//!   [`TERM`] messages, or until they take twice as long as they did in the trial: the scheduler may have moved somebody.
//!   Awake has to be better by a tenth;
//! * only on a machine with at least two CPUs for this process;
//! * only while nobody else wants the CPU: every look is followed by an offer to give it up. Where another thread takes
//!   that for long, it is needed elsewhere, and there is no looking for a while, longer each time.

use std::num::NonZero;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::resource::{UsageWho, getrusage};

/// Longest time of looking after a message.
pub const WINDOW: Duration = Duration::from_micros(200);
/// Messages in a row that followed each other closely, after which looking begins.
pub const ENOUGH: u32 = 8;
/// Messages of one trial.
pub const TRIAL: u32 = 24;
/// Messages asleep before a trial asleep counts: the scheduler needs a while to bring a client and a server together that
/// waiting awake has driven apart.
pub const SETTLE: u32 = 3 * TRIAL;
/// Messages for which the outcome of a trial holds: the trials are less than a hundredth of that.
pub const TERM: u32 = 682 * TRIAL;
/// From one answer to the next, where messages follow each other closely.
const CLOSE: Duration = Duration::from_micros(250);
/// A look takes a few microseconds, and a hypervisor or an interrupt can make it longer. After one that took this long, it
/// is asked whether another thread had the CPU.
const TAKEN: Duration = Duration::from_micros(25);
/// How long there is no looking after the CPU was needed elsewhere: at first, and at most.
const REST: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// What the next messages are waited for as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    TryAsleep,
    /// How long the trial asleep took.
    TryAwake(Duration),
    Settled {
        awake: bool,
        /// How long the trial took that was won.
        usual: Duration,
    },
}

/// Decides between looking again and sleeping.
#[derive(Debug)]
pub struct Patience {
    allowed: bool,
    /// When the last message was answered.
    answered: Option<Instant>,
    /// Messages in a row that followed each other closely.
    row: u32,
    stage: Stage,
    /// Messages left of the stage, and what those before took.
    left: u32,
    took: Duration,
    /// The last lot of messages took twice as long as it should.
    slow: bool,
    looked: Option<Instant>,
    rest: Duration,
    resting_until: Option<Instant>,
    /// How often another thread had the CPU, when that was last asked, and how to ask.
    switched: i64,
    switches: fn() -> i64,
}

impl Default for Patience {
    /// Looks where the process may use at least two CPUs.
    fn default() -> Self {
        Self::new(thread::available_parallelism().is_ok_and(|cpus| cpus > NonZero::<usize>::MIN))
    }
}

impl Patience {
    /// Looks where that is `allowed`, or always sleeps.
    pub const fn new(allowed: bool) -> Self {
        Self {
            allowed,
            answered: None,
            row: 0,
            stage: Stage::TryAsleep,
            left: SETTLE + TRIAL,
            took: Duration::ZERO,
            slow: false,
            looked: None,
            rest: REST.0,
            resting_until: None,
            switched: 0,
            switches: thread_switches,
        }
    }

    /// Whether it ever looks: otherwise nobody need ask it, nor the clock.
    pub const fn is_allowed(&self) -> bool {
        self.allowed
    }

    /// A message has come and was answered: to be called after each, or after each lot.
    pub fn answered(&mut self, now: Instant) {
        if !self.allowed {
            return;
        }
        let gap = self.answered.map(|before| now.duration_since(before));
        (self.answered, self.looked) = (Some(now), None);
        let Some(gap) = gap.filter(|gap| *gap < CLOSE) else {
            self.row = 0;
            return;
        };
        self.row = self.row.saturating_add(1);
        if self.row <= ENOUGH || self.is_resting(now) {
            return;
        }
        self.took += gap;
        self.left = self.left.saturating_sub(1);
        let lot_ends = self.left.is_multiple_of(TRIAL);
        match self.stage {
            Stage::TryAsleep if self.left >= TRIAL => {
                self.took = Duration::ZERO;
                return;
            }
            _ if self.left > 0 && !lot_ends => return,
            _ => {}
        }
        let took = std::mem::take(&mut self.took);
        (self.stage, self.left) = match self.stage {
            Stage::TryAsleep => (Stage::TryAwake(took), TRIAL),
            Stage::TryAwake(asleep) => {
                self.switched = (self.switches)();
                let awake = took < asleep * 9 / 10;
                (Stage::Settled { awake, usual: if awake { took } else { asleep } }, TERM)
            }
            Stage::Settled { usual, .. } if self.left > 0 => {
                // One slow lot may be the machine's mood.
                let slow = took > usual * 2;
                if !(std::mem::replace(&mut self.slow, slow) && slow) {
                    return;
                }
                (Stage::TryAsleep, SETTLE + TRIAL)
            }
            Stage::Settled { .. } => (Stage::TryAsleep, SETTLE + TRIAL),
        };
        self.slow = false;
    }

    fn is_resting(&self, now: Instant) -> bool {
        self.resting_until.is_some_and(|until| now < until)
    }

    /// Whether to look once more rather than to sleep.
    pub fn wants_to_look(&mut self, now: Instant) -> bool {
        let Some(answered) = self.answered.filter(|_| self.row >= ENOUGH) else { return false };
        let awake = matches!(self.stage, Stage::TryAwake(_) | Stage::Settled { awake: true, .. });
        if !awake || self.is_resting(now) {
            return false;
        }
        // The first look comes at once or not at all: it may be another event that has ended a sleep.
        let late = self.looked.is_none() && now.duration_since(answered) > TAKEN;
        if late {
            return false;
        }
        let before = self.looked.replace(now).unwrap_or(answered);
        if now.duration_since(before) > TAKEN && self.was_switched() {
            self.resting_until = Some(now + self.rest);
            self.rest = (self.rest * 2).min(REST.1);
            self.row = 0;
            return false;
        }
        if now.duration_since(answered) > WINDOW {
            // In vain; but nobody else wanted the CPU.
            self.rest = REST.0;
            self.row = 0;
            return false;
        }
        true
    }

    /// Whether another thread has had the CPU since this was last asked.
    fn was_switched(&mut self) -> bool {
        let now = (self.switches)();
        now > std::mem::replace(&mut self.switched, now)
    }

    /// Lets whoever waits for this CPU have it: to be called after each look that has found nothing.
    pub fn offer_cpu() {
        thread::yield_now();
    }
}

/// How often another thread has taken the CPU from this one.
fn thread_switches() -> i64 {
    getrusage(UsageWho::RUSAGE_THREAD).map_or(0, |usage| usage.involuntary_context_switches())
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use super::*;

    const STEP: Duration = Duration::from_micros(3);

    /// Messages that follow each other, faster by half where they are waited for awake (or slower).
    fn burst(patience: &mut Patience, mut now: Instant, count: u32, awake_helps: bool) -> Instant {
        for _ in 0..count {
            let awake = patience.wants_to_look(now);
            now += if awake == awake_helps { STEP } else { STEP * 2 };
            patience.answered(now);
        }
        now
    }

    /// There has always been another.
    fn another_thread() -> i64 {
        static SWITCHES: AtomicI64 = AtomicI64::new(1);
        SWITCHES.fetch_add(1, Ordering::Relaxed)
    }

    /// A patience that has found out that waiting awake helps.
    fn settled() -> (Patience, Instant) {
        let mut patience = Patience { switches: another_thread, ..Patience::new(true) };
        let end = burst(&mut patience, Instant::now(), 2 * (ENOUGH + TRIAL) + SETTLE, true);
        assert!(matches!(patience.stage, Stage::Settled { awake: true, .. }));
        (patience, end)
    }

    /// How long it looks before it goes to sleep.
    fn looks(patience: &mut Patience, start: Instant) -> Duration {
        let mut now = start;
        while patience.wants_to_look(now) {
            now += STEP;
        }
        now.duration_since(start)
    }

    #[test]
    fn looks_for_a_while_after_a_burst_and_only_once() {
        let mut patience = Patience::new(true);
        assert_eq!(looks(&mut patience, Instant::now()), Duration::ZERO, "idle from the start");
        let (mut patience, end) = settled();
        let looked = looks(&mut patience, end);
        assert!(looked > WINDOW / 2 && looked < WINDOW * 2, "{looked:?}");
        let later = end + looked;
        assert_eq!(looks(&mut patience, later), Duration::ZERO, "asleep until the next burst");
    }

    #[test]
    fn where_waiting_awake_does_not_help_it_sleeps() {
        let mut patience = Patience::new(true);
        let start = Instant::now();
        let mut now = burst(&mut patience, start, 2 * (ENOUGH + TRIAL) + SETTLE, false);
        assert!(matches!(patience.stage, Stage::Settled { awake: false, .. }));
        let mut awake = 0;
        for _ in 0..10 * TERM {
            awake += u32::from(patience.wants_to_look(now));
            now = burst(&mut patience, now, 1, false);
        }
        assert!((1..=10 * TERM / 200).contains(&awake), "it tries now and then: {awake}");
    }

    #[test]
    fn messages_far_apart_are_not_waited_for() {
        let (mut patience, mut now) = settled();
        looks(&mut patience, now);
        for _ in 0..1000 {
            now += Duration::from_millis(1);
            patience.answered(now);
            assert_eq!(looks(&mut patience, now), Duration::ZERO);
        }
    }

    #[test]
    fn a_cpu_that_others_need_is_left_to_them_longer_each_time() {
        let (mut patience, mut now) = settled();
        let mut expected = REST.0;
        for _ in 0..12 {
            let end = burst(&mut patience, now, ENOUGH + 1, true);
            assert!(patience.wants_to_look(end));
            now = end + TAKEN * 2; // Instead of the next look.
            assert!(!patience.wants_to_look(now), "somebody else ran in between");
            let within = burst(&mut patience, now, ENOUGH + 1, true);
            assert!(!patience.wants_to_look(within), "at rest");
            now += expected + STEP;
            expected = (expected * 2).min(REST.1);
        }
        assert_eq!(patience.rest, REST.1);
    }

    #[test]
    fn a_long_look_in_which_nobody_else_ran_is_none() {
        let (mut patience, mut now) = settled();
        patience.switches = || 0;
        for _ in 0..3 {
            assert!(patience.wants_to_look(now));
            now += TAKEN * 2;
        }
        assert!(patience.wants_to_look(now), "it was the hypervisor, or an interrupt");
    }

    #[test]
    fn what_was_settled_is_tried_again_where_it_has_become_slow() {
        let (mut patience, mut now) = settled();
        for (lot, tries) in [(0, false), (1, true)] {
            for _ in 0..TRIAL {
                now += STEP * 4;
                patience.answered(now);
            }
            assert_eq!(patience.stage == Stage::TryAsleep, tries, "slow lot {lot}");
        }
    }

    #[test]
    fn with_one_cpu_it_never_looks() {
        let mut patience = Patience::new(false);
        let end = burst(&mut patience, Instant::now(), 1000, true);
        assert!(!patience.wants_to_look(end));
    }
}
