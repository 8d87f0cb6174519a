//! The manager's control API: HTTP/1.1 with JSON on a UNIX socket.
//!
//! * [`model`]: what is said, as types; clients such as `vgpuctl` use the same ones
//! * [`scheduling`]: the part of it that is about schedulers
//! * [`http`]: the paths, and what each does
//! * [`metrics`]: the statistics as Prometheus reads them
//! * [`screenshot`]: a vGPU's screen as a PNG

pub mod http;
pub mod metrics;
pub mod model;
pub mod scheduling;
pub mod screenshot;
