//! Access to the host, shared by `vgpud` and `vgpuctl`.
//!
//! * [`users`]: users and groups of this host
//! * [`command_line`]: parser of command lines with errors of one line

pub mod command_line;
pub mod users;
