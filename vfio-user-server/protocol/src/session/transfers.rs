//! The device's DMA_READ and DMA_WRITE requests to the client.

use std::io;
use std::os::fd::BorrowedFd;

use zerocopy::{FromBytes, IntoBytes};

use crate::device::Device;
use crate::dma::{DmaRanges, DmaUnmap};
use crate::errno::Errno;
use crate::proto::header::{Command, Header, MAX_DATA};
use crate::proto::wire;
use crate::transfer::{MAX_TRANSFERS, Transfer, TransferKind};
use crate::transport::{ReplyFds, Sender};

/// Bytes of the probe: a read that shows the client's reply format before the first write.
const PROBE_BYTES: u32 = 4;
/// Limit of transfers that fail their checks per call; the rest waits for the next call.
const MAX_FAILURES_PER_CALL: usize = 64;

/// Format of the client's DMA_READ replies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum ReplyFormat {
    #[default]
    Unknown,
    /// The specification's format.
    Standard,
    /// A format with four bytes for the count; the specification has eight.
    ShortCount,
}

/// A request to the client without a reply so far.
#[derive(Clone, Copy, Debug)]
struct InFlight {
    id: u16,
    command: Command,
    address: u64,
    count: u32,
    /// The device's tag; `None` for the session's probe.
    tag: Option<u64>,
}

/// Transfers under way.
#[derive(Debug, Default)]
pub struct PendingTransfers {
    format: ReplyFormat,
    in_flight: Vec<InFlight>,
    /// A write that waits for the reply to the probe.
    deferred: Option<Transfer>,
    next_id: u16,
    /// True if the client has closed the socket for its replies.
    closed: bool,
}

impl PendingTransfers {
    /// Sends requests for the device's transfers while the socket has room.
    pub fn send_requests<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        dma: &DmaRanges,
        limit: u64,
        socket: BorrowedFd<'_>,
        sender: &mut Sender,
    ) -> io::Result<()> {
        let mut failures = 0;
        while self.in_flight.len() < MAX_TRANSFERS
            && !sender.is_waiting()
            && failures < MAX_FAILURES_PER_CALL
        {
            let Some(transfers) = device.transfers() else { return Ok(()) };
            let Some(transfer) = self.deferred.take().or_else(|| transfers.next()) else {
                return Ok(());
            };
            if let Err(errno) = self.check(&transfer, dma, limit) {
                transfers.done(transfer.tag, Err(errno));
                failures += 1;
                continue;
            }
            let request = if matches!(transfer.kind, TransferKind::Write(_))
                && self.format == ReplyFormat::Unknown
            {
                let probed = self.in_flight.iter().any(|it| it.command == Command::DmaRead);
                let readable = dma.first_readable();
                let tag = transfer.tag;
                self.deferred = Some(transfer);
                if probed {
                    return Ok(());
                }
                let Some(address) = readable else {
                    // Without readable memory, a probe is impossible and the format stays unknown.
                    self.deferred = None;
                    transfers.done(tag, Err(Errno::ENOTSUP));
                    failures += 1;
                    continue;
                };
                self.request(Command::DmaRead, address, PROBE_BYTES, None, &[], sender)
            } else {
                let (tag, address) = (Some(transfer.tag), transfer.address);
                match &transfer.kind {
                    TransferKind::Read(count) => {
                        self.request(Command::DmaRead, address, *count, tag, &[], sender)
                    }
                    TransferKind::Write(data) => {
                        let count = data.len() as u32;
                        self.request(Command::DmaWrite, address, count, tag, data, sender)
                    }
                }
            };
            self.in_flight.push(request);
            sender.send(socket, &ReplyFds::default())?;
        }
        Ok(())
    }

    /// Checks size, client and mapping of a transfer.
    fn check(&self, transfer: &Transfer, dma: &DmaRanges, limit: u64) -> Result<(), Errno> {
        let size = transfer.kind.size();
        if size == 0 || size > limit.min(MAX_DATA.into()) {
            return Err(Errno::EINVAL);
        }
        if self.format == ReplyFormat::ShortCount {
            return Err(Errno::ENOTSUP);
        }
        if self.closed {
            return Err(Errno::EIO);
        }
        dma.allows(transfer.address, size, matches!(transfer.kind, TransferKind::Write(_)))
    }

    /// Writes a request into the sender's buffer.
    fn request(
        &mut self,
        command: Command,
        address: u64,
        count: u32,
        tag: Option<u64>,
        data: &[u8],
        sender: &mut Sender,
    ) -> InFlight {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let header = Header::request(id, command, wire::DmaAccess::SIZE + data.len());
        let out = sender.buffer();
        out.clear();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(wire::DmaAccess { address, count: count.into() }.as_bytes());
        out.extend_from_slice(data);
        InFlight { id, command, address, count, tag }
    }

    /// Handles a reply of the client. Replies without a request are ignored.
    pub fn on_reply<D: Device + ?Sized>(
        &mut self,
        header: &Header,
        payload: &[u8],
        device: &mut D,
    ) {
        let found = self
            .in_flight
            .iter()
            .position(|it| it.id == header.id && it.command as u16 == header.command);
        let Some(found) = found else { return };
        let request = self.in_flight.remove(found);
        let result = self.decode_reply(&request, header, payload);
        let tag = match (request.tag, &result) {
            (Some(tag), _) => Some(tag),
            // A failed probe fails the write that waits for it.
            (None, Err(_)) => self.deferred.take().map(|transfer| transfer.tag),
            (None, Ok(_)) => None,
        };
        if let (Some(tag), Some(transfers)) = (tag, device.transfers()) {
            transfers.done(tag, result);
        }
    }

    /// Decodes a reply: the data of a read, nothing for a write.
    fn decode_reply<'a>(
        &mut self,
        request: &InFlight,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<&'a [u8], Errno> {
        if let Some(raw) = header.failure() {
            let raw = i32::try_from(raw).unwrap_or(0);
            return Err(Errno::new(raw).unwrap_or(Errno::EIO));
        }
        let echo = wire::DmaAccess { address: request.address, count: request.count.into() };
        let echo = echo.as_bytes();
        if request.command == Command::DmaWrite {
            // The specification's table has four bytes for the count here; clients send eight.
            return if payload.starts_with(&echo[..12]) { Ok(&[]) } else { Err(Errno::EIO) };
        }
        let count = request.count as usize;
        if payload.len() == 12 + count && payload.starts_with(&echo[..12]) {
            log::warn!(
                "The client misplaces the data of DMA messages: transfers through it are disabled"
            );
            self.format = ReplyFormat::ShortCount;
            return Err(Errno::ENOTSUP);
        }
        let (access, data) = wire::DmaAccess::read_from_prefix(payload).map_err(|_| Errno::EIO)?;
        if access.as_bytes() != echo || data.len() != count {
            return Err(Errno::EIO);
        }
        self.format = ReplyFormat::Standard;
        Ok(data)
    }

    /// Fails the transfers in a range that the client is about to unmap.
    pub fn cancel_unmapped<D: Device + ?Sized>(&mut self, unmap: DmaUnmap, device: &mut D) {
        let is_unmapped = |request: &InFlight| match unmap {
            DmaUnmap::All => true,
            DmaUnmap::Range { address, size } => {
                request.address <= address + (size - 1)
                    && address <= request.address + u64::from(request.count - 1)
            }
        };
        self.fail(device, Errno::EFAULT, is_unmapped);
    }

    /// Fails all transfers, now and later: the client has closed the socket for its replies.
    pub fn close<D: Device + ?Sized>(&mut self, device: &mut D) {
        self.closed = true;
        self.fail(device, Errno::EIO, |_| true);
    }

    /// Fails the requests that `selected` returns true for.
    fn fail<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        errno: Errno,
        selected: impl Fn(&InFlight) -> bool,
    ) {
        let mut at = 0;
        while let Some(request) = self.in_flight.get(at).copied() {
            if !selected(&request) {
                at += 1;
                continue;
            }
            self.in_flight.remove(at);
            // A probe has no tag; the next call sends it again for the deferred write.
            if let (Some(tag), Some(transfers)) = (request.tag, device.transfers()) {
                transfers.done(tag, Err(errno));
            }
        }
    }
}
