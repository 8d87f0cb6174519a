//! What a vGPU asks for: its share, how strictly it is held, and its priority.

use std::fmt;
use std::num::NonZeroU8;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A share asked for: 1 to 100 hundredths of a GPU's time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "u8", into = "u8")]
pub struct Core(NonZeroU8);

impl Core {
    /// In hundredths.
    pub const fn get(self) -> u8 {
        self.0.get()
    }
}

/// Not 1 to 100.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("Attribute \"core\" is 1 to 100 hundredths, not {0:?}")]
pub struct CoreError(String);

impl TryFrom<u8> for Core {
    type Error = CoreError;

    fn try_from(hundredths: u8) -> Result<Self, Self::Error> {
        match NonZeroU8::new(hundredths) {
            Some(core) if hundredths <= 100 => Ok(Self(core)),
            _ => Err(CoreError(hundredths.to_string())),
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
            .and_then(|hundredths| Self::try_from(hundredths).ok())
            .ok_or_else(|| CoreError(text.to_owned()))
    }
}

impl fmt::Display for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A word that is none of those there are.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} is {known}, not {word:?}")]
pub struct WordError {
    /// What was to be named.
    pub(super) what: &'static str,
    /// What it may be.
    pub(super) known: &'static str,
    /// What it was.
    pub(super) word: String,
}

/// What a share is while others leave time over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// The least that it gets: more where others idle.
    #[default]
    Soft,
    /// The least and the most: never more, even alone.
    Hard,
}

impl Mode {
    /// As people write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Hard => "hard",
        }
    }
}

impl FromStr for Mode {
    type Err = WordError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        [Self::Soft, Self::Hard].into_iter().find(|mode| mode.name() == text).ok_or_else(|| {
            WordError { what: "Attribute \"mode\"", known: "soft or hard", word: text.to_owned() }
        })
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Who gets the time that nobody was promised: each class four times as much as the one below it.
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
    /// As people write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Normal => "normal",
            Self::High => "high",
        }
    }

    /// Parts of what nobody was promised.
    pub const fn parts(self) -> u8 {
        match self {
            Self::Low => 1,
            Self::Normal => 4,
            Self::High => 16,
        }
    }
}

impl FromStr for Priority {
    type Err = WordError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let all = [Self::Low, Self::Normal, Self::High];
        all.into_iter().find(|priority| priority.name() == text).ok_or_else(|| WordError {
            what: "Attribute \"priority\"",
            known: "low, normal or high",
            word: text.to_owned(),
        })
    }
}

impl fmt::Display for Priority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// All that a vGPU asks for of a GPU's time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Hundredths of the GPU, where it asks for some.
    pub core: Option<Core>,
    /// Whether it may have more.
    pub mode: Mode,
    /// Its class.
    pub priority: Priority,
    /// The longest that its slice may be; the others' shrink with it, so that shares hold.
    pub timeslice: Option<Duration>,
}

impl Share {
    /// `core` hundredths, soft, at normal priority.
    pub fn of(core: Option<Core>) -> Self {
        Self { core, ..Self::default() }
    }
}
