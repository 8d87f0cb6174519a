//! Access control, sandboxes and hostile clients.

mod abuse;
mod access;
mod cgroups;
mod descriptors;
mod doorbells;
mod held_memory;
mod lingering;
mod listeners;
mod logs;
mod lost;
mod memory;
mod previous_client;
mod sandbox;
mod system_calls;
mod taken_over;
mod waiting;
mod worker_users;
