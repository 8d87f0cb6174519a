//! The manager's control API: HTTP/1.1 with JSON on a UNIX socket.
//!
//! * [`model`]: what is said, as types; clients such as `vgpuctl` use the same ones
//! * [`http`]: the paths, and what each does
//! * [`screenshot`]: a vGPU's screen as a PNG

pub mod http;
pub mod model;
pub mod screenshot;
