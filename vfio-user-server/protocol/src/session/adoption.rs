//! Progress of a session in its device's journal, and sessions that are adopted.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno as SysErrno;
use nix::sys::socket::{MsgFlags, recv, send};
use zerocopy::{FromBytes, IntoBytes};

use super::dispatch::SessionState;
use super::{Closed, Session};
use crate::device::Device;
use crate::errno::Errno;
use crate::fds::Fds;
use crate::journal::{FirstMessage, MAX_FINISHED, ReplyPhase, SessionRecord, Standing};
use crate::proto::header::Header;
use crate::proto::message::Request;
use crate::proto::reply::Reply;
use crate::proto::wire;
use crate::sys;
use crate::transport::{Filled, ReplyFds};

/// Longest wait for the client's answer to a question. QEMU answers within 1 ms, unless a vCPU
/// waits for a reply: then not at all.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(20);
/// Command of a question, which no protocol version has. A client answers it with an error.
const UNKNOWN_COMMAND: u16 = 0xffff;
/// Limit of finished messages in the socket: one call removes them. The client's limit of bytes
/// that it has sent holds hundreds.
const FINISHED_MESSAGES: u32 = 31;
/// Message id of a question.
const QUESTION: u16 = 0xfffe;

/// Progress of a session whose device has a journal.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// What is known of the first message, if this process continues.
    pub first: Option<FirstMessage>,
    /// Message whose reply waits for room.
    unfinished: Option<InSocket>,
    /// Number of finished messages in the socket, and of their bytes.
    finished: (u32, usize),
    /// Whether no other process can continue, as the journal knows.
    is_torn: bool,
}

/// The part of a message that is still in the socket.
#[derive(Clone, Copy, Debug)]
pub(super) struct InSocket {
    /// Its length; 0 if the message has left the socket.
    pub bytes: usize,
    /// Whether it has descriptors, at which a receive call ends.
    pub has_fds: bool,
}

impl Session {
    /// Adopts the session of a process that has ended, on the same socket. `finished` is the
    /// number of messages that were finished, `mappings` are the client's DMA mappings.
    ///
    /// Waits for up to 20 ms if the client may have got the reply to a read, to ask it.
    pub fn adopt(
        socket: OwnedFd,
        record: SessionRecord,
        finished: u64,
        first: FirstMessage,
        mappings: impl IntoIterator<Item = crate::dma::DmaMap>,
    ) -> io::Result<Self> {
        // The process before has peeked from another place.
        sys::set_peek_offset(socket.as_fd(), None)?;
        let mut session = Self::new(socket)?;
        session.state.set_client_limits(record.client);
        for map in mappings {
            session.state.dma.insert(map.address, map.size, map.readable, map.writable);
        }
        session.messages = finished;
        session.progress.first = Some(session.find_out(first)?);
        Ok(session)
    }

    /// Returns where the session is, unless a part of a message is in this process alone.
    pub fn standing(&self) -> Option<Standing> {
        if self.is_incomplete() || self.progress.unfinished.is_some() {
            return None;
        }
        let record =
            SessionRecord { client: self.state.client_limits(), message: self.messages, error: 0 };
        let in_socket = self.progress.finished.1;
        Some(Standing { record, finished: self.messages, in_socket })
    }

    /// Returns whether a message is waiting in the socket of a session that has just been resumed.
    pub fn has_input(&self) -> bool {
        self.peek(&mut [0]).is_ok_and(|bytes| !bytes.is_empty())
    }

    /// Finds out whether the client has got the reply to a request that was sent, or about to be. A
    /// second reply would break the connection, and none would stop a vCPU.
    ///
    /// A client that waits for a reply sends nothing: it makes one access at a time. QEMU answers
    /// questions unless it waits. A client that answers none, has got the reply, and does nothing
    /// for 20 ms gets a second one; the process must have died within the few instructions around
    /// the call that sent the first.
    fn find_out(&self, first: FirstMessage) -> io::Result<FirstMessage> {
        let mut bytes = vec![0; Header::SIZE];
        let header = Header::read_from_bytes(self.peek(&mut bytes)?);
        let (ReplyPhase::Sending, Ok(header)) = (first.reply, header) else { return Ok(first) };
        if !header.has_valid_size() {
            return Ok(first);
        }
        let answers = self.state.client_limits().is_some_and(|client| client.drops_replies);
        let mut bytes = vec![0; header.size as usize + 1];
        let queued = self.peek(&mut bytes)?;
        let payload = queued.get(Header::SIZE..header.size as usize).unwrap_or_default();
        let request = Request::decode(header.command, payload);
        if answers && !request.is_ok_and(|request| request.is_repeatable()) {
            return Ok(first);
        }
        if answers && queued.len() == header.size as usize {
            let question = Header {
                id: QUESTION,
                command: UNKNOWN_COMMAND,
                size: Header::SIZE as u32,
                flags: 0,
                error: 0,
            };
            let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
            match send(self.socket.as_raw_fd(), question.as_bytes(), flags) {
                Ok(_) => {}
                // The client has gone, which the next receive call tells.
                Err(SysErrno::EPIPE | SysErrno::ECONNRESET) => {
                    return Ok(FirstMessage { reply: ReplyPhase::Sent, ..first });
                }
                Err(error) => return Err(error.into()),
            }
        }
        let deadline = Instant::now() + ANSWER_TIMEOUT;
        loop {
            // The next message, or an unread reply. A question is not read by a client that waits.
            let has_reply = self.peek(&mut bytes)?.len() > header.size as usize
                || (!answers && sys::unreceived(self.socket.as_fd())? > 0);
            if has_reply {
                return Ok(FirstMessage { reply: ReplyPhase::Sent, ..first });
            }
            if Instant::now() >= deadline {
                return Ok(FirstMessage { reply: ReplyPhase::None, ..first });
            }
            // The first message keeps the socket readable.
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    fn peek<'a>(&self, bytes: &'a mut [u8]) -> io::Result<&'a [u8]> {
        // Without a control buffer, descriptors of the messages stay in the socket.
        let flags = MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT;
        match recv(self.socket.as_raw_fd(), bytes, flags) {
            Ok(len) => Ok(&bytes[..len]),
            Err(SysErrno::EAGAIN) => Ok(&[]),
            Err(error) => Err(error.into()),
        }
    }

    /// Receives messages so that another process could continue with them, if all are there.
    pub(super) fn receive<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        wait: bool,
    ) -> io::Result<Filled> {
        if device.journal().is_none() {
            return self.receiver.fill(self.socket.as_fd(), wait);
        }
        if !self.receiver.has_taken() {
            let finished = self.progress.finished.1;
            if let Some(filled) = self.receiver.peek(self.socket.as_fd(), finished, wait)? {
                return Ok(filled);
            }
            self.remove_finished(device)?;
            self.set_torn(device, true);
        }
        self.receiver.fill(self.socket.as_fd(), wait)
    }

    /// Records a message that was carried out. `held` is true if it is still in the socket.
    pub(super) fn commit<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        result: Result<(), Errno>,
        held: bool,
        is_repeatable: bool,
    ) {
        self.set_torn(device, !held || self.is_incomplete());
        let record = SessionRecord {
            client: self.state.client_limits(),
            message: self.messages,
            error: result.err().map_or(0, Errno::raw),
        };
        if let Some(journal) = device.journal() {
            journal.commit(record, is_repeatable);
        }
    }

    /// Returns whether something of the session is in this process alone.
    fn is_incomplete(&self) -> bool {
        self.receiver.has_taken() || !self.state.features.are_idle()
    }

    /// Finishes a message whose reply was sent, or waits for room in the socket.
    pub(super) fn finish<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        message: InSocket,
        sent: bool,
    ) -> Result<bool, Closed> {
        if device.journal().is_none() {
            return Ok(sent);
        }
        if !sent {
            self.progress.unfinished = Some(message);
            self.set_torn(device, true);
            return Ok(false);
        }
        let InSocket { bytes, has_fds } = message;
        if self.progress.finished.1 + bytes > MAX_FINISHED {
            self.remove_finished(device)?;
        }
        let (count, before) = self.progress.finished;
        if let Some(journal) = device.journal() {
            journal.finish(bytes);
        }
        if bytes > 0 {
            self.progress.finished = (count + 1, before + bytes);
        }
        if has_fds || count >= FINISHED_MESSAGES {
            self.remove_finished(device)?;
        }
        self.set_torn(device, self.is_incomplete());
        Ok(true)
    }

    /// Returns the number of finished messages that are in the socket.
    pub fn finished(&self) -> u32 {
        self.progress.finished.0
    }

    /// Removes the finished messages from the socket.
    ///
    /// A process calls this before it waits for long, or ends: where a socket closes with unread
    /// messages, the client's receive call fails instead of telling the end, and QEMU 11.1 ends.
    pub fn remove_finished<D: Device + ?Sized>(&mut self, device: &mut D) -> io::Result<()> {
        if self.finished() > 0
            && let Some(journal) = device.journal()
        {
            journal.remove(self.socket.as_fd())?;
            self.progress.finished = (0, 0);
        }
        Ok(())
    }

    /// Finishes the message whose reply waited for room in the socket.
    pub(super) fn finish_sent<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<(), Closed> {
        if let Some(message) = self.progress.unfinished.take() {
            self.finish(device, message, true)?;
        }
        Ok(())
    }

    fn set_torn<D: Device + ?Sized>(&mut self, device: &mut D, torn: bool) {
        if self.progress.is_torn != torn {
            self.progress.is_torn = torn;
            if let Some(journal) = device.journal() {
                journal.set_adoptable(!torn);
            }
        }
    }
}

impl SessionState {
    /// Executes a request and writes the reply, which is all that is left if another process has
    /// `executed` the request. Returns the reply's descriptors.
    pub(super) fn execute<'d, D: Device + ?Sized>(
        &mut self,
        request: Request<'_>,
        executed: Option<Result<(), Errno>>,
        payload: &[u8],
        fds: Fds,
        device: &'d mut D,
        reply: &mut Reply<'_>,
    ) -> Result<ReplyFds<'d>, Errno> {
        if let Some(done) = executed
            && !request.is_repeatable()
        {
            reply_to_executed(request, payload, reply);
            return done.map(|()| ReplyFds::default());
        }
        if executed.is_some() && matches!(request, Request::Version { .. }) {
            self.set_client_limits(None);
        }
        self.check_order(&request)?;
        self.dispatch(request, payload, fds, device, reply)
    }
}

/// Writes the reply to a request that was carried out by another process.
fn reply_to_executed(request: Request<'_>, payload: &[u8], reply: &mut Reply<'_>) {
    match request {
        Request::RegionWrite(access, _) => reply.region_access(access),
        Request::RegionWriteMulti(writes) => reply.writes_done(writes.len()),
        Request::DmaUnmap(_) => {
            reply.payload().extend_from_slice(&payload[..wire::DmaUnmap::SIZE]);
        }
        _ => {}
    }
}
