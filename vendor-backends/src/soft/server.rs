//! The soft-gpu process: answers the manager and the workers, and drives the silicon.

use std::io;
use std::time::Duration;

use crate::seqpacket::SeqPacketListener;

/// What a soft-gpu process is started with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// The parent's name: `soft0`.
    pub name: String,
    /// Video memory that vGPUs may share, in bytes.
    pub vram_bytes: u64,
    /// How long it stays with neither a manager nor a vGPU.
    pub grace: Duration,
}

/// Serves until there has been neither a manager nor a vGPU for [`Config::grace`].
pub fn run(config: &Config, admin: &SeqPacketListener) -> io::Result<()> {
    let _ = (config, admin);
    Err(io::ErrorKind::Unsupported.into())
}
