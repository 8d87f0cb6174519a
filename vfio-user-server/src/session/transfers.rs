//! What the device wants of the client's memory: asked, awaited, and matched with the answers.

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

/// Bytes that the first read of all asks for, where there is something to be written.
const PROBE: u32 = 4;
/// Transfers that are refused at once, before the device has to wait for its turn to ask again.
const REFUSALS: usize = 64;

/// What is known of how the client answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Format {
    #[default]
    Unknown,
    Right,
    /// The count has four bytes where the specification has eight.
    Wrong,
}

#[derive(Clone, Copy, Debug)]
struct Asked {
    id: u16,
    command: Command,
    address: u64,
    count: u32,
    /// The device's name for it; `None` for a read of our own, to learn the format.
    tag: Option<u64>,
}

/// Transfers under way.
#[derive(Debug, Default)]
pub struct Pending {
    format: Format,
    asked: Vec<Asked>,
    /// Waits for the format to be known.
    held: Option<Transfer>,
    next_id: u16,
    /// The client has closed the socket that it would answer on.
    deaf: bool,
}

impl Pending {
    /// Asks for what the device wants, as far as there is room.
    pub fn ask<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        dma: &DmaRanges,
        limit: u64,
        socket: BorrowedFd<'_>,
        sender: &mut Sender,
    ) -> io::Result<()> {
        let mut refusals = 0;
        while self.asked.len() < MAX_TRANSFERS && !sender.is_waiting() && refusals < REFUSALS {
            let Some(transfers) = device.transfers() else { return Ok(()) };
            let Some(transfer) = self.held.take().or_else(|| transfers.next()) else {
                return Ok(());
            };
            if let Err(errno) = self.check(&transfer, dma, limit) {
                transfers.done(transfer.tag, Err(errno));
                refusals += 1;
                continue;
            }
            let asked = if matches!(transfer.kind, TransferKind::Write(_))
                && self.format == Format::Unknown
            {
                let probed = self.asked.iter().any(|asked| asked.command == Command::DmaRead);
                let place = dma.readable();
                let tag = transfer.tag;
                self.held = Some(transfer);
                if probed {
                    return Ok(());
                }
                let Some(address) = place else {
                    // Nothing can be read, so nothing can be known.
                    self.held = None;
                    transfers.done(tag, Err(Errno::ENOTSUP));
                    refusals += 1;
                    continue;
                };
                self.request(Command::DmaRead, address, PROBE, None, &[], sender)
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
            self.asked.push(asked);
            sender.send(socket, &ReplyFds::default())?;
        }
        Ok(())
    }

    fn check(&self, transfer: &Transfer, dma: &DmaRanges, limit: u64) -> Result<(), Errno> {
        let size = transfer.kind.size();
        if size == 0 || size > limit.min(MAX_DATA.into()) {
            return Err(Errno::EINVAL);
        }
        if self.format == Format::Wrong {
            return Err(Errno::ENOTSUP);
        }
        if self.deaf {
            return Err(Errno::EIO);
        }
        dma.allows(transfer.address, size, matches!(transfer.kind, TransferKind::Write(_)))
    }

    fn request(
        &mut self,
        command: Command,
        address: u64,
        count: u32,
        tag: Option<u64>,
        data: &[u8],
        sender: &mut Sender,
    ) -> Asked {
        let id = self.next_id;
        self.next_id = id.wrapping_add(1);
        let header = Header::request(id, command, wire::DmaAccess::SIZE + data.len());
        let out = sender.buffer();
        out.clear();
        out.extend_from_slice(header.as_bytes());
        out.extend_from_slice(wire::DmaAccess { address, count: count.into() }.as_bytes());
        out.extend_from_slice(data);
        Asked { id, command, address, count, tag }
    }

    /// The client answers something; what was not asked is ignored.
    pub fn answered<D: Device + ?Sized>(
        &mut self,
        header: &Header,
        payload: &[u8],
        device: &mut D,
    ) {
        let found = self
            .asked
            .iter()
            .position(|asked| asked.id == header.id && asked.command as u16 == header.command);
        let Some(found) = found else { return };
        let asked = self.asked.remove(found);
        let result = self.outcome(&asked, header, payload);
        let tag = match (asked.tag, &result) {
            (Some(tag), _) => Some(tag),
            // Our own read has failed, and with it what waits for it.
            (None, Err(_)) => self.held.take().map(|held| held.tag),
            (None, Ok(_)) => None,
        };
        if let (Some(tag), Some(transfers)) = (tag, device.transfers()) {
            transfers.done(tag, result);
        }
    }

    fn outcome<'a>(
        &mut self,
        asked: &Asked,
        header: &Header,
        payload: &'a [u8],
    ) -> Result<&'a [u8], Errno> {
        if let Some(raw) = header.failure() {
            let raw = i32::try_from(raw).unwrap_or(0);
            return Err(Errno::new(raw).unwrap_or(Errno::EIO));
        }
        let place = wire::DmaAccess { address: asked.address, count: asked.count.into() };
        let place = place.as_bytes();
        if asked.command == Command::DmaWrite {
            // The specification's table gives the count four bytes here; its clients send eight.
            return if payload.starts_with(&place[..12]) { Ok(&[]) } else { Err(Errno::EIO) };
        }
        let count = asked.count as usize;
        if payload.len() == 12 + count && payload.starts_with(&place[..12]) {
            log::warn!("The client misplaces data in DMA messages: the device does without them");
            self.format = Format::Wrong;
            return Err(Errno::ENOTSUP);
        }
        let (echo, data) = wire::DmaAccess::read_from_prefix(payload).map_err(|_| Errno::EIO)?;
        if echo.as_bytes() != place || data.len() != count {
            return Err(Errno::EIO);
        }
        self.format = Format::Right;
        Ok(data)
    }

    /// Memory is about to be taken back: what is under way there has failed.
    pub fn unmapped<D: Device + ?Sized>(&mut self, unmap: DmaUnmap, device: &mut D) {
        let gone = |asked: &Asked| match unmap {
            DmaUnmap::All => true,
            DmaUnmap::Range { address, size } => {
                asked.address <= address + (size - 1)
                    && address <= asked.address + u64::from(asked.count - 1)
            }
        };
        self.fail(device, Errno::EFAULT, gone);
    }

    /// No answer will come any more.
    pub fn lost<D: Device + ?Sized>(&mut self, device: &mut D) {
        self.deaf = true;
        self.fail(device, Errno::EIO, |_| true);
    }

    fn fail<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        errno: Errno,
        gone: impl Fn(&Asked) -> bool,
    ) {
        let mut at = 0;
        while let Some(asked) = self.asked.get(at).copied() {
            if !gone(&asked) {
                at += 1;
                continue;
            }
            self.asked.remove(at);
            // A read of our own is repeated for what waits for it.
            if let (Some(tag), Some(transfers)) = (asked.tag, device.transfers()) {
                transfers.done(tag, Err(errno));
            }
        }
    }
}
