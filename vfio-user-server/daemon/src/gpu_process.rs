//! A GPU process: opens the hardware of one parent, gives up the rights that it no longer needs,
//! and serves the manager and the workers.
//!
//! The process outlives the manager: closing a device would reset it under running VMs.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use ipc::seqpacket::SeqPacketListener;
use vendor_backends::backend::Opener;
use vendor_backends::mediator::server;
use vgpud_host::users::Account;

use crate::backend::ParentConfig;
use crate::spawn;
use crate::worker::sandbox::{self, system_calls::Role};

/// Time without a manager and without a vGPU after which a GPU process ends.
const ORPHAN_GRACE: Duration = Duration::from_secs(30);

/// Arguments of a GPU process.
#[derive(Debug)]
pub struct GpuProcessArgs {
    /// The parent.
    pub parent: ParentConfig,
    /// User that the process becomes, if it starts as root and may leave root.
    pub user: Account,
    /// Socket on which the manager connects.
    pub admin: OwnedFd,
    /// File for the reason why the process could not start.
    pub startup_error: OwnedFd,
}

/// Opens the hardware and serves it.
///
/// # Errors
///
/// Fails if the hardware cannot be opened or root cannot be left.
pub fn run(args: GpuProcessArgs) -> Result<()> {
    let GpuProcessArgs { parent, user, admin, startup_error } = args;
    let Opener::Process(hardware) = parent.source.opener() else {
        bail!("{} needs no GPU process", parent.name);
    };
    let has_device = hardware.needs_root();
    let hardware = match hardware.open() {
        Ok(hardware) => hardware,
        Err(error) => {
            File::from(startup_error).write_all(error.to_string().as_bytes())?;
            return Err(anyhow::Error::from_boxed(error));
        }
    };
    drop(startup_error);
    let files = hardware.files();
    if nix::unistd::geteuid().is_root() {
        if files.is_empty() {
            spawn::become_user(user).context("Cannot leave root")?;
        } else {
            // The files belong to root.
            if let Err(error) = spawn::drop_capabilities() {
                // A service's system call filter may refuse this call; the service has few
                // capabilities then.
                log::warn!("Cannot give up root's capabilities: {error}");
            }
        }
    }
    sandbox::enter(Role::GpuProcess { has_device, opens_files: !files.is_empty() }, &files);
    hardware.start();
    server::run(hardware, ORPHAN_GRACE, &SeqPacketListener::from(admin))
        .context("The GPU process has ended")
}
