//! File with the saved state of a vGPU, from a GPU process to a worker. A state with many mappings
//! does not fit into a packet.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;

use ipc::mem::file_of;
use mdev_core::gpu::SavedClient;

/// Longest state in bytes: a mapping has at most some 30 bytes, and page tables are limited.
const MAX_BYTES: u64 = 256 << 20;

/// Returns a file with a state.
pub fn write(state: &SavedClient) -> io::Result<OwnedFd> {
    file_of(c"vgpu-state", &postcard::to_stdvec(state).map_err(io::Error::other)?)
}

/// Reads the state in a file.
pub fn read(file: OwnedFd) -> io::Result<SavedClient> {
    let mut bytes = Vec::new();
    File::from(file).take(MAX_BYTES).read_to_end(&mut bytes)?;
    postcard::from_bytes(&bytes).map_err(io::Error::other)
}
