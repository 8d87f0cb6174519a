//! Who gets how much of a parent's time.
//!
//! The silicon's runlist goes round the groups that have work and gives each its time slice. What is here decides the
//! slices (and, for caps, the gates): a state machine with events and a clock in and actions out, without a thread, a
//! clock or I/O of its own, so that it can be simulated.
//!
//! * [`policy`]: the engine
//! * [`account`]: what was measured, over intervals and over a window
//! * [`sim`]: a runlist to try policies on

use std::fmt;
use std::num::NonZeroU8;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub mod account;
pub mod policy;
pub mod sim;

pub use account::Ledger;
pub use policy::{Action, Config, Event, Policy, Scheduler, ShareError};

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
