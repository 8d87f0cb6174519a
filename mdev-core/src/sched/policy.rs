//! Scheduling policies and settings, and the GPU features that scheduling depends on.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::share::KeywordError;
use crate::gpu::GpuCapabilities;

/// Shortest slice that can be set. Shorter slices would cost more in switches than they run.
pub const MIN_SLICE: Duration = Duration::from_micros(100);
/// Shortest slice that the scheduler gives by itself: beside that of the only vGPU that competes,
/// where switches cost little.
pub const SHORTEST_SLICE: Duration = Duration::from_micros(10);
/// Longest slice. Longer slices would make other vGPUs stutter.
pub const MAX_SLICE: Duration = Duration::from_millis(30);
/// Shortest period of a cap.
pub const MIN_PERIOD: Duration = Duration::from_millis(1);
/// Longest period of a cap.
pub const MAX_PERIOD: Duration = Duration::from_millis(30);

/// Policy by which a parent's time is divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Policy {
    /// Equal slices among busy vGPUs. The policy ignores `core`.
    BestEffort,
    /// 1/n of the GPU for each of n started vGPUs, whether or not the others are busy.
    EqualShare,
    /// 1/(maximum instances of the vGPU's type), always.
    FixedShare,
    /// At least `core` percent of the GPU while others contend.
    ///
    /// vGPUs without `core` get equal parts of the rest. Without any `core`, the policy is the same
    /// as best effort.
    #[default]
    Weighted,
}

impl Policy {
    /// All policies.
    pub const ALL: [Self; 4] =
        [Self::BestEffort, Self::EqualShare, Self::FixedShare, Self::Weighted];

    /// Returns the name in configuration and output.
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
    type Err = KeywordError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|policy| policy.name() == text).ok_or_else(|| KeywordError {
            subject: "A policy",
            known: "best-effort, equal-share, fixed-share or weighted",
            keyword: text.to_owned(),
        })
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// NVIDIA's adaptive round robin: a frequency instead of a slice, and a time of repayment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Averaging {
    /// Number of slices over which a deviation is repaid: 1 to 60.
    pub factor: u8,
    /// Mean number of slices in a second: 63 to 960.
    pub frequency: u16,
}

impl Default for Averaging {
    fn default() -> Self {
        Self { factor: 33, frequency: 480 }
    }
}

/// Settings of a parent's scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Config {
    /// The policy.
    pub policy: Policy,
    /// Mean of all slices, as far as the bounds of a slice allow: 0.1 to 30 ms.
    pub slice: Duration,
    /// Period of caps: 1 to 30 ms.
    pub period: Duration,
    /// Adaptive round robin, which overrides the mean slice.
    pub averaging: Option<Averaging>,
    /// Allows a sum of `core` over 100. Each vGPU then gets its part of the sum.
    pub overcommit: bool,
}

impl Config {
    /// Returns the defaults for a GPU with `slice` as its default slice.
    pub const fn new(slice: Duration) -> Self {
        Self {
            policy: Policy::Weighted,
            slice,
            period: Duration::from_millis(20),
            averaging: None,
            overcommit: false,
        }
    }

    /// Checks that every setting is within its bounds.
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

    /// Clamps every setting to its bounds.
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

    /// Returns the mean slice in force.
    pub fn mean_slice(&self) -> Duration {
        match self.averaging {
            Some(averaging) => Duration::from_secs(1) / u32::from(averaging.frequency.max(1)),
            None => self.slice,
        }
    }
}

/// Setting out of its bounds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Mean slice.
    #[error("A time slice is 0.1 to 30 ms, not {} ms", .0.as_secs_f64() * 1e3)]
    Slice(Duration),
    /// Period of caps.
    #[error("The period of caps is 1 to 30 ms, not {} ms", .0.as_secs_f64() * 1e3)]
    Period(Duration),
    /// Averaging factor.
    #[error("The averaging factor is 1 to 60, not {0}")]
    Factor(u8),
    /// Scheduling frequency.
    #[error("The scheduling frequency is 63 to 960 slices a second, not {0}")]
    Frequency(u16),
}

/// Means of enforcing caps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Enforcement {
    /// The GPU, with a budget of engine time per period: exact, without work for the manager.
    Budgets,
    /// The scheduler, with gates: counters must be read at each `Scheduler::next_deadline`.
    Gates,
}

/// GPU features that scheduling depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GpuFeatures {
    /// Means of enforcing caps.
    pub enforcement: Enforcement,
    /// The GPU preempts a running kernel. Otherwise a vGPU keeps the engine until its last kernel
    /// ends.
    pub preempts: bool,
    /// The GPU keeps shares by slices alone, so there are no debts to repay.
    pub exact_slices: bool,
}

impl From<GpuCapabilities> for GpuFeatures {
    fn from(capabilities: GpuCapabilities) -> Self {
        let budgets = capabilities.contains(GpuCapabilities::BUDGETS);
        let enforcement = if budgets { Enforcement::Budgets } else { Enforcement::Gates };
        let preempts = capabilities.contains(GpuCapabilities::PREEMPTION);
        Self {
            enforcement,
            preempts,
            exact_slices: capabilities.contains(GpuCapabilities::EXACT_SLICES),
        }
    }
}

/// Features of a GPU that preempts.
impl From<Enforcement> for GpuFeatures {
    fn from(enforcement: Enforcement) -> Self {
        Self { enforcement, preempts: true, exact_slices: false }
    }
}
