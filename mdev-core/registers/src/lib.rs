//! Registers, PCI configuration space and interrupts of an emulated PCI function, from tables.
//!
//! A device declares its registers as [`Row`]s of a [`Bank`]. The bank derives dispatch, partial
//! and spanning accesses, reset, saved state and documentation tables from the rows. The device
//! adds the registers' behaviour, as a `match` on the register's id.
//!
//! * [`row`]: declaration of a register
//! * [`bank`]: register values and accesses
//! * [`markdown`]: register tables for documentation
//! * [`bar`], [`capability`], [`config`]: base address registers, capabilities, configuration space
//! * [`interrupts`]: INTx and MSI, delivered by eventfd

pub mod bank;
pub mod bar;
pub mod capability;
pub mod config;
pub mod interrupts;
pub mod markdown;
pub mod row;

pub use bank::{Bank, BankState, RestoreError, Write};
pub use bar::{Bar, BarWidth};
pub use config::{CONFIG_BYTES, ConfigEffect, ConfigReg, ConfigSpace, ConfigTable, Identity};
pub use interrupts::{Interrupts, IrqError, IrqIndex, IrqInfo};
pub use row::{Access, Row, Width};
