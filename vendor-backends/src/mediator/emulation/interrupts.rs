//! Interrupts of one vGPU: the pending word that a worker reads, and the eventfds.
//!
//! Other processes own the eventfds and can make writes to them block. A [`Signaller`] therefore
//! writes to them; the engine only sets a bit and wakes its thread.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use foreign_fds::eventfd::Signaller;
use foreign_fds::{ForeignFd, is_eventfd};
use ipc::mem::Mapping;
use mdev_core::abi::control::VECTORS;
use mdev_core::gpu::Pending;

use crate::mediator::wire::{Refusal, STATUS_PENDING};

/// Line of the worker's eventfd; the vectors have the lines below.
const EVENT: u32 = VECTORS;

/// Interrupts of one vGPU.
#[derive(Debug)]
pub struct Interrupts {
    status: Arc<Mapping>,
    signaller: Signaller,
}

impl Interrupts {
    /// Starts the thread. `status` is the page shared with the worker, `event` the worker's
    /// eventfd.
    pub fn new(status: Arc<Mapping>, event: OwnedFd) -> io::Result<Self> {
        let signaller = Signaller::new("gpu-irq")?;
        signaller.set(EVENT as usize, Some(Arc::new(event.into())));
        Ok(Self { status, signaller })
    }

    /// Sets pending bits. Signals the worker and the vector's eventfd, if one is set.
    pub fn raise(&self, pending: Pending, vector: Option<u32>) {
        let before = self.status.or_u32(STATUS_PENDING as u64, pending.bits()).unwrap_or_default();
        // A bit that is still pending has been signalled; the worker has not read it yet.
        let event = if before & pending.bits() == pending.bits() { 0 } else { 1 << EVENT };
        let vector = vector.map_or(0, |vector| 1 << (vector % VECTORS));
        self.signaller.post(event | vector);
    }

    /// Sets or clears the eventfd of a vector.
    pub fn set_vector(&self, vector: u32, event: Option<ForeignFd>) -> Result<(), Refusal> {
        if vector >= VECTORS {
            return Err(Refusal::Vector);
        }
        if event.as_ref().is_some_and(|event| !is_eventfd(event.as_fd())) {
            return Err(Refusal::Descriptor);
        }
        self.signaller.set(vector as usize, event.map(Arc::new));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use ipc::mem::SharedMemory;
    use nix::sys::eventfd::{EfdFlags, EventFd};

    use super::*;

    fn eventfd() -> (OwnedFd, File) {
        let fd = OwnedFd::from(EventFd::from_flags(EfdFlags::EFD_CLOEXEC).unwrap());
        (fd.try_clone().unwrap(), File::from(fd))
    }

    fn count(file: &mut File) -> u64 {
        let mut bytes = [0; 8];
        file.read_exact(&mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn signals_the_worker_once_and_the_vector_each_time() {
        let status = SharedMemory::new(c"status", 4096).unwrap().mapping;
        let (event, mut worker) = eventfd();
        let interrupts = Interrupts::new(Arc::clone(&status), event).unwrap();
        let (vector, mut guest) = eventfd();
        interrupts.set_vector(2, Some(vector.into())).unwrap();
        interrupts.raise(Pending::NONSTALL, Some(2));
        assert_eq!((count(&mut worker), count(&mut guest)), (1, 1));
        interrupts.raise(Pending::NONSTALL, Some(2));
        assert_eq!(count(&mut guest), 1);
        assert_eq!(status.swap_u32(0, 0), Some(Pending::NONSTALL.bits()));
        interrupts.raise(Pending::CHANNEL_ERROR, None);
        assert_eq!(count(&mut worker), 1, "one signal: the first interrupt was pending");
    }

    #[test]
    fn only_eventfds_are_accepted() {
        let status = SharedMemory::new(c"status", 4096).unwrap().mapping;
        let interrupts = Interrupts::new(status, eventfd().0).unwrap();
        let (pipe, _other) = nix::unistd::pipe().unwrap();
        assert_eq!(interrupts.set_vector(0, Some(pipe.into())), Err(Refusal::Descriptor));
        assert_eq!(interrupts.set_vector(4, None), Err(Refusal::Vector));
    }
}
