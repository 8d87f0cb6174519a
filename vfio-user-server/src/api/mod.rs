//! The manager's control API: HTTP/1.1 with JSON on a UNIX socket.
//!
//! * [`model`]: what is said, as types; clients such as `vgpuctl` use the same ones

pub mod model;
