//! A context process: the memory and the engine of one vGPU, whose GPU has no hardware of its own.
//!
//! It outlives the manager and the GPU process, which gives it turns on the engine.

use std::fs::File;
use std::os::fd::OwnedFd;

use anyhow::{Context, Result, bail};
use ipc::seqpacket::SeqPacketListener;
use mdev_core::gpu::ClientSpec;
use vendor_backends::backend::Opener;
use vendor_backends::mediator::context_process;

use crate::backend::ParentConfig;
use crate::worker::sandbox::{self, system_calls::Role};

/// Arguments of a context process.
#[derive(Debug)]
pub struct ContextArgs {
    /// The parent.
    pub parent: ParentConfig,
    /// File with the vGPU's [`ClientSpec`] in JSON.
    pub spec: OwnedFd,
    /// Connection of the vGPU's worker.
    pub worker: OwnedFd,
    /// Socket on which GPU processes connect.
    pub arbiters: OwnedFd,
}

/// Serves the vGPU until its worker ends or the vGPU is evicted.
///
/// # Errors
///
/// Fails if the parent has no contexts, or the host has no resources for the vGPU.
pub fn run(args: ContextArgs) -> Result<()> {
    let ContextArgs { parent, spec, worker, arbiters } = args;
    let Opener::Process(hardware) = parent.source.opener() else {
        bail!("{} has no contexts", parent.name);
    };
    let spec: ClientSpec = serde_json::from_reader(File::from(spec)).context("Bad --spec-fd")?;
    let hardware = hardware.open().map_err(anyhow::Error::from_boxed)?;
    sandbox::enter(Role::GpuProcess { has_device: false, opens_files: false }, &[]);
    context_process::serve(hardware, &spec, worker, SeqPacketListener::from(arbiters))
        .context("The context has ended")
}
