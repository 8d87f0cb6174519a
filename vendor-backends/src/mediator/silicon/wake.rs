//! What wakes the silicon for one vGPU: its worker through a socket, and its guest through an eventfd.
//!
//! The eventfd is a hypervisor's to signal when the guest writes to a register, with no worker on the way. So it is in
//! hands that may empty it, fill it, or make it block, and it is never read here: an epoll instance that nobody else has
//! reports each of its signals once.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::seqpacket::SeqPacket;

/// Wake-ups that are taken from the socket at once.
const MAX_WAKES: usize = 64;
const SOCKET: u64 = 0;
const EVENT: u64 = 1;

/// The silicon's side.
#[derive(Debug)]
pub struct Wake {
    socket: SeqPacket,
    epoll: Epoll,
}

/// The other side.
#[derive(Debug)]
pub struct WakeEnds {
    /// Any packet is a wake-up; closing it says that no more will come.
    pub socket: OwnedFd,
    /// Each signal is a wake-up.
    pub event: OwnedFd,
}

/// What has happened since the last look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Woken {
    /// There was a wake-up.
    pub woken: bool,
    /// The worker is gone.
    pub deaf: bool,
}

impl Wake {
    /// Both sides.
    pub fn new() -> io::Result<(Self, WakeEnds)> {
        let (socket, ours) = SeqPacket::pair()?;
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(&socket, EpollEvent::new(EpollFlags::EPOLLIN, SOCKET))?;
        epoll.add(&event, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, EVENT))?;
        Ok((Self { socket, epoll }, WakeEnds { socket: ours.into(), event: event.into() }))
    }

    /// Takes what has come. Never waits.
    pub fn take(&self) -> Woken {
        let mut taken = Woken { woken: false, deaf: false };
        let mut events = [EpollEvent::empty(); 2];
        let count = self.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap_or(0);
        for event in &events[..count] {
            if event.data() == EVENT {
                taken.woken = true;
                continue;
            }
            for _ in 0..MAX_WAKES {
                match self.socket.try_recv(&mut [0; 8]) {
                    Ok(Some(_)) => taken.woken = true,
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Ok(None) | Err(_) => {
                        taken.deaf = true;
                        break;
                    }
                }
            }
        }
        taken
    }
}

/// Readable while there is something to take.
impl AsFd for Wake {
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

    const NOTHING: Woken = Woken { woken: false, deaf: false };
    const WOKEN: Woken = Woken { woken: true, deaf: false };

    fn readable(wake: &Wake) -> bool {
        let mut fds = [PollFd::new(wake.as_fd(), PollFlags::POLLIN)];
        poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
    }

    #[test]
    fn each_signal_wakes_once_whatever_its_owner_does_to_the_eventfd() {
        let (wake, ends) = Wake::new().unwrap();
        let mut event = File::from(ends.event);
        assert!(!readable(&wake));
        for _ in 0..3 {
            event.write_all(&1_u64.to_ne_bytes()).unwrap();
            assert!(readable(&wake));
            assert_eq!(wake.take(), WOKEN);
            assert!(!readable(&wake), "though nobody has read it");
        }
        // Emptied before it was looked at, filled to the brim, and blocking.
        event.write_all(&1_u64.to_ne_bytes()).unwrap();
        event.read_exact(&mut [0; 8]).unwrap();
        wake.take();
        event.write_all(&(u64::MAX - 1).to_ne_bytes()).unwrap();
        assert_eq!(wake.take(), WOKEN);
        fcntl(&event, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        assert_eq!(wake.take(), NOTHING);
    }

    #[test]
    fn the_worker_wakes_until_it_is_gone() {
        let (wake, ends) = Wake::new().unwrap();
        let worker = SeqPacket::from(ends.socket);
        assert_eq!(wake.take(), NOTHING);
        worker.try_send(&[1], &[]).unwrap();
        assert_eq!(wake.take(), WOKEN);
        drop(worker);
        assert_eq!(wake.take(), Woken { woken: false, deaf: true });
    }
}
