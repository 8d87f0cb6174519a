//! One client on one connection, from its first message to its last.
//!
//! A session is driven by readiness: whoever owns the event loop watches the socket for what [`Interest`] says and
//! calls [`Session::on_ready`]. It never blocks, and a device's methods are called from nowhere else.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use zerocopy::IntoBytes;

use crate::device::{Device, Region};
use crate::dma::{DmaMap, DmaRanges, DmaUnmap};
use crate::errno::Errno;
use crate::fds::Fds;
use crate::irq::{self, IrqCommand, IrqLines};
use crate::proto::caps::{Capabilities, MAX_DMA_MAPS};
use crate::proto::header::{Kind, MAX_MESSAGE};
use crate::proto::message::{
    Access, Feature, FeatureAccess, IrqData, MultiWrites, Request, SetIrqs,
};
use crate::proto::reply::Reply;
use crate::proto::wire;
use crate::transport::{BadFraming, Filled, Receiver, ReplyFds, Sender};

/// The protocol's version, and its latest revision that we know.
const VERSION: (u16, u16) = (0, 1);
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
}

/// One client's connection.
#[derive(Debug)]
pub struct Session {
    socket: OwnedFd,
    receiver: Receiver,
    sender: Sender,
    state: State,
    detached: bool,
}

impl Session {
    /// Takes over a connected stream socket, and makes it non-blocking.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        let flags = OFlag::from_bits_retain(fcntl(&socket, FcntlArg::F_GETFL)?);
        fcntl(&socket, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        Ok(Self {
            socket,
            receiver: Receiver::default(),
            sender: Sender::default(),
            state: State::default(),
            detached: false,
        })
    }

    /// Sends what waits, then handles the messages that are there, a bounded number of them.
    ///
    /// To be called whenever the socket is readable, writable, or hung up. Once it returns an error the device has
    /// been [detached](Device::detach) and the session is to be dropped.
    pub fn on_ready<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<Interest, Closed> {
        let result = self.advance(device);
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
    pub fn serve<D: Device + ?Sized>(mut self, device: &mut D) -> Closed {
        loop {
            let interest = match self.on_ready(device) {
                Ok(interest) => interest,
                Err(closed) => return closed,
            };
            let mut events = PollFlags::empty();
            events.set(PollFlags::POLLIN, interest.readable);
            events.set(PollFlags::POLLOUT, interest.writable);
            let mut fds = [PollFd::new(self.socket.as_fd(), events)];
            match poll(&mut fds, PollTimeout::NONE) {
                Ok(_) | Err(nix::errno::Errno::EINTR) => {}
                Err(error) => {
                    self.close(device);
                    return Closed::Io(error.into());
                }
            }
        }
    }

    fn detach<D: Device + ?Sized>(&mut self, device: &mut D) {
        if !std::mem::replace(&mut self.detached, true) {
            device.detach();
        }
    }

    fn advance<D: Device + ?Sized>(&mut self, device: &mut D) -> Result<Interest, Closed> {
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
            match self.receiver.fill(self.socket.as_fd())? {
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
                return Err(Closed::Framing { size: header.size, max: MAX_MESSAGE });
            }
        };
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
            // We ask nothing, so nothing can be answered.
            Some(Kind::Reply) => return Ok(true),
            None => Err(Errno::EINVAL),
        };
        if let Err(errno) = result {
            log::debug!("vfio-user: {header:?} fails: {errno}");
        }
        if header.wants_no_reply() {
            return Ok(true);
        }
        let fds = *result.as_ref().unwrap_or(&ReplyFds::default());
        reply.finish(&header, result.map(|_| ()));
        Ok(self.sender.send(socket, &fds)?)
    }
}

impl AsFd for Session {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// What was agreed on with the client, and what it has mapped.
#[derive(Debug)]
struct State {
    /// What the client can do, once it has said so.
    client: Option<Capabilities>,
    dma: DmaRanges,
}

impl Default for State {
    fn default() -> Self {
        Self { client: None, dma: DmaRanges::new(MAX_DMA_MAPS as usize) }
    }
}

impl State {
    /// VERSION comes first, and only once.
    fn check_order(&self, request: &Request<'_>) -> Result<(), Errno> {
        match (request, self.client) {
            (Request::Version { .. }, None) => Ok(()),
            (Request::Version { .. }, Some(_)) | (_, None) => Err(Errno::EINVAL),
            (_, Some(_)) => Ok(()),
        }
    }

    /// Does what a request asks for. The reply's descriptors are borrowed from the device.
    fn answer<'d, D: Device + ?Sized>(
        &mut self,
        request: Request<'_>,
        payload: &[u8],
        fds: Fds,
        device: &'d mut D,
        reply: &mut Reply<'_>,
    ) -> Result<ReplyFds<'d>, Errno> {
        match request {
            Request::Version { major, minor, data } => {
                self.version(major, minor, data, reply)?;
            }
            Request::DmaMap { address, size, offset, readable, writable } => {
                if fds.len() > 1 {
                    return Err(Errno::EINVAL);
                }
                self.dma.check(address, size)?;
                let fd = fds.into_iter().next();
                device.dma_map(DmaMap { address, size, offset, readable, writable, fd })?;
                self.dma.insert(address, size);
            }
            Request::DmaUnmap(unmap) => {
                if let DmaUnmap::Range { address, size } = unmap
                    && !self.dma.contains(address, size)
                {
                    return Err(Errno::ENOENT);
                }
                device.dma_unmap(unmap)?;
                self.dma.remove(unmap);
                reply.payload().extend_from_slice(&payload[..wire::DmaUnmap::SIZE]);
            }
            Request::GetInfo => reply.device_info(device.info()),
            Request::GetRegionInfo { index, argsz } => {
                check_index(index, device.info().regions)?;
                let region = device.region(index);
                reply.region_info(index, region.as_ref(), argsz);
                return Ok(region.and_then(|region| region.mapping).map(|map| map.fd).into());
            }
            Request::GetRegionIoFds { index, argsz } => {
                check_index(index, device.info().regions)?;
                return Ok(self.region_io_fds(index, argsz, device, reply));
            }
            Request::GetIrqInfo { index } => {
                check_index(index, device.info().irqs)?;
                reply.irq_info(index, device.irq(index));
            }
            Request::SetIrqs(set) => {
                check_index(set.index, device.info().irqs)?;
                let count = device.irq(set.index).count;
                if let Some(command) = irq_command(set, fds, count)? {
                    device.set_irqs(set.index, command)?;
                }
            }
            Request::RegionRead(access) => {
                check_access(device, access, |region| region.readable)?;
                let data = reply.region_data(access);
                if !data.is_empty() {
                    device.region_read(access.region, access.offset, data)?;
                }
            }
            Request::RegionWrite(access, data) => {
                write(device, access, data)?;
                reply.region_access(access);
            }
            Request::RegionWriteMulti(writes) => {
                reply.writes_done(write_all(device, writes)?);
            }
            Request::Reset => device.reset()?,
            Request::Feature { argsz, feature } => {
                answer_feature(device, argsz, feature, payload, reply)?;
            }
        }
        Ok(ReplyFds::default())
    }

    fn version(
        &mut self,
        major: u16,
        minor: u16,
        data: &[u8],
        reply: &mut Reply<'_>,
    ) -> Result<(), Errno> {
        if major != VERSION.0 {
            return Err(Errno::EINVAL);
        }
        let proposed = Capabilities::decode(data)?;
        reply.version(major, minor.min(VERSION.1));
        Capabilities::SERVER.common(proposed).encode_within(data.len(), reply.payload());
        self.client = Some(proposed);
        Ok(())
    }

    fn region_io_fds<'d, D: Device + ?Sized>(
        &self,
        index: u32,
        argsz: u32,
        device: &'d D,
        reply: &mut Reply<'_>,
    ) -> ReplyFds<'d> {
        let limit = self.client.and_then(|client| client.max_msg_fds).unwrap_or(1);
        let entries = device.io_event_fds(index);
        let limit = usize::try_from(limit).unwrap_or(usize::MAX).min(crate::fds::MAX_FDS);
        let entries = &entries[..entries.len().min(limit)];
        let mut fds = ReplyFds::default();
        if reply.region_io_fds(index, entries, argsz) {
            for entry in entries {
                fds.push(entry.fd.as_fd());
            }
        }
        fds
    }
}

fn check_index(index: u32, count: u32) -> Result<(), Errno> {
    if index < count { Ok(()) } else { Err(Errno::EINVAL) }
}

fn check_access<D: Device + ?Sized>(
    device: &D,
    access: Access,
    allowed: impl Fn(&Region<'_>) -> bool,
) -> Result<(), Errno> {
    let region = device.region(access.region).ok_or(Errno::EINVAL)?;
    // Decoding has seen to it that the sum does not overflow.
    if access.offset + u64::from(access.count) > region.size {
        return Err(Errno::EINVAL);
    }
    if allowed(&region) { Ok(()) } else { Err(Errno::EACCES) }
}

fn write<D: Device + ?Sized>(device: &mut D, access: Access, data: &[u8]) -> Result<(), Errno> {
    check_access(device, access, |region| region.writable)?;
    if data.is_empty() {
        return Ok(());
    }
    device.region_write(access.region, access.offset, data)
}

/// Does each write; all are checked before the first is done.
fn write_all<D: Device + ?Sized>(device: &mut D, writes: MultiWrites<'_>) -> Result<usize, Errno> {
    for item in writes.iter() {
        check_access(device, item?.0, |region| region.writable)?;
    }
    for item in writes.iter() {
        let (access, data) = item?;
        write(device, access, data)?;
    }
    Ok(writes.len())
}

/// What a request about `count` interrupts comes to; `None` where there is nothing to do.
fn irq_command(set: SetIrqs<'_>, fds: Fds, count: u32) -> Result<Option<IrqCommand<'_>>, Errno> {
    let SetIrqs { start, action, .. } = set;
    // Decoding has seen to it that the sum does not overflow.
    if start + set.count > count {
        return Err(Errno::EINVAL);
    }
    Ok(match set.data {
        IrqData::EventFd if fds.is_empty() => {
            Some(IrqCommand::Unassign { action, start, count: set.count })
        }
        IrqData::EventFd => {
            let all_eventfds = fds.iter().all(|fd| irq::is_eventfd(fd.as_fd()));
            if fds.len() != set.count as usize || !all_eventfds {
                return Err(Errno::EINVAL);
            }
            Some(IrqCommand::Assign { action, start, eventfds: fds })
        }
        _ if !fds.is_empty() => return Err(Errno::EINVAL),
        IrqData::None if set.count == 0 => (count > 0).then_some(IrqCommand::Disable),
        IrqData::None => {
            let lines = IrqLines { start, count: set.count, chosen: None };
            Some(IrqCommand::Perform { action, lines })
        }
        IrqData::Bool(chosen) => {
            let lines = IrqLines { start, count: set.count, chosen: Some(chosen) };
            Some(IrqCommand::Perform { action, lines })
        }
    })
}

/// The reply is the request's structure, and for a get the value behind it.
fn answer_feature<D: Device + ?Sized>(
    device: &mut D,
    argsz: u32,
    feature: Feature<'_>,
    payload: &[u8],
    reply: &mut Reply<'_>,
) -> Result<(), Errno> {
    let start = reply.payload().len();
    reply.payload().extend_from_slice(&payload[..wire::Feature::SIZE]);
    if matches!(feature.access, FeatureAccess::Set) {
        reply.payload().extend_from_slice(feature.data);
    }
    device.feature(feature, reply.payload())?;
    let needed = reply.payload().len() - start;
    let needed_bytes = u32::try_from(needed).map_err(|_| Errno::EOVERFLOW)?;
    reply.payload()[start..start + 4].copy_from_slice(needed_bytes.as_bytes());
    if needed_bytes > argsz {
        reply.payload().truncate(start + wire::Feature::SIZE);
    }
    Ok(())
}
