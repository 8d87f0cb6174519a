//! Interrupts of one vGPU: the pending word that a worker reads, and the eventfds that are signalled.
//!
//! The eventfds belong to others, who could make a write to them block. So a thread of its own, one per vGPU, writes
//! to them: the engine only leaves a bit and wakes it.

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
    /// One per vector, then the worker's.
    targets: Mutex<[Option<Arc<File>>; VECTORS as usize + 1]>,
}

/// The interrupts of one vGPU.
#[derive(Debug)]
pub struct Signals {
    status: Arc<Mapping>,
    shared: Arc<Shared>,
    thread: Thread,
}

impl Signals {
    /// Starts the thread. `status` is the page that is shared with the worker, `event` the eventfd it watches.
    pub fn new(status: Arc<Mapping>, event: OwnedFd) -> io::Result<Self> {
        let targets = [None, None, None, None, Some(Arc::new(File::from(event)))];
        let shared = Arc::new(Shared { raised: AtomicU32::new(0), targets: Mutex::new(targets) });
        let for_thread = Arc::clone(&shared);
        let handle = thread::Builder::new()
            .name("gpu-irq".into())
            .stack_size(64 << 10)
            .spawn(move || deliver(&for_thread))?;
        Ok(Self { status, shared, thread: handle.thread().clone() })
    }

    /// Sets pending bits, and signals the worker and, if one is set for it, the vector's eventfd.
    pub fn raise(&self, pending: Pending, vector: Option<u32>) {
        let before = self.status.or_u32(STATUS_PENDING as u64, pending.bits()).unwrap_or_default();
        // A bit that is still pending has been signalled, and the worker is yet to take it.
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
        let mut targets = self.shared.targets.lock().unwrap_or_else(PoisonError::into_inner);
        targets[vector as usize] = event.map(|event| Arc::new(File::from(event)));
        Ok(())
    }

    fn post(&self, bits: u32) {
        if bits != 0 && self.shared.raised.fetch_or(bits, Ordering::AcqRel) & bits != bits {
            self.thread.unpark();
        }
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        // Not joined: whoever owns an eventfd can hold the thread in a write for as long as they keep it.
        self.post(STOP);
    }
}

fn deliver(shared: &Shared) {
    loop {
        let raised = shared.raised.swap(0, Ordering::AcqRel);
        for index in 0..=VECTORS {
            if raised & 1 << index != 0 {
                let targets = shared.targets.lock().unwrap_or_else(PoisonError::into_inner);
                let target = targets[index as usize].clone();
                drop(targets);
                if let Some(mut target) = target.as_deref() {
                    // A full counter is an interrupt that is still to be taken.
                    let _ = target.write(&1u64.to_ne_bytes());
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
    link.is_ok_and(|target| target.as_os_str() == "anon_inode:[eventfd]")
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
        let signals = Signals::new(Arc::clone(&status), event).unwrap();
        let (vector, mut guest) = eventfd();
        signals.set_vector(2, Some(vector)).unwrap();
        signals.raise(Pending::NONSTALL, Some(2));
        assert_eq!((count(&mut worker), count(&mut guest)), (1, 1));
        signals.raise(Pending::NONSTALL, Some(2));
        assert_eq!(count(&mut guest), 1);
        assert_eq!(status.swap_u32(0, 0), Some(Pending::NONSTALL.bits()));
        signals.raise(Pending::CHANNEL_ERROR, None);
        assert_eq!(count(&mut worker), 1, "not for the interrupt that was pending already");
    }

    #[test]
    fn takes_nothing_but_eventfds() {
        let status = SharedMemory::new(c"status", 4096).unwrap().mapping;
        let signals = Signals::new(status, eventfd().0).unwrap();
        let (pipe, _other) = nix::unistd::pipe().unwrap();
        assert_eq!(signals.set_vector(0, Some(pipe)), Err(Refusal::Descriptor));
        assert_eq!(signals.set_vector(4, None), Err(Refusal::Vector));
    }
}
