//! VMs under QEMU, the bundle, the Debian package, the web console in a browser, alerts and
//! dashboard.
//!
//! `cargo lab test` runs these tests, as does
//! `cargo test -p system-tests --test qemu -- --ignored --test-threads=1`.

#![allow(clippy::unwrap_used, reason = "tests")]

mod bench;
mod browser;
mod bundle;
mod firmware;
mod migrating;
mod monitoring;
mod package;
mod run_vm;
mod saving;
mod saving_endurance;
mod tools;
mod upgrading;
mod vms;
