//! Access control, sandboxes and hostile clients.

mod abuse;
mod access;
mod sandbox;
mod system_calls;
mod worker_users;
