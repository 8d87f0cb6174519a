//! Interrupts of one vGPU: the pending word that a worker reads, and the eventfds.
//!
//! Other processes own the eventfds and can make writes to them block. One thread per vGPU
//! therefore writes to them; the engine only sets a bit and wakes that thread.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Thread};
use std::{fs, fs::File};

use mdev_core::abi::control::VECTORS;
use mdev_core::gpu::Pending;

use crate::mediator::wire::{Refusal, STATUS_PENDING};
use crate::mem::Mapping;

/// Bit of the worker's eventfd; the vectors have the bits below.
const EVENT: u32 = 1 << VECTORS;
const STOP: u32 = EVENT << 1;

#[derive(Debug)]
struct Shared {
    raised: AtomicU32,
    /// Eventfds of the vectors, then the worker's.
    eventfds: Mutex<[Option<Arc<File>>; VECTORS as usize + 1]>,
}

/// Interrupts of one vGPU.
#[derive(Debug)]
pub struct Interrupts {
    status: Arc<Mapping>,
    shared: Arc<Shared>,
    thread: Thread,
}

impl Interrupts {
    /// Starts the thread. `status` is the page shared with the worker, `event` the worker's
    /// eventfd.
    pub fn new(status: Arc<Mapping>, event: OwnedFd) -> io::Result<Self> {
        let eventfds = [None, None, None, None, Some(Arc::new(File::from(event)))];
        let shared = Arc::new(Shared { raised: AtomicU32::new(0), eventfds: Mutex::new(eventfds) });
        let for_thread = Arc::clone(&shared);
        let handle = thread::Builder::new()
            .name("gpu-irq".into())
            .stack_size(64 << 10)
            .spawn(move || deliver(&for_thread))?;
        Ok(Self { status, shared, thread: handle.thread().clone() })
    }

    /// Sets pending bits. Signals the worker and the vector's eventfd, if one is set.
    pub fn raise(&self, pending: Pending, vector: Option<u32>) {
        let before = self.status.or_u32(STATUS_PENDING as u64, pending.bits()).unwrap_or_default();
        // A bit that is still pending has been signalled; the worker has not read it yet.
        let event = if before & pending.bits() == pending.bits() { 0 } else { EVENT };
        let vector = vector.map_or(0, |vector| 1 << (vector % VECTORS));
        self.post(event | vector);
    }

    /// Sets or clears the eventfd of a vector.
    pub fn set_vector(&self, vector: u32, event: Option<OwnedFd>) -> Result<(), Refusal> {
        if vector >= VECTORS {
            return Err(Refusal::Vector);
        }
        if let Some(event) = &event
            && !is_eventfd(event)
        {
            return Err(Refusal::Descriptor);
        }
        let mut eventfds = self.shared.eventfds.lock().unwrap_or_else(PoisonError::into_inner);
        eventfds[vector as usize] = event.map(|event| Arc::new(File::from(event)));
        Ok(())
    }

    fn post(&self, bits: u32) {
        if bits != 0 && self.shared.raised.fetch_or(bits, Ordering::AcqRel) & bits != bits {
            self.thread.unpark();
        }
    }
}

impl Drop for Interrupts {
    fn drop(&mut self) {
        // Not joined: another process can block the thread in a write without limit.
        self.post(STOP);
    }
}

fn deliver(shared: &Shared) {
    loop {
        let raised = shared.raised.swap(0, Ordering::AcqRel);
        for index in 0..=VECTORS {
            if raised & 1 << index != 0 {
                let eventfds = shared.eventfds.lock().unwrap_or_else(PoisonError::into_inner);
                let eventfd = eventfds[index as usize].clone();
                drop(eventfds);
                if let Some(mut eventfd) = eventfd.as_deref() {
                    // A full counter is a pending interrupt.
                    let _ = eventfd.write(&1u64.to_ne_bytes());
                }
            }
        }
        if raised & STOP != 0 {
            return;
        }
        if raised == 0 {
            thread::park();
        }
    }
}

fn is_eventfd(fd: &OwnedFd) -> bool {
    use std::os::fd::AsRawFd;
    let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    link.is_ok_and(|eventfd| eventfd.as_os_str() == "anon_inode:[eventfd]")
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use nix::sys::eventfd::{EfdFlags, EventFd};

    use super::*;
    use crate::mem::SharedMemory;

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
        interrupts.set_vector(2, Some(vector)).unwrap();
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
        assert_eq!(interrupts.set_vector(0, Some(pipe)), Err(Refusal::Descriptor));
        assert_eq!(interrupts.set_vector(4, None), Err(Refusal::Vector));
    }
}
