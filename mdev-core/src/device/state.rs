//! Saved state of the function's registers: plain, versioned data.
//!
//! Video memory, channels and GPU mappings are the silicon's and are not in it. A state is untrusted input: each value
//! must be one that a guest could have set.

use serde::{Deserialize, Serialize};

use super::function::VirtualFunction;
use crate::regs::{BankState, RestoreError};

/// Bumped with every change of the saved registers or of [`SavedFunction`].
const VERSION: u32 = 1;

/// The registers of a virtual function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFunction {
    version: u32,
    config: BankState,
    control: BankState,
    display: Option<BankState>,
}

/// Why a state was not restored. The function is as it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// It was saved by another version.
    #[error("The state has version {0}; this version of Tessera reads version {VERSION}")]
    Version(u32),
    /// One has a display head and the other has none.
    #[error("The state and the vGPU differ in having a display head")]
    Display,
    /// A register's value.
    #[error("{part} registers: {source}")]
    Registers {
        /// Which registers.
        part: &'static str,
        /// What is wrong.
        source: RestoreError,
    },
}

impl VirtualFunction {
    /// The registers as they are.
    pub fn save(&self) -> SavedFunction {
        SavedFunction {
            version: VERSION,
            config: self.config.save(),
            control: self.control.save(),
            display: self.display.as_ref().map(super::display::Display::save),
        }
    }

    /// Resets the function and sets its registers, all of them or none.
    pub fn restore(&mut self, state: &SavedFunction) -> Result<(), StateError> {
        if state.version != VERSION {
            return Err(StateError::Version(state.version));
        }
        let part = |part| move |source| StateError::Registers { part, source };
        self.config.check(&state.config).map_err(part("Configuration"))?;
        self.control.check(&state.control).map_err(part("Control"))?;
        match (&self.display, &state.display) {
            (Some(display), Some(saved)) => display.check(saved).map_err(part("Display"))?,
            (None, None) => {}
            _ => return Err(StateError::Display),
        }
        self.reset();
        self.config.restore(&state.config).map_err(part("Configuration"))?;
        self.control.restore(&state.control).map_err(part("Control"))?;
        if let (Some(display), Some(saved)) = (&mut self.display, &state.display) {
            display.restore(saved).map_err(part("Display"))?;
        }
        self.tell_scanout();
        self.after_restore();
        Ok(())
    }
}
