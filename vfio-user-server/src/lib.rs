//! The vfio-user server, and the roles of `vgpud` that are built on it.

pub mod api;
pub mod private;
