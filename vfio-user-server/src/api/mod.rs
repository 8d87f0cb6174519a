//! The manager's control API: HTTP/1.1 with JSON on a UNIX socket.
//!
//! * [`model`]: what is said, as types; clients such as `vgpuctl` use the same ones
//! * [`measuring`], [`scheduling`]: the parts of it that are about statistics and about schedulers
//! * [`access`]: who may ask for what
//! * [`http`]: the paths; `request`: what they have in common; `service`: questions to the manager and the workers
//! * `parents`, `schedulers`, `statistics`, `vgpus`: what each path does
//! * [`screens`]: physical screens, and who is on them
//! * `user`: who a VM is
//! * [`metrics`]: the statistics as Prometheus reads them
//! * [`consoles`]: a vGPU's screen, live (see [`crate::console`])
//! * [`screenshot`], [`pictures`]: a vGPU's screen as a PNG, and how often it is read out

pub mod access;
pub mod consoles;
pub mod http;
pub mod measuring;
pub mod metrics;
pub mod model;
mod parents;
pub mod pictures;
pub(crate) mod request;
mod schedulers;
pub mod scheduling;
pub mod screens;
pub mod screenshot;
pub(crate) mod service;
mod statistics;
mod user;
mod vgpus;

pub use service::Api;

pub(crate) use service::waiting;
