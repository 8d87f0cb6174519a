//! One client on one connection, from its first message to its last.
//!
//! A session is driven by readiness: whoever owns the event loop watches the socket for what [`Interest`] says and
//! calls [`Session::on_ready`]. It never blocks, and a device's methods are called from nowhere else.
//!
//! `answer` carries requests out, `feature` those about migration and DMA logging, and `transfers` is the other
//! direction: what the device asks of the client.

mod answer;
mod feature;
mod transfers;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Instant;

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::device::Device;
use crate::errno::Errno;
use crate::patience::Patience;
use crate::proto::header::{Kind, MAX_MESSAGE};
use crate::proto::message::Request;
use crate::proto::reply::Reply;
use crate::transport::{BadFraming, Filled, Receiver, ReplyFds, Sender};
use answer::State;

/// Messages that one wake-up handles at most, so that the rest of the event loop gets its turn.
const MESSAGES_PER_WAKE: usize = 64;
/// Calls to receive that one wake-up makes at most: a message can come in as many pieces as it has bytes.
const FILLS_PER_WAKE: usize = 16;

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
    const READ: Self = Self { readable: true, writable: false };
    const WRITE: Self = Self { readable: false, writable: true };
    const AGAIN: Self = Self { readable: true, writable: true };

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

/// One client's connection.
#[derive(Debug)]
pub struct Session {
    socket: OwnedFd,
    receiver: Receiver,
    sender: Sender,
    state: State,
    /// A socket of its own for what the device asks of the client.
    twin: Option<Twin>,
    messages: u64,
    detached: bool,
}

#[derive(Debug)]
struct Twin {
    socket: OwnedFd,
    receiver: Receiver,
    sender: Sender,
}

impl Session {
    /// Takes over a connected stream socket.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        // Whether a call waits is said with each call.
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?);
        if flags.contains(OFlag::O_NONBLOCK) {
            fcntl(&socket, FcntlArg::F_SETFL(flags & !OFlag::O_NONBLOCK))?;
        }
        Ok(Self {
            socket,
            receiver: Receiver::default(),
            sender: Sender::default(),
            state: State::default(),
            twin: None,
            messages: 0,
            detached: false,
        })
    }

    /// Messages handled so far.
    pub fn messages(&self) -> u64 {
        self.messages
    }

    /// Sends what waits, then handles the messages that are there, a bounded number of them.
    ///
    /// To be called whenever the socket is readable, writable, or hung up. Once it returns an error the device has
    /// been [detached](Device::detach) and the session is to be dropped.
    pub fn on_ready<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<Interest, Closed> {
        let result = self.turn(device, false);
        if result.is_err() {
            self.detach(device);
        }
        result
    }

    /// Ends the session from this side, and detaches the device.
    pub fn close<D: Device + ?Sized>(mut self, device: &mut D) {
        self.detach(device);
    }

    /// Serves the client until it is gone, with a loop of its own: for a device that has nothing else to wait for.
    ///
    /// It waits in the very call that receives, or awake where [`Patience`] says so.
    pub fn serve<D: Device + ?Sized>(self, device: &mut D) -> Closed {
        self.serve_with(device, Patience::default())
    }

    /// The same, with a `patience` of one's own.
    pub fn serve_with<D: Device + ?Sized>(
        mut self,
        device: &mut D,
        mut patience: Patience,
    ) -> Closed {
        loop {
            if let Err(closed) = self.serve_next(device, &mut patience) {
                self.detach(device);
                return closed;
            }
        }
    }

    /// Waits for messages and handles them.
    fn serve_next<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        patience: &mut Patience,
    ) -> Result<(), Closed> {
        let before = self.messages;
        let wait = !patience.is_allowed() || !patience.wants_to_look(Instant::now());
        let interest = self.turn(device, wait && self.twin.is_none())?;
        if self.messages > before {
            if patience.is_allowed() {
                patience.answered(Instant::now());
            }
        } else if !wait {
            Patience::offer_cpu();
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

    /// The twin socket, where the client has asked for one, and what it has to be watched for besides the first. There
    /// is none for a device without [`Transfers`](crate::transfer::Transfers), nor before the client's first message.
    pub fn twin(&self) -> Option<(BorrowedFd<'_>, Interest)> {
        let twin = self.twin.as_ref()?;
        let writable = twin.sender.is_waiting();
        Some((twin.socket.as_fd(), Interest { readable: true, writable }))
    }

    /// Handles what the client sent, then asks it for what the device wants.
    fn turn<D: Device + ?Sized>(&mut self, device: &mut D, wait: bool) -> Result<Interest, Closed> {
        let interest = self.advance(device, wait)?;
        if device.transfers().is_none() || !self.state.is_agreed() {
            return Ok(interest);
        }
        self.advance_twin(device)?;
        let limit = self.state.max_transfer();
        let (socket, sender) = match &mut self.twin {
            Some(twin) => (twin.socket.as_fd(), &mut twin.sender),
            None => (self.socket.as_fd(), &mut self.sender),
        };
        let State { dma, transfers, .. } = &mut self.state;
        let asked = transfers.ask(device, dma, limit, socket, sender);
        if self.twin.is_some() {
            if asked.is_err() {
                self.close_twin(device);
            }
            return Ok(interest);
        }
        asked?;
        Ok(if self.sender.is_waiting() { Interest::WRITE } else { interest })
    }

    /// Takes the answers that came on the twin socket.
    fn advance_twin<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<(), Closed> {
        let Some(twin) = &mut self.twin else { return Ok(()) };
        let mut alive = twin.sender.flush(twin.socket.as_fd()).is_ok();
        for _ in 0..FILLS_PER_WAKE {
            while let Some(message) = twin.receiver.next_message().map_err(Closed::from)? {
                if message.header.kind() == Some(Kind::Reply) {
                    self.state.transfers.answered(&message.header, message.payload, device);
                }
            }
            match twin.receiver.fill(twin.socket.as_fd(), false) {
                Ok(Filled::Some | Filled::All) => {}
                Ok(Filled::Nothing) => break,
                Ok(Filled::End) | Err(_) => {
                    alive = false;
                    break;
                }
            }
        }
        if !alive {
            self.close_twin(device);
        }
        Ok(())
    }

    /// What is asked on a twin that the client has closed is never answered.
    fn close_twin<D: Device + ?Sized>(&mut self, device: &mut D) {
        self.twin = None;
        self.state.transfers.lost(device);
    }

    fn detach<D: Device + ?Sized>(&mut self, device: &mut D) {
        if !std::mem::replace(&mut self.detached, true) {
            self.state.features.end(device);
            device.detach();
        }
    }

    /// Handles what is there. Where it may `wait`, it waits for the first bytes if there is no message yet.
    fn advance<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        wait: bool,
    ) -> Result<Interest, Closed> {
        if !self.sender.flush(self.socket.as_fd())? {
            return Ok(Interest::WRITE);
        }
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
                return Ok(Interest::READ);
            }
            let wait = wait && messages == MESSAGES_PER_WAKE;
            match self.receiver.fill(self.socket.as_fd(), wait)? {
                Filled::Some => {}
                Filled::All => drained = true,
                Filled::Nothing => return Ok(Interest::READ),
                Filled::End if self.receiver.is_within_message() => return Err(Closed::Truncated),
                Filled::End => return Err(Closed::ByPeer),
            }
        }
        Ok(if self.receiver.has_message() { Interest::AGAIN } else { Interest::READ })
    }

    /// Handles one message; false where its reply has to wait.
    fn next_message<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<bool, Closed> {
        let socket = self.socket.as_fd();
        let message = match self.receiver.next_message() {
            Ok(Some(message)) => message,
            Ok(None) => return Ok(true),
            Err(BadFraming(header)) => {
                // It may be a client that reads the answer before it finds the connection closed.
                let long = header.size as usize > MAX_MESSAGE;
                let errno = if long { Errno::EMSGSIZE } else { Errno::EINVAL };
                Reply::begin(self.sender.buffer()).finish(&header, Err(errno));
                let _ = self.sender.send(socket, &ReplyFds::default());
                return Err(BadFraming(header).into());
            }
        };
        self.messages += 1;
        let header = message.header;
        let mut reply = Reply::begin(self.sender.buffer());
        let result = match header.kind() {
            Some(Kind::Request) if message.surplus_fds => Err(Errno::EINVAL),
            Some(Kind::Request) => Request::decode(header.command, message.payload)
                .and_then(|request| self.state.check_order(&request).map(|()| request))
                .and_then(|request| {
                    let payload = message.payload;
                    self.state.answer(request, payload, message.fds, device, &mut reply)
                }),
            Some(Kind::Reply) => {
                self.state.transfers.answered(&header, message.payload, device);
                return Ok(true);
            }
            None => Err(Errno::EINVAL),
        };
        if let Err(errno) = result {
            log::debug!("vfio-user: {header:?} fails: {errno}");
        }
        let new_twin = self.state.new_twin.take();
        if header.wants_no_reply() {
            return Ok(true);
        }
        let mut fds = *result.as_ref().unwrap_or(&ReplyFds::default());
        reply.finish(&header, result.map(|_| ()));
        let Some((ours, theirs)) = new_twin else {
            return Ok(self.sender.send(socket, &fds)?);
        };
        fds.push(theirs.as_fd());
        let (receiver, sender) = (Receiver::default(), Sender::default());
        self.twin = Some(Twin { socket: ours, receiver, sender });
        Ok(self.sender.send(socket, &fds)?)
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}
