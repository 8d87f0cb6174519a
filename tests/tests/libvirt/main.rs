//! libvirt: hosts with domains that have vGPUs, libvirt's hook by itself, and KubeVirt's hook.
//!
//! `cargo lab test` boots the hosts, as does
//! `cargo test -p system-tests --test libvirt -- --ignored --test-threads=1`.

mod domains;
mod hook;
mod host;
mod kubevirt;
mod saving;
