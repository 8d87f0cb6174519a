//! VMs under QEMU, the bundle, the Debian package, the web console in a browser.
//!
//! `cargo lab test` runs these tests, as does
//! `cargo test -p system-tests --test qemu -- --ignored --test-threads=1`.

mod browser;
mod bundle;
mod package;
mod vms;
