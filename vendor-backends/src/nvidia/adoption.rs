//! Adoption of the client of a worker that has ended.
//!
//! The driver ties a client to its open files. While another process, the worker's anchor, has
//! these files, the client lives on with its channels, which the GPU executes. The next worker gets
//! the files and builds its view of the client from what the one before has recorded. It cannot
//! open memory for the CPU (`NV_ESC_RM_MAP_MEMORY`): the driver allows that to the process that
//! made the client. So each such file is kept too.
//!
//! * [`journal`]: the file with the records
//! * [`state`]: objects, memory and channels, recorded with the worker's own state
//! * [`moment`]: times in records
//! * [`descriptors`]: numbers of the kept descriptors
//!
//! What changes by itself, such as gates and engine time, is recorded when it changes, by its owner
//! ([`super::channels::LiveChannels`], [`super::activity::LiveAccounting`]).
//!
//! A worker can end between two driver calls. Handles are numbers of the client's own choice, so
//! the next worker repeats the request with the same handles ([`nvidia_rm::rm_client::RmClient`]).

pub mod descriptors;
pub mod journal;
pub mod moment;
pub mod state;

use mdev_core::gpu::GpuError;

/// Error for records from which no client can be built.
pub(super) const DAMAGED: GpuError = GpuError::Invalid("a record of the worker before");
