//! Session with one client on one connection.
//!
//! Readiness drives a session: the event loop watches the socket as [`Interest`] says and calls
//! [`Session::on_ready`], which never blocks. All calls of a device's methods come from there.
//!
//! * `dispatch`: executes requests
//! * `adoption`: progress in a journal, and sessions that are adopted
//! * `feature`: device features, migration and DMA logging
//! * `transfers`: requests of the device to the client

mod adoption;
mod dispatch;
mod feature;
mod transfers;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use foreign_fds::ForeignSocket;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::busy_poll::BusyPoll;
use crate::device::Device;
use crate::errno::Errno;
use crate::journal::ReplyPhase;
use crate::proto::header::{Header, Kind, MAX_MESSAGE};
use crate::proto::message::Request;
use crate::proto::reply::Reply;
use crate::transport::{BadFraming, Filled, Receiver, ReplyFds, Sender};
use adoption::{InSocket, Progress};
use dispatch::SessionState;

/// Limit of messages per wake-up, for the other sources of the event loop.
const MESSAGES_PER_WAKE: usize = 64;
/// Limit of receive calls per wake-up. A client can send a message byte by byte.
const FILLS_PER_WAKE: usize = 16;

/// Events of the session's socket that an event loop must watch for, level-triggered unless it says
/// otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// Watch for input. False while a reply waits for room in the socket: a client that does not
    /// read its replies cannot send further requests.
    pub readable: bool,
    /// Watch for room to write. Also set to be called again at once, if more messages are waiting
    /// than one call may handle.
    pub writable: bool,
    /// Watch edge-triggered (epoll(7)): finished messages are still in the socket. Only devices
    /// with a [`Journal`](crate::journal::Journal) have such sessions.
    pub edge: bool,
}

/// Reason for the end of a session.
#[derive(Debug, thiserror::Error)]
pub enum Closed {
    /// The client closed the connection between two messages.
    #[error("The client closed the connection")]
    ByPeer,
    /// The client closed the connection within a message.
    #[error("The client closed the connection within a message")]
    Truncated,
    /// A header has an impossible size, so the following bytes cannot be decoded.
    #[error("The client sent a message of {size} bytes; 16 to {max} are allowed")]
    Framing {
        /// Size in the header.
        size: u32,
        /// Largest allowed size.
        max: usize,
    },
    /// The client has sent descriptors that cannot be closed, such as files of a file system that
    /// does not answer.
    #[error("The client sent descriptors that cannot be closed")]
    Descriptors,
    /// The socket failed.
    #[error("The socket failed: {0}")]
    Io(#[source] io::Error),
}

impl From<io::Error> for Closed {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Self::ByPeer,
            _ => Self::Io(error),
        }
    }
}

impl Interest {
    /// Events of a new session.
    pub const READ: Self = Self { readable: true, writable: false, edge: false };
    const WRITE: Self = Self { readable: false, writable: true, edge: false };
    const AGAIN: Self = Self { readable: true, writable: true, edge: false };

    fn poll_flags(self) -> PollFlags {
        let mut flags = PollFlags::empty();
        flags.set(PollFlags::POLLIN, self.readable);
        flags.set(PollFlags::POLLOUT, self.writable);
        flags
    }
}

impl From<BadFraming> for Closed {
    fn from(BadFraming(header): BadFraming) -> Self {
        Self::Framing { size: header.size, max: MAX_MESSAGE }
    }
}

/// Connection of one client.
#[derive(Debug)]
pub struct Session {
    socket: ForeignSocket,
    receiver: Receiver,
    sender: Sender,
    state: SessionState,
    /// Second socket, for the device's requests to the client.
    twin: Option<Twin>,
    messages: u64,
    progress: Progress,
    detached: bool,
}

/// Second socket of a session, for the device's requests (capability `twin_socket`).
#[derive(Debug)]
struct Twin {
    socket: ForeignSocket,
    receiver: Receiver,
    sender: Sender,
}

impl Session {
    /// Returns a session on a connected stream socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let socket = ForeignSocket::from(socket);
        // Each receive call chooses by its flags whether it blocks.
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?);
        if flags.contains(OFlag::O_NONBLOCK) {
            fcntl(&socket, FcntlArg::F_SETFL(flags & !OFlag::O_NONBLOCK))?;
        }
        Ok(Self {
            socket,
            receiver: Receiver::default(),
            sender: Sender::default(),
            state: SessionState::default(),
            twin: None,
            messages: 0,
            progress: Progress::default(),
            detached: false,
        })
    }

    /// Returns the number of messages handled so far.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Sends pending output, then handles a bounded number of waiting messages.
    ///
    /// Event loops call this method whenever the socket is readable, writable or hung up.
    ///
    /// # Errors
    ///
    /// Fails once the session has ended. The device has then been [detached](Device::detach), and
    /// the caller drops the session.
    pub fn on_ready<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<Interest, Closed> {
        let result = self.process(device, false);
        if result.is_err() {
            self.detach(device);
        }
        result
    }

    /// Ends the session and detaches the device.
    pub fn close<D: Device + ?Sized>(mut self, device: &mut D) {
        self.detach(device);
    }

    /// Serves the client until it disconnects, for devices that wait for no other events.
    ///
    /// The loop blocks in the receive call, or polls when the default [`BusyPoll`] says so.
    pub fn serve<D: Device + ?Sized>(self, device: &mut D) -> Closed {
        self.serve_with(device, BusyPoll::default())
    }

    /// Serves the client until it disconnects, with the given polling policy.
    pub fn serve_with<D: Device + ?Sized>(
        mut self,
        device: &mut D,
        mut busy_poll: BusyPoll,
    ) -> Closed {
        loop {
            if let Err(closed) = self.serve_next(device, &mut busy_poll) {
                self.detach(device);
                return closed;
            }
        }
    }

    /// Waits for messages, blocking or polling, and handles them.
    fn serve_next<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        busy_poll: &mut BusyPoll,
    ) -> Result<(), Closed> {
        let before = self.messages;
        let wait = !busy_poll.is_enabled() || !busy_poll.should_poll(Instant::now());
        let interest = self.process(device, wait && self.twin.is_none())?;
        if wait && self.twin.is_some() {
            // They would end the wait.
            self.remove_finished(device)?;
        }
        if self.messages > before {
            if busy_poll.is_enabled() {
                busy_poll.record_answer(Instant::now());
            }
        } else if !wait {
            BusyPoll::yield_cpu();
        }
        if interest == Interest::WRITE || (wait && self.twin.is_some()) {
            let socket = PollFd::new(self.socket.as_fd(), interest.poll_flags());
            let waited = match self.twin() {
                Some((fd, twin)) => {
                    poll(&mut [socket, PollFd::new(fd, twin.poll_flags())], PollTimeout::NONE)
                }
                None => poll(&mut [socket], PollTimeout::NONE),
            };
            match waited {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => return Err(Closed::Io(error.into())),
            }
        }
        Ok(())
    }

    /// Returns the twin socket and the events to watch it for.
    ///
    /// The socket exists once the client has negotiated it, for devices with
    /// [`Transfers`](crate::transfer::Transfers).
    pub fn twin(&self) -> Option<(BorrowedFd<'_>, Interest)> {
        let twin = self.twin.as_ref()?;
        let writable = twin.sender.is_waiting();
        Some((twin.socket.as_fd(), Interest { writable, ..Interest::READ }))
    }

    /// Handles the client's messages, then sends the device's requests.
    fn process<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        wait: bool,
    ) -> Result<Interest, Closed> {
        let interest = self.process_messages(device, wait)?;
        if device.transfers().is_none() || !self.state.is_negotiated() {
            return Ok(interest);
        }
        self.process_twin(device)?;
        let limit = self.state.max_transfer();
        let (socket, sender) = match &mut self.twin {
            Some(twin) => (twin.socket.as_fd(), &mut twin.sender),
            None => (self.socket.as_fd(), &mut self.sender),
        };
        let SessionState { dma, transfers, .. } = &mut self.state;
        let result = transfers.send_requests(device, dma, limit, socket, sender);
        if self.twin.is_some() {
            if result.is_err() {
                self.close_twin(device);
            }
            return Ok(interest);
        }
        result?;
        Ok(if self.sender.is_waiting() { Interest::WRITE } else { interest })
    }

    /// Handles the replies on the twin socket.
    fn process_twin<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<(), Closed> {
        let Some(twin) = &mut self.twin else { return Ok(()) };
        let mut open = twin.sender.flush(twin.socket.as_fd()).is_ok();
        for _ in 0..FILLS_PER_WAKE {
            while let Some(message) = twin.receiver.next_message().map_err(Closed::from)? {
                if message.header.kind() == Some(Kind::Reply) {
                    self.state.transfers.on_reply(&message.header, message.payload, device);
                }
            }
            match twin.receiver.fill(twin.socket.as_fd(), false) {
                Ok(Filled::Partial | Filled::Drained) => {}
                Ok(Filled::Empty) => break,
                Ok(Filled::Closed) | Err(_) => {
                    open = false;
                    break;
                }
            }
        }
        if !open {
            self.close_twin(device);
        }
        Ok(())
    }

    /// Closes the twin socket and fails the transfers under way on it.
    fn close_twin<D: Device + ?Sized>(&mut self, device: &mut D) {
        if let Some(twin) = self.twin.take() {
            twin.socket.end();
        }
        self.state.transfers.close(device);
    }

    fn detach<D: Device + ?Sized>(&mut self, device: &mut D) {
        if !std::mem::replace(&mut self.detached, true) {
            self.state.features.stop_logging(device);
            device.detach();
            self.socket.end();
        }
    }

    /// Handles the waiting messages. With `wait`, blocks for the first bytes if no message is
    /// waiting.
    fn process_messages<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        wait: bool,
    ) -> Result<Interest, Closed> {
        if !self.sender.flush(self.socket.as_fd())? {
            return Ok(Interest::WRITE);
        }
        self.finish_sent(device)?;
        let read = Interest { edge: device.journal().is_some(), ..Interest::READ };
        let mut messages = MESSAGES_PER_WAKE;
        let mut drained = false;
        for _ in 0..FILLS_PER_WAKE {
            while self.receiver.has_message() {
                if messages == 0 {
                    return Ok(Interest::AGAIN);
                }
                messages -= 1;
                if !self.next_message(device)? {
                    return Ok(Interest::WRITE);
                }
            }
            if drained {
                return Ok(read);
            }
            let wait = wait && messages == MESSAGES_PER_WAKE;
            match self.receive(device, wait)? {
                Filled::Partial => {}
                Filled::Drained => drained = true,
                Filled::Empty => return Ok(read),
                Filled::Closed if self.receiver.is_within_message() => {
                    return Err(Closed::Truncated);
                }
                Filled::Closed => return Err(Closed::ByPeer),
            }
        }
        // More bytes may be waiting, which an edge has announced already.
        Ok(if self.receiver.has_message() || read.edge { Interest::AGAIN } else { read })
    }

    /// Handles one message. Returns false if the reply waits for room in the socket.
    fn next_message<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<bool, Closed> {
        let socket = self.socket.as_fd();
        let message = match self.receiver.next_message() {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(true),
            Err(BadFraming(header)) => {
                // The error reply tells the client why the connection closes.
                let too_long = header.size as usize > MAX_MESSAGE;
                let errno = if too_long { Errno::EMSGSIZE } else { Errno::EINVAL };
                Reply::begin(self.sender.buffer()).finish(&header, Err(errno));
                let _ = self.sender.send(socket, &ReplyFds::default());
                return Err(BadFraming(header).into());
            }
        };
        self.messages += 1;
        let header = message.header;
        let bytes = if message.held { header.size as usize } else { 0 };
        let has_fds = !message.fds.is_empty() || message.surplus_fds;
        let in_socket = InSocket { bytes, has_fds };
        let first = self.progress.first.take();
        if first.is_some_and(|first| first.reply == ReplyPhase::Sent) {
            return self.finish(device, in_socket, true);
        }
        let executed = first.and_then(|first| first.executed);
        let is_journaled = device.journal().is_some();
        let mut reply = Reply::begin(self.sender.buffer());
        let mut is_repeatable = false;
        let result = match header.kind() {
            Some(Kind::Request) if message.surplus_fds => Err(Errno::EINVAL),
            Some(Kind::Request) => {
                let decoded = Request::decode(header.command, message.payload);
                // The limits of VERSION are in the record.
                is_repeatable = decoded
                    .is_ok_and(|request| request.is_repeatable() && self.state.is_negotiated());
                decoded.and_then(|request| {
                    let (payload, fds) = (message.payload, message.fds);
                    self.state.execute(request, executed, payload, fds, device, &mut reply)
                })
            }
            Some(Kind::Reply) => {
                self.state.transfers.on_reply(&header, message.payload, device);
                return self.finish(device, in_socket, true);
            }
            None => Err(Errno::EINVAL),
        };
        if has_fds && foreign_fds::is_exhausted() {
            return Err(Closed::Descriptors);
        }
        if let Err(errno) = result {
            log::debug!("Request {header:?} failed: {errno}");
        }
        // A duplicate of a reply without data does no harm.
        if first.is_some_and(|first| first.reply == ReplyPhase::Sending) {
            reply.payload().truncate(Header::SIZE);
        }
        let new_twin = self.state.new_twin.take();
        let mut fds = *result.as_ref().unwrap_or(&ReplyFds::default());
        let outcome = result.map(|_| ());
        reply.finish(&header, outcome);
        if let Some((server_end, client_end)) = new_twin {
            fds.push(client_end.as_fd());
            let (receiver, sender) = (Receiver::default(), Sender::default());
            self.twin =
                Some(Twin { socket: ForeignSocket::refusing(server_end), receiver, sender });
            return Ok(self.sender.send(socket, &fds)?);
        }
        if !is_journaled {
            return Ok(header.wants_no_reply() || self.sender.send(socket, &fds)?);
        }
        let fds = fds.try_clone()?;
        self.commit(device, outcome, bytes > 0, is_repeatable);
        if header.wants_no_reply() {
            return self.finish(device, in_socket, true);
        }
        if let Some(journal) = device.journal() {
            journal.begin_reply();
        }
        let sent = self.sender.send(self.socket.as_fd(), &(&fds).into())?;
        self.finish(device, in_socket, sent)
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
