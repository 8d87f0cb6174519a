//! libvirt: hosts with domains that have vGPUs, and the hook by itself.
//!
//! `cargo lab test` boots the hosts, as does
//! `cargo test -p system-tests --test libvirt -- --ignored --test-threads=1`.

mod domains;
mod hook;
mod host;
mod saving;
