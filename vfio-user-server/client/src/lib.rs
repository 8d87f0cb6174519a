//! Client of `vgpud`'s control API.
//!
//! * [`client`]: requests over the control socket
//! * [`error`]: errors, each a line with the cause and the remedy

pub mod client;
pub mod error;

pub use client::{Client, vgpu_path};
pub use error::ClientError;
pub use hyper::Method;
