//! Pace of the runlist: how long slices are, besides their proportions.
//!
//! Three kinds of vGPUs need different slices. A vGPU that wants more than its share competes, and
//! long slices cost it few switches. A vGPU below its share, such as a service with brief requests,
//! is to run as soon as it has work, so the slices of the others have to be short. A vGPU without
//! work has no effect.

use std::time::Duration;

use super::demand::Demand;
use super::group::{Group, Groups};
use super::turns::Turns;
use crate::sched::account::Interval;
use crate::sched::policy::{Config, MIN_SLICE, SHORTEST_SLICE};

/// Longest round of the runlist, as long as slices are not shorter than [`SHORTEST_PART`] of the
/// configured one.
const MAX_ROUND: Duration = Duration::from_millis(120);
/// Part of the configured mean slice below which a long round shortens no slice.
const SHORTEST_PART: f64 = 0.25;
/// Slice of the only vGPU that competes. The GPU changes to no other vGPU unless that has work, so
/// the short slice costs nothing, and others wait for it only briefly.
const LONE_SLICE: Duration = Duration::from_micros(200);
/// The same while others get the engine so often that switches would take too much of its time.
const LONE_LONG_SLICE: Duration = Duration::from_micros(1750);
/// Mean slice of several vGPUs that compete beside vGPUs below their shares, or of which one began
/// to compete only lately: work below its share waits for a round at most, and a switch costs
/// 0.17 ms on an NVIDIA GPU.
const BESIDE_BRIEF_SLICE: Duration = Duration::from_millis(3);
/// Longest slice of a vGPU below its share, or without work while others compete, where switches
/// are costly. Longer work of one service does not delay the next, and work that begins does not
/// delay others before its demand is known.
const BRIEF_SLICE: Duration = Duration::from_millis(2);
/// Number of competing vGPUs above which slices no longer repay debts, and number at which they do
/// again.
///
/// Where a slice changes, an NVIDIA GPU starts its runlist anew, so the vGPUs at the end of a long
/// one miss their turns.
const CROWD: [usize; 2] = [4, 3];
/// Number of intervals in a row below its share after which a vGPU makes the slices of a crowd
/// shorter.
const STEADILY_BRIEF: u8 = 3;
/// Relative change of the pace that reaches the slices.
const TOLERANCE: f64 = 0.125;

/// Lengths of the slices of a kind of vGPUs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Length {
    /// Factor of the slice.
    pub(super) factor: f64,
    /// Bounds of the slice.
    pub(super) shortest: Duration,
    pub(super) longest: Duration,
}

impl Length {
    const UNCHANGED: Self = Self { factor: 1.0, shortest: MIN_SLICE, longest: Duration::MAX };
}

/// Pace of the runlist.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pace {
    competing: Length,
    /// Length of a round in which all competing vGPUs use up their slices.
    round: Duration,
    /// Number of vGPUs, if another demand of one of them is to be known soon.
    watched: Option<usize>,
    /// How often vGPUs below their shares get the engine.
    turns: Turns,
    /// Some vGPU is below its share.
    briefly: bool,
    /// So many vGPUs compete that slices are to change seldom.
    crowded: bool,
    /// All slices keep their proportions.
    in_proportion: bool,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            competing: Length::UNCHANGED,
            round: Duration::ZERO,
            watched: None,
            turns: Turns::default(),
            briefly: false,
            crowded: false,
            in_proportion: false,
        }
    }
}

impl Pace {
    /// Returns the length of slices for a demand.
    pub(super) fn length(&self, demand: Demand) -> Length {
        match demand {
            // A change of demand changes no slice.
            _ if self.crowded || self.in_proportion => self.competing,
            Demand::Idle if self.round.is_zero() && !self.briefly => self.competing,
            Demand::Idle | Demand::Brief => Length { longest: BRIEF_SLICE, ..Length::UNCHANGED },
            Demand::Competing => self.competing,
        }
    }

    /// Returns the length of a round in which all competing vGPUs use up their slices, in
    /// nanoseconds.
    pub(super) fn round_ns(&self) -> u64 {
        u64::try_from(self.round.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the number of vGPUs, if another demand of one of them is to be known soon: beside
    /// the short slices of a lone vGPU, work that begins is ahead until it is known to compete.
    pub(super) fn watched(&self) -> Option<usize> {
        self.watched
    }

    /// Notes how often vGPUs below their shares got the engine. `groups` have the demand of the
    /// intervals.
    pub(super) fn count_turns(&mut self, groups: &Groups, intervals: &[Interval]) {
        let is_brief = |interval: &&Interval| {
            groups.get(&interval.vgpu).is_some_and(|group| group.demand == Demand::Brief)
        };
        let turns: u64 = intervals.iter().filter(is_brief).map(|interval| interval.turns).sum();
        let elapsed_ns = intervals.first().map_or(1, |interval| interval.elapsed_ns.max(1));
        self.turns.count(turns, elapsed_ns);
    }

    /// Returns true if so many vGPUs compete that slices are to change seldom, or will when the
    /// demand of these intervals is known.
    pub(super) fn is_crowd(&self, intervals: &[Interval]) -> bool {
        let with_work = |interval: &&Interval| interval.busy || interval.begins;
        self.crowded || intervals.iter().filter(with_work).count() > CROWD[0]
    }

    /// Follows the demand of the vGPUs. `base` is the slice of a vGPU that its weight gives.
    ///
    /// With `costly_switches`, the slices of many vGPUs change seldom, and vGPUs below their shares
    /// have longer slices than their shares give. Without, all slices keep their proportions: work
    /// that begins then gets its share, and no more, before its demand is known.
    pub(super) fn update(
        &mut self,
        config: &Config,
        groups: &Groups,
        costly_switches: bool,
        base: impl Fn(&Group) -> Duration,
    ) {
        let of = |demand| groups.values().filter(move |group| group.demand == demand);
        let competing = of(Demand::Competing).count();
        let round: Duration = of(Demand::Competing).map(&base).sum();
        let channel_groups: u32 =
            of(Demand::Competing).map(|group| group.usage.counters().busy_groups.max(1)).sum();
        self.in_proportion = !costly_switches;
        self.crowded = costly_switches && competing > CROWD[usize::from(self.crowded)];
        let steadily = if self.crowded { STEADILY_BRIEF } else { 1 };
        let briefly = of(Demand::Brief).any(|group| group.brief_for >= steadily);
        self.briefly = briefly;
        let lone = channel_groups == 1 && groups.len() > 1;
        // A service that loads its kernels competes for a moment, and one with a backlog looks so.
        let newly = costly_switches
            && !self.crowded
            && of(Demand::Competing).any(|group| !group.competes_lastingly());
        self.watched = (lone || competing == 0 && briefly).then_some(groups.len());
        let mut next = Length::UNCHANGED;
        // While no vGPU competes, the slices are those for all: then none changes when all begin.
        let (count, round) = match competing {
            0 => (groups.len(), groups.values().map(&base).sum()),
            count => (count, round),
        };
        if count > 0 {
            let mean = round.as_secs_f64() / count as f64;
            let shortest = config.mean_slice().as_secs_f64() * SHORTEST_PART / mean;
            let part = MAX_ROUND.as_secs_f64() / round.as_secs_f64();
            next.factor = part.max(shortest).min(1.0);
            if lone && self.in_proportion {
                next.shortest = SHORTEST_SLICE;
                next.factor = next.factor.min(LONE_SLICE.as_secs_f64() / round.as_secs_f64());
            } else if lone {
                next.longest = if self.turns.are_many() { LONE_LONG_SLICE } else { LONE_SLICE };
            } else if (briefly || newly) && competing > 0 {
                let brief = BESIDE_BRIEF_SLICE.as_secs_f64() * f64::from(channel_groups);
                next.factor = next.factor.min(brief / round.as_secs_f64());
            }
        }
        let before = self.competing;
        let near = (next.factor / before.factor - 1.0).abs() <= TOLERANCE;
        let bounds = |length: &Length| (length.shortest, length.longest);
        if !near || bounds(&next) != bounds(&before) || next == Length::UNCHANGED {
            self.competing = next;
        }
        self.round = Duration::ZERO;
        if competing > 0 {
            self.round = round
                .mul_f64(self.competing.factor)
                .min(self.competing.longest.saturating_mul(competing as u32));
        }
    }
}
