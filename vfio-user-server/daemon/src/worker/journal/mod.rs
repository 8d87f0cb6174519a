//! Journal of a worker: what the worker that continues needs, in a file that the anchor keeps.
//!
//! * `layout`: records in the file; `progress`: how far a session has come
//! * `state`: contents of the records
//! * `recorder`: recording of the worker's state
//! * `queue_file`: records of the control queue's thread; `queue_recorder`: recording them
//! * [`kept`]: descriptors that the anchor keeps

pub mod kept;
mod layout;
mod progress;
mod queue_file;
mod queue_recorder;
mod recorder;
mod state;

pub use layout::{BYTES, Journal};
pub use queue_file::QueueFile;
pub use queue_recorder::{ContinuedQueue, QueueRecorder, SharedRecorded};
pub use recorder::Recorder;
pub use state::Continued;
