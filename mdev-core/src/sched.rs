//! Scheduler of a parent's time.
//!
//! The GPU's runlist rotates over the groups with work, and gives each a time slice. The scheduler
//! decides slices, and budgets or gates for caps. It is a state machine with events and a clock as
//! input and actions as output, without threads, clocks or I/O, so it can be simulated.
//!
//! Modules in reading order:
//!
//! * [`policy`], [`share`]: settings of a parent, and the request of a vGPU
//! * [`scheduler`]: the state machine
//! * [`budget`]: budget of engine time for a cap, and its meter
//! * [`account`]: measured usage, over an interval and over a window
//! * [`log`]: the last decisions
//! * [`sim`]: simulated runlist

pub mod account;
pub mod budget;
pub mod log;
pub mod policy;
pub mod scheduler;
pub mod share;
pub mod sim;

pub use account::Ledger;
pub use budget::{Budget, Meter};
pub use policy::{Averaging, Config, ConfigError, Enforcement, GpuFeatures, Policy};
pub use scheduler::{Action, Event, Scheduler, ShareError, Snapshot};
pub use share::{Core, CoreError, KeywordError, Mode, Priority, ShareRequest};
