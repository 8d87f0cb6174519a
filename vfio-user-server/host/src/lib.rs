//! Access to the host, shared by `vgpud` and `vgpuctl`.
//!
//! * [`users`]: users and groups of this host
//! * [`uid_range`]: range of user IDs for processes
//! * [`text`]: text of errors with their causes
//! * [`body`]: bodies of HTTP messages as readers and writers
//! * [`preload`]: the preload library of CUDA programs
//! * [`command_line`]: parser of command lines with errors of one line

pub mod body;
pub mod command_line;
pub mod preload;
#[cfg(feature = "test-util")]
pub mod test_util;
pub mod text;
pub mod uid_range;
pub mod users;
