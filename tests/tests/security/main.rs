//! Access control, sandboxes and hostile clients.

mod abuse;
mod access;
mod sandbox;
