//! One client on one connection, from its first message to its last.
//!
//! A session is driven by readiness: whoever owns the event loop watches the socket for what [`Interest`] says and
//! calls [`Session::on_ready`]. It never blocks, and a device's methods are called from nowhere else.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::device::Device;

/// What the session's socket has to be watched for, level-triggered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Readable. False while a reply waits for room: nothing more is taken from a client that does not read.
    pub readable: bool,
    /// Writable. Also asked for to be called again at once, where more messages came than one call may handle.
    pub writable: bool,
}

/// Why a session has ended.
#[derive(Debug, thiserror::Error)]
pub enum Closed {
    /// The client closed its end, between two messages.
    #[error("The client closed the connection")]
    ByPeer,
    /// The client closed its end within a message.
    #[error("The client closed the connection in the middle of a message")]
    Truncated,
    /// What came cannot be the beginning of a message, so nothing after it can be understood.
    #[error("The client sent a message of {size} bytes, where 16 to {max} are possible")]
    Framing {
        /// The size in the header.
        size: u32,
        /// The most there can be.
        max: usize,
    },
    /// The socket failed.
    #[error("The socket failed: {0}")]
    Io(#[from] io::Error),
}

/// One client's connection.
#[derive(Debug)]
pub struct Session {
    socket: OwnedFd,
}

impl Session {
    /// Takes over a connected stream socket, and makes it non-blocking.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        nix::fcntl::fcntl(&socket, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
        Ok(Self { socket })
    }

    /// Sends what waits, then handles the messages that are there, a bounded number of them.
    ///
    /// To be called whenever the socket is readable, writable, or hung up. Once it returns an error the device has
    /// been [detached](Device::detach) and the session is to be dropped.
    pub fn on_ready<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<Interest, Closed> {
        let _ = device;
        Ok(Interest { readable: true, writable: false })
    }

    /// Ends the session from this side, and detaches the device.
    pub fn close<D: Device + ?Sized>(self, device: &mut D) {
        device.detach();
    }

    /// Serves the client until it is gone, with a loop of its own: for a device that has nothing else to wait for.
    pub fn serve<D: Device + ?Sized>(mut self, device: &mut D) -> Closed {
        loop {
            match self.on_ready(device) {
                Ok(_) => {}
                Err(closed) => return closed,
            }
        }
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
