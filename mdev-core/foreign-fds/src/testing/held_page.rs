//! A page whose first access waits, as one of a file whose server does not answer.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::thread::{self, JoinHandle};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::EventFd;

/// Bytes of a page.
const PAGE: usize = 4096;

/// `UFFD_API`, `UFFDIO_API`, `UFFDIO_REGISTER` and `UFFDIO_ZEROPAGE` (linux/userfaultfd.h).
const UFFD_API: u64 = 0xaa;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_ZEROPAGE: libc::c_ulong = 0xc020_aa04;
/// `UFFDIO_REGISTER_MODE_MISSING`.
const MISSING: u64 = 1;

/// A thread that takes an eventfd's events to a page whose first access waits. The lock of its
/// epoll set is held meanwhile. Dropping it lets the access go on.
#[derive(Debug)]
pub struct HeldEpoll {
    faults: File,
    page: usize,
    thread: Option<JoinHandle<()>>,
}

/// Returns an eventfd whose last close waits until the other value is dropped, or `None` without
/// the right to hold a page fault of the kernel (userfaultfd(2)).
pub fn held_eventfd() -> Option<(OwnedFd, HeldEpoll)> {
    // SAFETY: creates a descriptor, which has no other owner.
    let faults = unsafe {
        // Only one that does not block can be polled.
        let fd = libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK);
        (fd >= 0).then(|| File::from_raw_fd(fd as i32))?
    };
    let request = |number, words: &mut [u64]| {
        // SAFETY: the arrays below have the length of the request's structure.
        let result = unsafe { libc::ioctl(faults.as_raw_fd(), number, words.as_mut_ptr()) };
        (result == 0).then_some(()).ok_or_else(io::Error::last_os_error)
    };
    let access = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: maps new memory, at an address that the kernel chooses.
    let page = unsafe { libc::mmap(ptr::null_mut(), PAGE, access, flags, -1, 0) } as usize;
    request(UFFDIO_API, &mut [UFFD_API, 0, 0]).unwrap();
    request(UFFDIO_REGISTER, &mut [page as u64, PAGE as u64, MISSING, 0]).unwrap();

    let event = EventFd::from_value(1).unwrap();
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap();
    epoll.add(&event, EpollEvent::new(EpollFlags::EPOLLIN, 0)).unwrap();
    let thread = thread::spawn(move || {
        let events = page as *mut libc::epoll_event;
        // SAFETY: the page has room for an event, and is not unmapped.
        unsafe { libc::epoll_wait(epoll.0.as_raw_fd(), events, 1, -1) };
    });
    // A fault is there to be read once the thread waits.
    let mut poll = libc::pollfd { fd: faults.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one structure, which the kernel fills in.
    unsafe { libc::poll(&raw mut poll, 1, 60_000) };
    assert_eq!(poll.revents, libc::POLLIN, "the thread has not touched the page");
    Some((event.into(), HeldEpoll { faults, page, thread: Some(thread) }))
}

impl Drop for HeldEpoll {
    fn drop(&mut self) {
        let mut zero_page = [self.page as u64, PAGE as u64, 0, 0];
        // SAFETY: the array has the length of `struct uffdio_zeropage`.
        unsafe {
            libc::ioctl(self.faults.as_raw_fd(), UFFDIO_ZEROPAGE, zero_page.as_mut_ptr());
        }
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}
