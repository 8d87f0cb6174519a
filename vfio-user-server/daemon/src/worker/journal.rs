//! Journal of a worker: what the adopting worker needs, in a file that the anchor keeps.
//!
//! * `layout`: records in the file; `progress`: how far a session has come
//! * `state`: contents of the records
//! * `recorder`: recording of the worker's state
//! * `program_records`: records of programs; `queue_recorder`: recording those of a VM by the
//!   control queue's thread; `programs_recorder`: those of the host; `program_memory`: their
//!   descriptors
//! * [`descriptors`]: descriptors that the anchor keeps

pub mod descriptors;
mod layout;
mod program_memory;
mod program_records;
mod programs_recorder;
mod progress;
mod queue_recorder;
mod recorder;
mod state;

pub use layout::{BYTES, Journal};
pub use program_records::ProgramRecords;
pub use programs_recorder::{
    Answer, JournaledPrograms, OpenFile, ProgramChanges, ProgramState, ProgramsRecorder, Source,
};
pub use queue_recorder::{JournaledQueue, QueueRecorder, SharedRecorded};
pub use recorder::Recorder;
pub use state::Journaled;
