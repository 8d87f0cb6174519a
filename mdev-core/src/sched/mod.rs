//! Who gets how much of a parent's time.
//!
//! The silicon's runlist goes round the groups that have work and gives each its time slice. What is here decides the
//! slices and, for caps, the budgets (or the gates): a state machine with events and a clock in and actions out,
//! without a thread, a clock or I/O of its own, so that it can be simulated.
//!
//! * [`policy`], [`share`]: what an operator may ask for
//! * [`engine`]: the state machine
//! * [`budget`]: a cap, and the meter that holds a group to it
//! * [`account`]: what was measured, over intervals and over a window
//! * [`log`]: the last decisions
//! * [`sim`]: a runlist to try policies on

pub mod account;
pub mod budget;
pub mod engine;
pub mod log;
pub mod policy;
pub mod share;
pub mod sim;

pub use account::Ledger;
pub use budget::{Budget, Meter};
pub use engine::{Action, Event, Scheduler, ShareError, Snapshot};
pub use policy::{Averaging, Config, ConfigError, Enforcement, Policy, Silicon};
pub use share::{Core, CoreError, Mode, Priority, Share, WordError};
