//! Client of `vgpud`'s control API.
//!
//! * [`client`]: requests over the control socket
//! * `file_sender`: a connection that passes a file
//! * [`error`]: errors, each a line with the cause and the remedy

pub mod client;
pub mod error;
mod file_sender;

pub use client::{Client, vgpu_path};
pub use error::ClientError;
pub use hyper::Method;
