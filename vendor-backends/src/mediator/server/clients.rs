//! Connections of workers, for the admin thread.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipc::seqpacket::SeqPacket;
use mdev_core::ids::VgpuId;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{Shutdown, shutdown};

use crate::mediator::emulation::vgpu::Vgpu;

/// Connections of workers.
#[derive(Clone, Debug, Default)]
pub(super) struct Clients(Arc<Mutex<Vec<(VgpuId, OwnedFd)>>>);

impl Clients {
    fn list(&self) -> MutexGuard<'_, Vec<(VgpuId, OwnedFd)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether no worker is connected.
    pub fn are_none(&self) -> bool {
        self.list().is_empty()
    }

    /// Adds a connection.
    pub fn add(&self, vgpu: &Vgpu, socket: &SeqPacket) -> io::Result<ClientEntry> {
        let socket = socket.as_fd().try_clone_to_owned()?;
        let entry = ClientEntry { clients: self.clone(), socket: socket.as_raw_fd() };
        self.list().push((vgpu.id(), socket));
        Ok(entry)
    }

    /// Returns whether the peer of a vGPU's connection has closed it.
    pub fn has_hung_up(&self, id: VgpuId) -> bool {
        self.list().iter().filter(|(vgpu, _)| *vgpu == id).any(|(_, socket)| {
            let mut fds = [PollFd::new(socket.as_fd(), PollFlags::empty())];
            poll(&mut fds, PollTimeout::ZERO).is_ok() && fds[0].any() == Some(true)
        })
    }

    /// Shuts a worker's connection down, so that the worker notices the eviction at once.
    pub fn hang_up(&self, id: VgpuId) {
        for (_, socket) in self.list().iter().filter(|(vgpu, _)| *vgpu == id) {
            let _ = shutdown(socket.as_raw_fd(), Shutdown::Both);
        }
    }
}

/// Entry in [`Clients`], removed when dropped.
#[derive(Debug)]
pub(super) struct ClientEntry {
    clients: Clients,
    socket: RawFd,
}

impl Drop for ClientEntry {
    fn drop(&mut self) {
        self.clients.list().retain(|(_, socket)| socket.as_raw_fd() != self.socket);
    }
}
