//! Journal of a worker: what the worker that continues needs, in a file that the anchor keeps.
//!
//! * `layout`: records in the file; `progress`: how far a session has come
//! * `state`: contents of the records
//! * `recorder`: recording of the worker's state
//! * [`kept`]: descriptors that the anchor keeps

pub mod kept;
mod layout;
mod progress;
mod recorder;
mod state;

pub use layout::{BYTES, Journal};
pub use recorder::Recorder;
pub use state::Continued;
