//! Messages and their file descriptors on a Unix stream socket.
//!
//! A [`Receiver`] receives all waiting bytes with one system call and splits them into messages. A
//! [`Sender`] sends one message, with its descriptors, with one system call and keeps the rest if
//! the socket is full. Both reuse their buffers.

use std::io::{self, ErrorKind, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::errno::Errno as SysErrno;
use nix::sys::socket::{ControlMessage, MsgFlags, send, sendmsg};
use zerocopy::FromBytes;

use crate::fds::{Fds, MAX_FDS};
use crate::proto::header::Header;
use crate::sys::{self, Mode};

/// Default buffer size. Buffers grow for a longer message and shrink after it.
const BUFFER_BYTES: usize = 64 << 10;

/// A received message.
#[derive(Debug)]
pub struct Message<'a> {
    /// Header, whose size covers header and payload.
    pub header: Header,
    /// Bytes after the header.
    pub payload: &'a [u8],
    /// Descriptors received with the message.
    pub fds: Fds,
    /// True if more descriptors arrived than a message may have. The surplus was closed.
    pub surplus_fds: bool,
    /// True if the message is still in the socket.
    pub held: bool,
}

/// A header with an impossible size. The bytes after it cannot be split into messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadFraming(pub Header);

/// Result of [`Receiver::fill`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// Bytes were received, and more may be waiting.
    Partial,
    /// All waiting bytes were received.
    Drained,
    /// No bytes were waiting.
    Empty,
    /// The peer has closed the connection.
    Closed,
}

/// Splitter of the incoming stream into messages.
#[derive(Debug)]
pub struct Receiver {
    buffer: Vec<u8>,
    start: usize,
    end: usize,
    fds: Fds,
    surplus_fds: bool,
    /// Whether the bytes in the buffer are still in the socket.
    held: bool,
    /// Whether the next peek begins after the bytes in the buffer.
    follows_peek: bool,
}

impl Default for Receiver {
    fn default() -> Self {
        Self {
            buffer: vec![0; BUFFER_BYTES],
            start: 0,
            end: 0,
            fds: Fds::new(),
            surplus_fds: false,
            held: false,
            follows_peek: false,
        }
    }
}

impl Receiver {
    /// Returns true if a message was received in part.
    pub const fn is_within_message(&self) -> bool {
        self.start < self.end
    }

    /// Returns the header of the next message, once it was received.
    fn header(&self) -> Option<Header> {
        Header::read_from_prefix(&self.buffer[self.start..self.end]).ok().map(|(header, _)| header)
    }

    /// Returns true if [`Self::next_message`] would return a message or an error.
    pub fn has_message(&self) -> bool {
        self.header().is_some_and(|header| {
            !header.has_valid_size() || header.size as usize <= self.end - self.start
        })
    }

    /// Returns the next complete message.
    ///
    /// The kernel ends a receive call after bytes with descriptors, so descriptors belong to the
    /// message with the last byte in the buffer.
    ///
    /// # Errors
    ///
    /// Fails if the header has an impossible size.
    pub fn next_message(&mut self) -> Result<Option<Message<'_>>, BadFraming> {
        let Some(header) = self.header() else { return Ok(None) };
        if !header.has_valid_size() {
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
        Ok(Some(Message { header, payload, fds, surplus_fds, held: self.held }))
    }

    /// Returns true if bytes were received that are no longer in the socket.
    pub const fn has_taken(&self) -> bool {
        !self.held && self.start < self.end
    }

    /// Receives the socket's waiting messages and leaves them in the socket. Returns `None` if the
    /// first is not there as a whole, or longer than the buffer. `finished` is the number of bytes
    /// in the socket before the first message. With `wait`, blocks until bytes arrive. Callers take
    /// all complete messages first.
    pub fn peek(
        &mut self,
        socket: BorrowedFd<'_>,
        finished: usize,
        wait: bool,
    ) -> io::Result<Option<Filled>> {
        if !self.follows_peek || self.start < self.end {
            sys::set_peek_offset(socket, Some(finished))?;
            self.follows_peek = true;
        }
        (self.start, self.end, self.held) = (0, 0, true);
        (self.fds, self.surplus_fds) = (Fds::new(), false);
        self.make_room();
        let filled = self.receive(socket, if wait { Mode::PeekWait } else { Mode::Peek })?;
        if matches!(filled, Filled::Empty | Filled::Closed) || self.has_message() {
            return Ok(Some(filled));
        }
        (self.end, self.fds, self.surplus_fds) = (0, Fds::new(), false);
        self.follows_peek = false;
        Ok(None)
    }

    /// Receives the socket's waiting bytes. With `wait`, blocks on a blocking socket until bytes
    /// arrive. Callers take all complete messages first.
    pub fn fill(&mut self, socket: BorrowedFd<'_>, wait: bool) -> io::Result<Filled> {
        (self.held, self.follows_peek) = (false, false);
        self.make_room();
        self.receive(socket, if wait { Mode::Wait } else { Mode::Poll })
    }

    fn receive(&mut self, socket: BorrowedFd<'_>, mode: Mode) -> io::Result<Filled> {
        let room = &mut self.buffer[self.end..];
        let capacity = room.len();
        match sys::receive(socket, room, &mut self.fds, mode) {
            Ok(received) => {
                self.end += received.bytes;
                self.surplus_fds |= received.surplus_fds;
                Ok(match received.bytes {
                    0 => Filled::Closed,
                    // Descriptors end a receive call early.
                    n if n == capacity || !self.fds.is_empty() => Filled::Partial,
                    _ => Filled::Drained,
                })
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(Filled::Empty),
            Err(error) if error.kind() == ErrorKind::ConnectionReset => Ok(Filled::Closed),
            Err(error) => Err(error),
        }
    }

    /// Makes room for the rest of a partial message, and for the default size at least.
    fn make_room(&mut self) {
        let needed = self.header().map_or(Header::SIZE, |header| header.size as usize);
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let size = needed.max(BUFFER_BYTES);
        if self.buffer.len() < size {
            self.buffer.resize(size, 0);
        } else if self.buffer.len() > size && self.end <= size {
            self.buffer.truncate(size);
            self.buffer.shrink_to_fit();
        }
    }
}

/// Descriptors of a message to send, borrowed from their owners.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReplyFds<'a> {
    fds: [Option<BorrowedFd<'a>>; MAX_FDS],
    len: usize,
}

impl<'a> ReplyFds<'a> {
    /// Adds a descriptor. Returns false if there is no room.
    pub fn push(&mut self, fd: BorrowedFd<'a>) -> bool {
        let Some(slot) = self.fds.get_mut(self.len) else { return false };
        *slot = Some(fd);
        self.len += 1;
        true
    }
}

impl ReplyFds<'_> {
    /// Returns duplicates.
    pub fn try_clone(&self) -> io::Result<Vec<OwnedFd>> {
        self.fds.iter().flatten().map(BorrowedFd::try_clone_to_owned).collect()
    }
}

impl<'a> From<&'a Vec<OwnedFd>> for ReplyFds<'a> {
    fn from(owned: &'a Vec<OwnedFd>) -> Self {
        let mut fds = Self::default();
        for fd in owned {
            fds.push(fd.as_fd());
        }
        fds
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

/// Sender of messages. A message that the socket has no room for stays pending.
#[derive(Debug, Default)]
pub struct Sender {
    buffer: Vec<u8>,
    sent: usize,
    waiting: bool,
    waiting_fds: Vec<OwnedFd>,
}

impl Sender {
    /// Returns the buffer for the next message. No message may be [pending](Self::is_waiting).
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Returns true if a message waits for room in the socket.
    pub const fn is_waiting(&self) -> bool {
        self.waiting
    }

    /// Sends the message in the buffer. Returns true once all of it is sent.
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

    /// Sends the pending message. Returns true once none is pending.
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

    /// Sends the rest of the buffer. Returns false if the socket is full.
    fn push(&mut self, socket: BorrowedFd<'_>, mut fds: &[RawFd]) -> io::Result<bool> {
        let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
        while self.sent < self.buffer.len() {
            let rest = &self.buffer[self.sent..];
            // Most messages have no descriptors, and send() is cheaper than sendmsg().
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
        if self.buffer.capacity() > BUFFER_BYTES {
            self.buffer = Vec::new();
        }
        Ok(true)
    }
}
