//! The policies and their knobs.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::share::WordError;
use crate::gpu::GpuCapabilities;

/// The shortest slice: below it the runlist would do little but switch.
pub const MIN_SLICE: Duration = Duration::from_micros(100);
/// The longest slice: above it the others would stutter.
pub const MAX_SLICE: Duration = Duration::from_millis(30);
/// The shortest period of a cap.
pub const MIN_PERIOD: Duration = Duration::from_millis(1);
/// The longest period of a cap.
pub const MAX_PERIOD: Duration = Duration::from_millis(30);

/// How a parent's time is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Equal slices among those that have work. `core` means nothing.
    BestEffort,
    /// Each started vGPU gets 1/n, whether or not the others are busy.
    EqualShare,
    /// Each gets 1/(most instances of its type), always.
    FixedShare,
    /// At least `core` hundredths while others contend; those that did not ask have equal parts of what is left.
    ///
    /// Where no vGPU asks, this is best effort.
    #[default]
    Weighted,
}

impl Policy {
    /// All of them.
    pub const ALL: [Self; 4] =
        [Self::BestEffort, Self::EqualShare, Self::FixedShare, Self::Weighted];

    /// As people write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::BestEffort => "best-effort",
            Self::EqualShare => "equal-share",
            Self::FixedShare => "fixed-share",
            Self::Weighted => "weighted",
        }
    }
}

impl FromStr for Policy {
    type Err = WordError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|policy| policy.name() == text).ok_or_else(|| WordError {
            what: "A policy",
            known: "best-effort, equal-share, fixed-share or weighted",
            word: text.to_owned(),
        })
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// NVIDIA's adaptive round robin: a frequency instead of a slice, and over how many slices a deviation is made good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Averaging {
    /// Slices over which a deviation is made good: 1 to 60.
    pub factor: u8,
    /// Slices in a second, on average: 63 to 960.
    pub frequency: u16,
}

impl Default for Averaging {
    fn default() -> Self {
        Self { factor: 33, frequency: 480 }
    }
}

/// The knobs of a parent's scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// How time is divided.
    pub policy: Policy,
    /// Mean of all slices, where the bounds of a slice allow it: 0.1 to 30 ms.
    pub slice: Duration,
    /// Over how long a cap is kept: 1 to 30 ms.
    pub period: Duration,
    /// Adaptive round robin. While it is on, it sets the mean slice.
    pub averaging: Option<Averaging>,
    /// Whether more than the whole GPU may be asked for. Each then gets its part of what is asked for.
    pub overcommit: bool,
}

impl Config {
    /// The defaults on a GPU whose slices are best at `slice`.
    pub const fn new(slice: Duration) -> Self {
        Self {
            policy: Policy::Weighted,
            slice,
            period: Duration::from_millis(20),
            averaging: None,
            overcommit: false,
        }
    }

    /// Whether every knob is in its bounds.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !(MIN_SLICE..=MAX_SLICE).contains(&self.slice) {
            return Err(ConfigError::Slice(self.slice));
        }
        if !(MIN_PERIOD..=MAX_PERIOD).contains(&self.period) {
            return Err(ConfigError::Period(self.period));
        }
        match self.averaging {
            Some(averaging) if !(1..=60).contains(&averaging.factor) => {
                Err(ConfigError::Factor(averaging.factor))
            }
            Some(averaging) if !(63..=960).contains(&averaging.frequency) => {
                Err(ConfigError::Frequency(averaging.frequency))
            }
            _ => Ok(()),
        }
    }

    /// Every knob moved into its bounds.
    pub(super) fn clamped(self) -> Self {
        Self {
            slice: self.slice.clamp(MIN_SLICE, MAX_SLICE),
            period: self.period.clamp(MIN_PERIOD, MAX_PERIOD),
            averaging: self.averaging.map(|averaging| Averaging {
                factor: averaging.factor.clamp(1, 60),
                frequency: averaging.frequency.clamp(63, 960),
            }),
            ..self
        }
    }

    /// The mean slice in force.
    pub fn mean_slice(&self) -> Duration {
        match self.averaging {
            Some(averaging) => Duration::from_secs(1) / u32::from(averaging.frequency.max(1)),
            None => self.slice,
        }
    }
}

/// A knob out of its bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The mean slice.
    #[error("A time slice is 0.1 to 30 ms, not {} ms", .0.as_secs_f64() * 1e3)]
    Slice(Duration),
    /// The period of caps.
    #[error("The period of caps is 1 to 30 ms, not {} ms", .0.as_secs_f64() * 1e3)]
    Period(Duration),
    /// The averaging factor.
    #[error("The averaging factor is 1 to 60, not {0}")]
    Factor(u8),
    /// The frequency.
    #[error("The scheduling frequency is 63 to 960 slices a second, not {0}")]
    Frequency(u16),
}

/// Who holds a vGPU to its cap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// The silicon, with a budget of engine time per period: exact, and costs the manager nothing.
    Budgets,
    /// The scheduler, with gates: it must be asked at each [`super::Scheduler::next_deadline`].
    Gates,
}

/// What a scheduler has to know of the silicon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Silicon {
    /// Who holds a vGPU to its cap.
    pub enforcement: Enforcement,
    /// Whether a running kernel is preempted. Where it is not, a turn lasts as long as its last kernel.
    pub preempts: bool,
    /// Whether it keeps shares by slices alone: nothing is to be made good.
    pub exact: bool,
}

impl From<GpuCapabilities> for Silicon {
    fn from(capabilities: GpuCapabilities) -> Self {
        let budgets = capabilities.contains(GpuCapabilities::BUDGETS);
        let enforcement = if budgets { Enforcement::Budgets } else { Enforcement::Gates };
        let preempts = capabilities.contains(GpuCapabilities::PREEMPTION);
        Self { enforcement, preempts, exact: capabilities.contains(GpuCapabilities::EXACT_SLICES) }
    }
}

/// Silicon that preempts.
impl From<Enforcement> for Silicon {
    fn from(enforcement: Enforcement) -> Self {
        Self { enforcement, preempts: true, exact: false }
    }
}
