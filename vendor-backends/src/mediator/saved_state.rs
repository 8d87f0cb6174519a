//! File with the saved state of a vGPU, from a GPU process to a worker. A state with many mappings
//! does not fit into a packet.

use std::fs::File;
use std::io::{self, Read, Seek, Write};
use std::os::fd::OwnedFd;

use mdev_core::gpu::SavedClient;
use nix::sys::memfd::{MFdFlags, memfd_create};

/// Longest state in bytes: a mapping has at most some 30 bytes, and page tables are limited.
const MAX_BYTES: u64 = 256 << 20;

/// Returns a file with these bytes, to be read from its start.
pub fn write(bytes: &[u8]) -> io::Result<OwnedFd> {
    let mut file = File::from(memfd_create(c"vgpu-state", MFdFlags::MFD_CLOEXEC)?);
    file.write_all(bytes)?;
    file.rewind()?;
    Ok(file.into())
}

/// Reads the state in a file.
pub fn read(file: OwnedFd) -> io::Result<SavedClient> {
    let mut bytes = Vec::new();
    File::from(file).take(MAX_BYTES).read_to_end(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(io::Error::other)
}
