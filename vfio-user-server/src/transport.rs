//! Messages on a UNIX stream socket, with the descriptors that belong to them; never blocking.
//!
//! A [`Receiver`] takes in whatever is there with one call and cuts it into messages; a [`Sender`] sends one reply, header
//! and payload and descriptors, with one call, and keeps what did not fit. Both use their buffers again and again.

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::errno::Errno as SysErrno;
use nix::sys::socket::{ControlMessage, MsgFlags, send, sendmsg};
use zerocopy::FromBytes;

use crate::fds::{Fds, MAX_FDS};
use crate::proto::header::Header;
use crate::sys;

/// The buffers' usual size. They grow for a longer message and shrink again after it.
const USUAL: usize = 64 << 10;

/// A message as it came.
#[derive(Debug)]
pub struct Message<'a> {
    /// Its header, whose size is that of header and payload.
    pub header: Header,
    /// What follows the header.
    pub payload: &'a [u8],
    /// The descriptors that came with it.
    pub fds: Fds,
    /// More descriptors came than a message can have; the surplus was closed.
    pub surplus_fds: bool,
}

/// A header with an impossible size: nothing that comes after it can be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadFraming(pub Header);

/// What [`Receiver::fill`] found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// Bytes, and maybe more of them are waiting.
    Some,
    /// Bytes, and then there were no more.
    All,
    /// Nothing for now.
    Nothing,
    /// The peer has closed.
    End,
}

/// Cuts the incoming stream into messages.
#[derive(Debug)]
pub struct Receiver {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    fds: Fds,
    surplus_fds: bool,
}

impl Default for Receiver {
    fn default() -> Self {
        Self { buffer: vec![0; USUAL], start: 0, end: 0, fds: Fds::new(), surplus_fds: false }
    }
}

impl Receiver {
    /// Whether a message has begun and not ended.
    pub const fn is_within_message(&self) -> bool {
        self.start < self.end
    }

    fn header(&self) -> Option<Header> {
        Header::read_from_prefix(&self.buffer[self.start..self.end]).ok().map(|(header, _)| header)
    }

    /// Whether [`Self::next_message`] would return something.
    pub fn has_message(&self) -> bool {
        self.header().is_some_and(|header| {
            !header.size_is_possible() || header.size as usize <= self.end - self.start
        })
    }

    /// The next complete message.
    ///
    /// The kernel stops receiving at bytes that came with descriptors, so descriptors belong to the message with the
    /// last byte in the buffer.
    pub fn next_message(&mut self) -> Result<Option<Message<'_>>, BadFraming> {
        let Some(header) = self.header() else { return Ok(None) };
        if !header.size_is_possible() {
            return Err(BadFraming(header));
        }
        let end = self.start + header.size as usize;
        if end > self.end {
            return Ok(None);
        }
        let (fds, surplus_fds) = if end == self.end {
            (self.fds.take(), std::mem::take(&mut self.surplus_fds))
        } else {
            (Fds::new(), false)
        };
        let payload = &self.buffer[self.start + Header::SIZE..end];
        self.start = end;
        Ok(Some(Message { header, payload, fds, surplus_fds }))
    }

    /// Takes in what the socket has, without waiting or, on a blocking socket, until there is something. To be called
    /// only once there is no complete message left.
    pub fn fill(&mut self, socket: BorrowedFd<'_>, wait: bool) -> io::Result<Filled> {
        self.make_room();
        let room = &mut self.buffer[self.end..];
        let wanted = room.len();
        match sys::receive(socket, room, &mut self.fds, wait) {
            Ok(received) => {
                self.end += received.bytes;
                self.surplus_fds |= received.surplus_fds;
                Ok(match received.bytes {
                    0 => Filled::End,
                    // A message that carries descriptors ends a call early.
                    n if n == wanted || !self.fds.is_empty() => Filled::Some,
                    _ => Filled::All,
                })
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Filled::Nothing),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(Filled::End),
            Err(error) => Err(error),
        }
    }

    /// Makes room for the rest of the message that has begun, or else for a usual lot.
    fn make_room(&mut self) {
        let needed = self.header().map_or(Header::SIZE, |header| header.size as usize);
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let size = needed.max(USUAL);
        if self.buffer.len() < size {
            self.buffer.resize(size, 0);
        } else if self.buffer.len() > size && self.end <= size {
            self.buffer.truncate(size);
            self.buffer.shrink_to_fit();
        }
    }
}

/// Descriptors that go along with a reply, borrowed from their owners.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplyFds<'a> {
    fds: [Option<BorrowedFd<'a>>; MAX_FDS],
    len: usize,
}

impl<'a> ReplyFds<'a> {
    /// Adds one; false where there is no room.
    pub fn push(&mut self, fd: BorrowedFd<'a>) -> bool {
        let Some(slot) = self.fds.get_mut(self.len) else { return false };
        *slot = Some(fd);
        self.len += 1;
        true
    }
}

impl<'a> From<Option<BorrowedFd<'a>>> for ReplyFds<'a> {
    fn from(fd: Option<BorrowedFd<'a>>) -> Self {
        let mut fds = Self::default();
        if let Some(fd) = fd {
            fds.push(fd);
        }
        fds
    }
}

/// Sends replies, and keeps the one that the socket had no room for.
#[derive(Debug, Default)]
pub struct Sender {
    buffer: Vec<u8>,
    sent: usize,
    waiting: bool,
    waiting_fds: Vec<OwnedFd>,
}

impl Sender {
    /// The buffer to write the next reply into. Nothing may be [waiting](Self::is_waiting).
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Whether a reply waits for room.
    pub const fn is_waiting(&self) -> bool {
        self.waiting
    }

    /// Sends what is in the buffer; true once all of it is sent.
    pub fn send(&mut self, socket: BorrowedFd<'_>, fds: &ReplyFds<'_>) -> io::Result<bool> {
        self.sent = 0;
        self.waiting = true;
        let mut raw: [RawFd; MAX_FDS] = [-1; MAX_FDS];
        for (raw, fd) in raw.iter_mut().zip(fds.fds.iter().flatten()) {
            *raw = fd.as_raw_fd();
        }
        let done = self.push(socket, &raw[..fds.len])?;
        if !done && self.sent == 0 {
            for fd in fds.fds.iter().flatten() {
                self.waiting_fds.push(fd.try_clone_to_owned()?);
            }
        }
        Ok(done)
    }

    /// Sends what waits; true once nothing does.
    pub fn flush(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        if !self.waiting {
            return Ok(true);
        }
        let raw: Vec<RawFd> = self.waiting_fds.iter().map(AsRawFd::as_raw_fd).collect();
        let done = self.push(socket, &raw)?;
        if self.sent > 0 {
            self.waiting_fds.clear();
        }
        Ok(done)
    }

    fn push(&mut self, socket: BorrowedFd<'_>, mut fds: &[RawFd]) -> io::Result<bool> {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        while self.sent < self.buffer.len() {
            let rest = &self.buffer[self.sent..];
            // The common case has less for the kernel to copy and to check.
            let sent = if fds.is_empty() {
                send(socket.as_raw_fd(), rest, flags)
            } else {
                let rights = [ControlMessage::ScmRights(fds)];
                sendmsg::<()>(socket.as_raw_fd(), &[IoSlice::new(rest)], &rights, flags, None)
            };
            match sent {
                Ok(bytes) => {
                    self.sent += bytes;
                    fds = &[];
                }
                Err(SysErrno::EINTR) => {}
                Err(SysErrno::EAGAIN) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        self.waiting = false;
        if self.buffer.capacity() > USUAL {
            self.buffer = Vec::new();
        }
        Ok(true)
    }
}
