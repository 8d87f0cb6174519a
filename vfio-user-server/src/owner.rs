//! The process that owns a physical device: it opens the device, gives up what it does not need any more, and serves.
//!
//! It outlives the manager, since closing the device would reset it under running VMs.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit, setrlimit};
use vendor_backends::mediator::server;
use vendor_backends::seqpacket::SeqPacketListener;
use vendor_backends::vfio;
use vendor_backends::vfio::host::Address;

use crate::spawn;
use crate::users::Account;
use crate::worker::sandbox;

/// What an owner is started with.
#[derive(Debug)]
pub struct OwnerArgs {
    /// The parent's name.
    pub name: String,
    /// Which device.
    pub address: Address,
    /// What the operator chose.
    pub options: vfio::Options,
    /// Whom it becomes, where it can.
    pub user: Account,
    /// Where the manager connects.
    pub admin: OwnedFd,
    /// Where it says why it could not start.
    pub words: OwnedFd,
    /// How long it stays with neither a manager nor a vGPU.
    pub grace: Duration,
}

/// Takes the device and serves it.
pub fn run(args: OwnerArgs) -> Result<()> {
    let OwnerArgs { name, address, options, user, admin, words, grace } = args;
    lift_memory_lock();
    let hardware = match vfio::open(&name, address, options) {
        Ok(hardware) => hardware,
        Err(error) => {
            File::from(words).write_all(error.to_string().as_bytes())?;
            return Err(error.into());
        }
    };
    drop(words);
    let files = hardware.files();
    if nix::unistd::geteuid().is_root() {
        if files.is_empty() {
            spawn::become_user(user).context("Cannot leave root")?;
        } else {
            // The files are root's.
            if let Err(error) = spawn::drop_capabilities() {
                // A service's filter of system calls may refuse that; its set of them is small then.
                log::warn!("Cannot give up root's capabilities: {error}");
            }
        }
    }
    sandbox::enter_with(&files);
    hardware.start();
    server::run(hardware, grace, &SeqPacketListener::from(admin)).context("The owner has ended")
}

/// Memory that a device reaches is locked, and counts against this limit.
fn lift_memory_lock() {
    let Ok((_, most)) = getrlimit(Resource::RLIMIT_MEMLOCK) else { return };
    let all = setrlimit(Resource::RLIMIT_MEMLOCK, RLIM_INFINITY, RLIM_INFINITY);
    if all.is_err() {
        let _ = setrlimit(Resource::RLIMIT_MEMLOCK, most, most);
    }
}
