//! What of the engine time that workers tell can be true.
//!
//! Each adds up its own turns from the GPU's log. A log may have gaps: where the end of a turn is missing, it seems to go
//! on while others have theirs. There is one compute engine, so all together cannot have used more than the time that
//! has passed; and whoever waited behind a closed gate is the last to be believed.

use std::time::{Duration, Instant};

/// How much of a pause between two readings may have been used and not told yet.
const MOST_ROOM: Duration = Duration::from_millis(250);

/// Workers look at their clocks one after the other.
const SLACK: Duration = Duration::from_millis(1);

/// What a worker tells.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Engine time since it was last asked, in nanoseconds.
    pub ran_ns: u64,
    /// Its gate was closed all the time.
    pub held: bool,
}

/// What can have been used.
#[derive(Clone, Copy, Debug, Default)]
pub struct Believed {
    at: Option<Instant>,
    room: Duration,
}

impl Believed {
    /// What each is charged of what it tells, in nanoseconds.
    pub fn charge(&mut self, now: Instant, told: &[Told]) -> Vec<u64> {
        let passed = self.at.map_or(MOST_ROOM, |at| now.saturating_duration_since(at));
        self.at = Some(now);
        self.room = (self.room + passed).min(passed.max(MOST_ROOM));
        let charged = fit((self.room + SLACK).as_nanos(), told);
        let all = Duration::from_nanos(charged.iter().sum());
        self.room = self.room.saturating_sub(all);
        charged
    }
}

/// Fits what was told into `room` nanoseconds.
fn fit(room: u128, told: &[Told]) -> Vec<u64> {
    let sum = |held: bool| -> u128 {
        told.iter().filter(|one| one.held == held).map(|one| u128::from(one.ran_ns)).sum()
    };
    let (free, held) = (sum(false), sum(true));
    let for_held = room.saturating_sub(free);
    let part = |one: &Told| {
        let (room, all) = if one.held { (for_held, held) } else { (room, free) };
        let ran = u128::from(one.ran_ns);
        if all <= room { one.ran_ns } else { u64::try_from(ran * room / all).unwrap_or(u64::MAX) }
    };
    told.iter().map(part).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn told(ran_ms: u64, held: bool) -> Told {
        Told { ran_ns: ran_ms * 1_000_000, held }
    }

    fn charges(believed: &mut Believed, at: Instant, told: &[Told]) -> Vec<u64> {
        believed.charge(at, told).into_iter().map(|ns| ns / 1_000_000).collect()
    }

    #[test]
    fn who_is_held_is_not_charged_for_what_others_ran() {
        let mut believed = Believed::default();
        let start = Instant::now();
        believed.charge(start, &[told(250, false)]);
        // 100 ms, in which the second one ran; the first one's turn seems to go on behind its gate.
        for n in 1..10 {
            let got =
                charges(&mut believed, start + n * 100 * MS, &[told(100, true), told(99, false)]);
            assert!(got[0] <= 2 && got[1] == 99, "{got:?}");
        }
    }

    #[test]
    fn nobody_gets_less_for_a_reading_that_came_late() {
        let mut believed = Believed::default();
        let start = Instant::now();
        believed.charge(start, &[told(250, false)]);
        let late = [told(60, false)];
        assert_eq!(charges(&mut believed, start + 100 * MS, &late), [60]);
        let both = [told(60, false), told(80, false)];
        assert_eq!(charges(&mut believed, start + 200 * MS, &both), [60, 80]);
    }

    proptest! {
        #[test]
        fn all_together_use_no_more_than_there_is(
            steps in prop::collection::vec(
                (0..400_u64, prop::collection::vec((0..2_000_000_000_u64, any::<bool>()), 0..6)),
                1..40,
            ),
        ) {
            let mut believed = Believed::default();
            let (mut now, mut all) = (Instant::now(), 0);
            let mut most = MOST_ROOM;
            for (pause, told) in steps {
                now += Duration::from_millis(pause);
                most += Duration::from_millis(pause) + SLACK;
                let told: Vec<_> =
                    told.into_iter().map(|(ran_ns, held)| Told { ran_ns, held }).collect();
                let charged = believed.charge(now, &told);
                prop_assert!(charged.iter().zip(&told).all(|(is, told)| *is <= told.ran_ns));
                all += charged.iter().sum::<u64>();
                prop_assert!(u128::from(all) <= most.as_nanos());
            }
        }
    }
}
