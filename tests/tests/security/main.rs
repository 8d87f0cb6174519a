//! Access control, sandboxes and hostile clients.

mod abuse;
mod access;
mod engine_time;
mod sandbox;
mod system_calls;
mod worker_users;
