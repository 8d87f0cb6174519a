//! A client that two threads use.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::{Aperture, Apertures, Client, ClientSpec, GpuDescription};

/// A client that the device model shares with the thread of the control queue, and what does not
/// need the client.
///
/// A request of the queue can hold the client for milliseconds. While the queue runs, accesses of a
/// guest to registers therefore do not wait for it: they use [`Self::try_lock`], and what is here.
#[derive(Debug)]
pub struct ClientHandle {
    client: Arc<Mutex<Box<dyn Client>>>,
    spec: ClientSpec,
    gpu: GpuDescription,
    apertures: Apertures,
    event: OwnedFd,
    wake_event: Option<OwnedFd>,
}

/// The client of a [`ClientHandle`], for another thread.
#[derive(Clone, Debug)]
pub struct SharedClient(Arc<Mutex<Box<dyn Client>>>);

impl SharedClient {
    /// Returns the client, for one operation or request.
    pub fn lock(&self) -> MutexGuard<'_, Box<dyn Client>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ClientHandle {
    /// Wraps a client.
    pub fn new(client: Box<dyn Client>) -> io::Result<Self> {
        Ok(Self {
            spec: client.spec().clone(),
            gpu: client.gpu().clone(),
            apertures: duplicate(client.apertures())?,
            event: client.event().try_clone_to_owned()?,
            wake_event: client.wake_event().map(|fd| fd.try_clone_to_owned()).transpose()?,
            client: Arc::new(Mutex::new(client)),
        })
    }

    /// Returns the client for another thread.
    pub fn share(&self) -> SharedClient {
        SharedClient(Arc::clone(&self.client))
    }

    /// Returns the client.
    pub fn lock(&self) -> MutexGuard<'_, Box<dyn Client>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the client unless another thread uses it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, Box<dyn Client>>> {
        match self.client.try_lock() {
            Ok(client) => Some(client),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Reads again what changes when the client gets new memory.
    pub fn refresh(&mut self) -> io::Result<()> {
        let client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        self.apertures = duplicate(client.apertures())?;
        self.wake_event = client.wake_event().map(|fd| fd.try_clone_to_owned()).transpose()?;
        Ok(())
    }

    /// Returns the granted resources.
    pub fn spec(&self) -> &ClientSpec {
        &self.spec
    }

    /// Returns the description of the GPU.
    pub fn gpu(&self) -> &GpuDescription {
        &self.gpu
    }

    /// Returns the ranges that the guest may map.
    pub fn apertures(&self) -> &Apertures {
        &self.apertures
    }

    /// Returns the descriptor of [`Client::event`].
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Returns the eventfd of [`Client::wake_event`].
    pub fn wake_event(&self) -> Option<BorrowedFd<'_>> {
        self.wake_event.as_ref().map(AsFd::as_fd)
    }
}

fn duplicate(apertures: &Apertures) -> io::Result<Apertures> {
    let copy = |aperture: &Option<Aperture>| -> io::Result<Option<Aperture>> {
        let Some(Aperture { fd, offset, len }) = aperture else { return Ok(None) };
        Ok(Some(Aperture { fd: fd.try_clone()?, offset: *offset, len: *len }))
    };
    Ok(Apertures {
        vram: copy(&apertures.vram)?,
        doorbell: copy(&apertures.doorbell)?,
        framebuffer: copy(&apertures.framebuffer)?,
    })
}
