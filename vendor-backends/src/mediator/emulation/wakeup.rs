//! Wake-ups of the engine for one vGPU: from the worker through a socket, from the guest through an
//! eventfd.
//!
//! The hypervisor signals the eventfd when the guest writes a register, without the worker. The
//! hypervisor may also empty or fill the eventfd or make it block. The engine therefore never reads
//! it: an edge-triggered epoll instance, which no other process has, reports each signal once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use ipc::seqpacket::SeqPacket;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

/// Maximum number of packets read from the socket at once.
const MAX_PACKETS: usize = 64;
const SOCKET: u64 = 0;
const EVENT: u64 = 1;

/// Receiver of wake-ups, in the engine.
#[derive(Debug)]
pub struct WakeupReceiver {
    socket: SeqPacket,
    epoll: Epoll,
    /// The watched eventfd.
    event: Mutex<EventFd>,
}

/// Senders of wake-ups, for the worker and the guest.
#[derive(Debug)]
pub struct WakeupSenders {
    /// Any packet is a wake-up. Closing the socket ends the wake-ups.
    pub socket: OwnedFd,
    /// Each signal is a wake-up.
    pub event: OwnedFd,
}

/// Wake-ups since the last [`WakeupReceiver::take`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Wakeups {
    /// Whether there was a wake-up.
    pub woken: bool,
    /// Whether the worker has closed its socket.
    pub closed: bool,
}

impl WakeupReceiver {
    /// Creates a receiver and its senders.
    pub fn new() -> io::Result<(Self, WakeupSenders)> {
        // A descriptor is no wake-up, and the engine does not wait for its close.
        let (socket, ours) = SeqPacket::pair_without_fds()?;
        let event = new_event()?;
        let sender = event.as_fd().try_clone_to_owned()?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, SOCKET))?;
        watch(&epoll, &event)?;
        let receiver = Self { socket, epoll, event: Mutex::new(event) };
        Ok((receiver, WakeupSenders { socket: ours.into(), event: sender }))
    }

    /// Replaces the eventfd. Signals of the former one no longer count.
    pub fn renew_event(&self) -> io::Result<OwnedFd> {
        let event = new_event()?;
        let sender = event.as_fd().try_clone_to_owned()?;
        watch(&self.epoll, &event)?;
        let mut watched = self.event.lock().unwrap_or_else(PoisonError::into_inner);
        let former = std::mem::replace(&mut *watched, event);
        self.epoll.delete(&former)?;
        Ok(sender)
    }

    /// Takes all pending wake-ups. Never blocks.
    pub fn take(&self) -> Wakeups {
        let mut taken = Wakeups { woken: false, closed: false };
        let mut events = [EpollEvent::empty(); 2];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            if event.data() == EVENT {
                taken.woken = true;
                continue;
            }
            for _ in 0..MAX_PACKETS {
                match self.socket.try_recv(&mut [0; 8]) {
                    Ok(Some(_)) => taken.woken = true,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Ok(None) | Err(_) => {
                        taken.closed = true;
                        break;
                    }
                }
            }
        }
        taken
    }
}

fn new_event() -> io::Result<EventFd> {
    Ok(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?)
}

fn watch(epoll: &Epoll, event: &EventFd) -> io::Result<()> {
    Ok(epoll.add(event, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, EVENT))?)
}

/// Readable while a wake-up is pending.
impl AsFd for WakeupReceiver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};

    use nix::fcntl::{FcntlArg, OFlag, fcntl};
    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

    use super::*;

    const NOTHING: Wakeups = Wakeups { woken: false, closed: false };
    const WOKEN: Wakeups = Wakeups { woken: true, closed: false };

    fn readable(wake: &WakeupReceiver) -> bool {
        let mut fds = [PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn each_signal_wakes_once_whatever_the_eventfd_contains() {
        let (wake, ends) = WakeupReceiver::new().unwrap();
        let mut event = File::from(ends.event);
        assert!(!readable(&wake));
        for _ in 0..3 {
            event.write_all(&1_u64.to_ne_bytes()).unwrap();
            assert!(readable(&wake));
            assert_eq!(wake.take(), WOKEN);
            assert!(!readable(&wake), "reported once without a read");
        }
        // Emptied before the poll, filled to the maximum, and made blocking.
        event.write_all(&1_u64.to_ne_bytes()).unwrap();
        event.read_exact(&mut [0; 8]).unwrap();
        wake.take();
        event.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert_eq!(wake.take(), WOKEN);
        fcntl(&event, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        assert_eq!(wake.take(), NOTHING);
    }

    #[test]
    fn a_replaced_eventfd_no_longer_wakes() {
        let (wake, ends) = WakeupReceiver::new().unwrap();
        let (mut before, mut after) =
            (File::from(ends.event), File::from(wake.renew_event().unwrap()));
        before.write_all(&1_u64.to_ne_bytes()).unwrap();
        assert!(!readable(&wake));
        after.write_all(&1_u64.to_ne_bytes()).unwrap();
        assert_eq!(wake.take(), WOKEN);
    }

    #[test]
    fn closing_the_socket_is_reported() {
        let (wake, ends) = WakeupReceiver::new().unwrap();
        let worker = SeqPacket::from(ends.socket);
        assert_eq!(wake.take(), NOTHING);
        worker.try_send(&[1], &[]).unwrap();
        assert_eq!(wake.take(), WOKEN);
        drop(worker);
        // A socket may be closed on a thread.
        let mut fds = [PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        assert_eq!(poll(&mut fds, PollTimeout::NONE), Ok(1));
        assert_eq!(wake.take(), Wakeups { woken: false, closed: true });
    }
}
