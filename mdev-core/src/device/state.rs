//! Saved state of the function's registers: plain, versioned data.
//!
//! The state excludes video memory, channels and GPU mappings, which belong to the GPU: see
//! [`super::saved`]. A state is untrusted input: each value must be reachable by a guest.

use serde::{Deserialize, Serialize};

use super::function::VirtualFunction;
use pci_registers::{BankState, RestoreError};

/// Version of the state. Incremented with every change of the saved registers or of
/// [`SavedFunction`].
const VERSION: u32 = 1;

/// Saved registers of a virtual function.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SavedFunction {
    version: u32,
    pub(super) config: BankState,
    control: BankState,
    display: Option<BankState>,
}

/// Error of a restore. The function is unchanged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StateError {
    /// The state has another version.
    #[error("The state has version {0}; this version of Tessera reads version {VERSION}")]
    Version(u32),
    /// Only one of state and vGPU has a display head.
    #[error("Only one of the state and the vGPU has a display head")]
    Display,
    /// A value of a register is invalid.
    #[error("{part} registers: {source}")]
    Registers {
        /// The bank of registers.
        part: &'static str,
        /// The error.
        source: RestoreError,
    },
}

impl VirtualFunction {
    /// Returns the registers.
    pub fn save(&self) -> SavedFunction {
        SavedFunction {
            version: VERSION,
            config: self.config.save(),
            control: self.control.save(),
            display: self.display.as_ref().map(super::display::Display::save),
        }
    }

    /// Resets the function and restores its registers, or changes nothing on an error.
    pub fn restore(&mut self, state: &SavedFunction) -> Result<(), StateError> {
        self.check_state(state)?;
        self.reset();
        self.restore_registers(state)?;
        self.after_restore();
        Ok(())
    }

    /// Checks a state without restoring it.
    pub(super) fn check_state(&self, state: &SavedFunction) -> Result<(), StateError> {
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
        Ok(())
    }

    /// Restores the registers of a function that was reset.
    pub(super) fn restore_registers(&mut self, state: &SavedFunction) -> Result<(), StateError> {
        let part = |part| move |source| StateError::Registers { part, source };
        self.config.restore(&state.config).map_err(part("Configuration"))?;
        self.control.restore(&state.control).map_err(part("Control"))?;
        if let (Some(display), Some(saved)) = (&mut self.display, &state.display) {
            display.restore(saved).map_err(part("Display"))?;
        }
        self.update_scanout();
        Ok(())
    }
}
