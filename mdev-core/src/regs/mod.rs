//! The trap table: registers declared as data, and the engine that accesses them.
//!
//! A device declares its registers as [`Row`]s and puts them into a [`Bank`]. Dispatch, partial and spanning accesses,
//! reset, saved state and the tables in `docs/` all come from the rows; a device adds only what a register does, as a
//! `match` on the register's id.

mod bank;
mod markdown;
mod row;

pub use bank::{Bank, BankState, RestoreError, Write};
pub use row::{Access, Row, Width};
