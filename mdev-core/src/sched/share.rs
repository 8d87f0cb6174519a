//! Request for a share of a GPU: `core`, `mode`, `priority` and `timeslice`.

use std::fmt;
use std::num::NonZeroU8;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Requested share: 1 to 100 percent of a GPU's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Core(NonZeroU8);

impl Core {
    /// Returns the percentage.
    pub const fn get(self) -> u8 {
        self.0.get()
    }
}

/// Value of `core` outside of 1 to 100.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Attribute \"core\" is 1 to 100 hundredths, not {0:?}")]
pub struct CoreError(String);

impl TryFrom<u8> for Core {
    type Error = CoreError;

    fn try_from(percent: u8) -> Result<Self, Self::Error> {
        match NonZeroU8::new(percent) {
            Some(core) if percent <= 100 => Ok(Self(core)),
            _ => Err(CoreError(percent.to_string())),
        }
    }
}

impl From<Core> for u8 {
    fn from(core: Core) -> Self {
        core.get()
    }
}

impl FromStr for Core {
    type Err = CoreError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
        let parsed = text.parse::<u8>().ok().filter(|_| digits);
        parsed
            .and_then(|percent| Self::try_from(percent).ok())
            .ok_or_else(|| CoreError(text.to_owned()))
    }
}

impl fmt::Display for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Unknown keyword for a setting or an attribute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{subject} is {known}, not {keyword:?}")]
pub struct KeywordError {
    /// The setting or attribute.
    pub(super) subject: &'static str,
    /// The known keywords.
    pub(super) known: &'static str,
    /// The unknown keyword.
    pub(super) keyword: String,
}

/// Limit of a share while other vGPUs idle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The share is a minimum: the vGPU gets more while others idle.
    #[default]
    Soft,
    /// The share is a minimum and a maximum, even for a vGPU alone.
    Hard,
}

impl Mode {
    /// Returns the name in configuration and output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Hard => "hard",
        }
    }
}

impl FromStr for Mode {
    type Err = KeywordError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Soft, Self::Hard].into_iter().find(|mode| mode.name() == text).ok_or_else(|| {
            KeywordError {
                subject: "Attribute \"mode\"",
                known: "soft or hard",
                keyword: text.to_owned(),
            }
        })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Priority for time that no vGPU was promised: four times as much for each level.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Priority {
    /// One part.
    Low,
    /// Four parts.
    #[default]
    Normal,
    /// Sixteen parts.
    High,
}

impl Priority {
    /// Returns the name in configuration and output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        }
    }

    /// Returns the parts of the time that no vGPU was promised.
    pub const fn parts(self) -> u8 {
        match self {
            Self::Low => 1,
            Self::Normal => 4,
            Self::High => 16,
        }
    }
}

impl FromStr for Priority {
    type Err = KeywordError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Low, Self::Normal, Self::High];
        all.into_iter().find(|priority| priority.name() == text).ok_or_else(|| KeywordError {
            subject: "Attribute \"priority\"",
            known: "low, normal or high",
            keyword: text.to_owned(),
        })
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Request of a vGPU for a share of a GPU's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareRequest {
    /// Requested percentage of the GPU.
    pub core: Option<Core>,
    /// Limit of the share.
    pub mode: Mode,
    /// Priority for time that no vGPU was promised.
    pub priority: Priority,
    /// Longest slice of the vGPU. Other slices shrink in proportion, so that shares hold.
    pub timeslice: Option<Duration>,
}

impl ShareRequest {
    /// Returns a soft request for `core` at normal priority.
    pub fn with_core(core: Option<Core>) -> Self {
        Self { core, ..Self::default() }
    }
}
