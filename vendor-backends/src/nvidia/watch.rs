//! Watches for a turn that does not end while others wait.
//!
//! A turn may be long because nobody else wants the engine, or because it is many kernels one after the other: neither is
//! a hang. One that is has to be long since others wait, and without a GPFIFO entry fetched in all that time.
//!
//! It is told in time: a turn is looked at again at the very moment at which it has lasted too long.

use std::time::{Duration, Instant};

/// The log of turns comes in pieces, and may lose some: it is believed where it stands still for this long at least.
const BELIEVED: Duration = Duration::from_millis(30);

/// A turn that has not ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// When it began, by the GPU's clock.
    pub since_ns: u64,
    /// For how long it lasts.
    pub lasts: Duration,
    /// Switches that were logged so far, anybody's.
    pub switches: u64,
}

/// What is to be done about it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing: look again when there is a reason to.
    Fine,
    /// Look again after so long.
    Later(Duration),
    /// It will not end by itself.
    Hung,
}

/// Watches one vGPU's turns on the compute engine.
#[derive(Debug)]
pub struct Watch {
    limit: Option<Duration>,
    contended: Option<Instant>,
    /// The turn that looked endless, and since when it does.
    suspect: Option<(Turn, Instant)>,
    /// How many switches there were at the last reset.
    reset_at: Option<u64>,
}

impl Watch {
    /// Turns longer than `limit` are hung; without one, none is.
    pub fn new(limit: Option<Duration>) -> Self {
        Self { limit, contended: None, suspect: None, reset_at: None }
    }

    /// Whether others have work, from `now` on.
    pub fn others_wait(&mut self, wait: bool, now: Instant) {
        self.contended = wait.then(|| self.contended.unwrap_or(now));
    }

    /// Whether they have.
    pub fn is_contended(&self) -> bool {
        self.contended.is_some()
    }

    /// Judges the turn, which is asked for where it matters. Nothing was fetched for `stuck`.
    pub fn look(
        &mut self,
        now: Instant,
        stuck: Duration,
        turn: impl FnOnce() -> Option<Turn>,
    ) -> Verdict {
        let (Some(limit), Some(contended)) = (self.limit, self.contended) else {
            return Verdict::Fine;
        };
        // Looked at twice: early enough that the log can be believed when the time is up.
        let notice = limit / 2;
        let long = now.saturating_duration_since(contended).min(stuck);
        let turn = if long < notice { None } else { turn() };
        let Some(turn) = turn else {
            self.suspect = None;
            // Whoever has fetched something a moment ago may have begun a long turn with it.
            let missing = notice.saturating_sub(long);
            return if missing.is_zero() { Verdict::Fine } else { Verdict::Later(missing) };
        };
        let missing = notice.saturating_sub(turn.lasts);
        if !missing.is_zero() {
            self.suspect = None;
            return Verdict::Later(missing);
        }
        let stands_still =
            |before: &Turn| (before.since_ns, before.switches) == (turn.since_ns, turn.switches);
        let (_, seen) = *self
            .suspect
            .insert(self.suspect.filter(|(before, _)| stands_still(before)).unwrap_or((turn, now)));
        let missing = limit
            .saturating_sub(long.min(turn.lasts))
            .max(BELIEVED.saturating_sub(now.saturating_duration_since(seen)));
        if !missing.is_zero() {
            return Verdict::Later(missing);
        }
        // It must have gone on since it was last believed.
        if self.reset_at.is_some_and(|at| turn.switches <= at + 1) {
            return Verdict::Fine;
        }
        self.reset_at = Some(turn.switches);
        self.suspect = None;
        Verdict::Hung
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const LIMIT: Duration = Duration::from_millis(150);

    /// Looks as the thread does, at least every `pause`, until the verdict is that it is hung; when that is.
    fn told(
        watch: &mut Watch,
        pause: Duration,
        turn: impl Fn(Duration) -> Option<Turn>,
    ) -> Option<Duration> {
        let start = Instant::now();
        watch.others_wait(true, start);
        let mut at = Duration::ZERO;
        while at < 1000 * MS {
            at += match watch.look(start + at, at, || turn(at)) {
                Verdict::Fine => pause,
                Verdict::Later(after) => after.min(pause).max(MS),
                Verdict::Hung => return Some(at),
            };
        }
        None
    }

    #[test]
    fn an_endless_turn_is_told_when_the_limit_is_up_whenever_it_began() {
        for begun in 0..60u32 {
            let begun = begun * MS;
            let turn = |at: Duration| {
                let lasts = at.checked_sub(begun)?;
                Some(Turn { since_ns: 7, lasts, switches: 1 })
            };
            for pause in [5, 20, 50] {
                let told = told(&mut Watch::new(Some(LIMIT)), pause * MS, turn).unwrap();
                assert!(
                    (LIMIT + begun..=LIMIT + begun + 2 * MS).contains(&told),
                    "{begun:?} {told:?}"
                );
            }
        }
    }

    #[test]
    fn turns_that_end_are_left_alone_however_long_their_log_is_quiet() {
        // Kernels of 140 ms on end; kernels of 20 ms, whose log comes late.
        let long = |at: Duration| {
            let turns = at.as_millis() as u64 / 140;
            let lasts = Duration::from_millis(at.as_millis() as u64 % 140);
            Some(Turn { since_ns: turns, lasts, switches: 2 * turns })
        };
        assert_eq!(told(&mut Watch::new(Some(LIMIT)), 50 * MS, long), None);
        let late = |at: Duration| {
            let switches = at.as_millis() as u64 / 20;
            Some(Turn { since_ns: 7, lasts: at, switches })
        };
        assert_eq!(told(&mut Watch::new(Some(LIMIT)), 50 * MS, late), None);
    }

    #[test]
    fn nobody_is_hung_who_is_alone_or_fetches_or_was_just_reset() {
        let endless = |at: Duration| Some(Turn { since_ns: 7, lasts: at, switches: 1 });
        assert_eq!(told(&mut Watch::new(None), 5 * MS, endless), None);
        let mut watch = Watch::new(Some(LIMIT));
        let start = Instant::now();
        assert_eq!(watch.look(start, 1000 * MS, || endless(1000 * MS)), Verdict::Fine, "alone");
        assert!(told(&mut watch, 5 * MS, endless).is_some());
        assert_eq!(told(&mut watch, 5 * MS, endless), None, "the log has not gone on");
        let mut watch = Watch::new(Some(LIMIT));
        watch.others_wait(true, start);
        for at in 0..1000u32 {
            let verdict = watch.look(start + at * MS, (at % 100) * MS, || endless(at * MS));
            assert_ne!(verdict, Verdict::Hung, "it goes on with entries");
        }
    }
}
