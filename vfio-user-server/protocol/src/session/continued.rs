//! Progress of a session in its device's journal, and sessions that continue another process'.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::errno::Errno as SysErrno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, recv, send};
use zerocopy::{FromBytes, IntoBytes};

use super::{Closed, Session};
use crate::device::Device;
use crate::errno::Errno;
use crate::journal::{FirstMessage, ReplyPhase, SessionRecord};
use crate::proto::header::Header;
use crate::proto::message::Request;
use crate::proto::reply::Reply;
use crate::proto::wire;
use crate::sys;
use crate::transport::Filled;

/// Longest wait for the client's answer to a question. QEMU answers within 1 ms, unless a vCPU waits
/// for a reply: then not at all.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(20);
/// Command of a question, which no protocol version has. A client answers it with an error.
const UNKNOWN_COMMAND: u16 = 0xffff;
/// Message id of a question.
const QUESTION: u16 = 0xfffe;

/// Progress of a session whose device has a journal.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// What is known of the first message, if this process continues.
    pub first: Option<FirstMessage>,
    /// Bytes in the socket of the message whose reply waits for room.
    unfinished: Option<usize>,
    /// Whether no other process can continue, as the journal knows.
    is_torn: bool,
}

impl Session {
    /// Continues the session of a process that has ended, on the same socket. `finished` is the
    /// number of messages that were finished, `mappings` are the client's DMA mappings.
    ///
    /// Waits for up to 20 ms if the client may have got the reply to a read, to ask it.
    pub fn resume(
        socket: OwnedFd,
        record: SessionRecord,
        finished: u64,
        first: FirstMessage,
        mappings: impl IntoIterator<Item = crate::dma::DmaMap>,
    ) -> io::Result<Self> {
        let mut session = Self::new(socket)?;
        session.state.set_client_limits(record.client);
        for map in mappings {
            session.state.dma.insert(map.address, map.size, map.readable, map.writable);
        }
        session.messages = finished;
        session.progress.first = Some(session.find_out(first)?);
        Ok(session)
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
            send(self.socket.as_raw_fd(), question.as_bytes(), flags)?;
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
            if wait {
                let socket = PollFd::new(self.socket.as_fd(), PollFlags::POLLIN);
                // After a signal nothing is there, and the caller comes again.
                let _ = poll(&mut [socket], PollTimeout::NONE);
            }
            if let Some(filled) = self.receiver.peek(self.socket.as_fd())? {
                return Ok(filled);
            }
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
        bytes: usize,
        sent: bool,
    ) -> Result<bool, Closed> {
        if device.journal().is_none() {
            return Ok(sent);
        }
        if !sent {
            self.progress.unfinished = Some(bytes);
            self.set_torn(device, true);
            return Ok(false);
        }
        set_reply(device, ReplyPhase::Sent);
        let socket = self.socket.as_fd();
        if let Some(journal) = device.journal() {
            journal.finish(socket, bytes)?;
        }
        self.set_torn(device, self.is_incomplete());
        Ok(true)
    }

    /// Finishes the message whose reply waited for room in the socket.
    pub(super) fn finish_sent<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<(), Closed> {
        if let Some(bytes) = self.progress.unfinished.take() {
            self.finish(device, bytes, true)?;
        }
        Ok(())
    }

    fn set_torn<D: Device + ?Sized>(&mut self, device: &mut D, torn: bool) {
        if self.progress.is_torn != torn {
            self.progress.is_torn = torn;
            if let Some(journal) = device.journal() {
                journal.set_continuable(!torn);
            }
        }
    }
}

/// Records how far a reply has come.
pub(super) fn set_reply<D: Device + ?Sized>(device: &mut D, reply: ReplyPhase) {
    if let Some(journal) = device.journal() {
        journal.set_reply(reply);
    }
}

/// Writes the reply to a request that was carried out by another process.
pub(super) fn reply_to_executed(request: Request<'_>, payload: &[u8], reply: &mut Reply<'_>) {
    match request {
        Request::RegionWrite(access, _) => reply.region_access(access),
        Request::RegionWriteMulti(writes) => reply.writes_done(writes.len()),
        Request::DmaUnmap(_) => {
            reply.payload().extend_from_slice(&payload[..wire::DmaUnmap::SIZE]);
        }
        _ => {}
    }
}
