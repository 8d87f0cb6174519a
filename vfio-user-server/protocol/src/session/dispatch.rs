//! Execution of a client's requests on the device.

use std::os::fd::{AsFd, OwnedFd};

use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use vfio_bindings::bindings::vfio::VFIO_IRQ_INFO_MASKABLE;
use zerocopy::IntoBytes;

use super::feature::{self, Features};
use super::transfers::PendingTransfers;
use crate::device::{Device, Region};
use crate::dma::{DmaMap, DmaRanges, DmaUnmap};
use crate::errno::Errno;
use crate::fds::Fds;
use crate::irq::{Irq, IrqAction, IrqCommand, IrqLines};
use crate::journal::ClientLimits;
use crate::migration::DmaRange;
use crate::proto::caps::{Capabilities, MAX_DMA_MAPS, TwinSocket};
use crate::proto::header::MAX_DATA;
use crate::proto::message::{
    Access, Feature, FeatureAccess, IrqData, MultiWrites, Request, SetIrqs,
};
use crate::proto::reply::Reply;
use crate::proto::wire;
use crate::transport::ReplyFds;

/// Major and minor version of the protocol that this server implements.
const VERSION: (u16, u16) = (0, 1);

/// Negotiated capabilities, DMA mappings, features and transfers of a session.
#[derive(Debug)]
pub struct SessionState {
    /// Capabilities of the client, once VERSION was handled.
    client: Option<Capabilities>,
    pub dma: DmaRanges,
    pub features: Features,
    pub transfers: PendingTransfers,
    /// The server's and the client's end of a new twin socket. The reply carries the client's end.
    pub new_twin: Option<(OwnedFd, OwnedFd)>,
}

impl Default for SessionState {
    fn default() -> Self {
        Self {
            client: None,
            dma: DmaRanges::new(MAX_DMA_MAPS as usize),
            features: Features::default(),
            transfers: PendingTransfers::default(),
            new_twin: None,
        }
    }
}

impl SessionState {
    /// Checks that VERSION comes first, and only once.
    pub fn check_order(&self, request: &Request<'_>) -> Result<(), Errno> {
        match (request, self.client) {
            (Request::Version { .. }, None) => Ok(()),
            (Request::Version { .. }, Some(_)) | (_, None) => Err(Errno::EINVAL),
            (_, Some(_)) => Ok(()),
        }
    }

    /// Executes a request and writes the reply. Returns the reply's descriptors, borrowed from the
    /// device.
    pub fn dispatch<'d, D: Device + ?Sized>(
        &mut self,
        request: Request<'_>,
        payload: &[u8],
        fds: Fds,
        device: &'d mut D,
        reply: &mut Reply<'_>,
    ) -> Result<ReplyFds<'d>, Errno> {
        match request {
            Request::Version { major, minor, data } => {
                let twin = device.transfers().is_some();
                self.version(major, minor, data, twin, reply)?;
            }
            Request::DmaMap { address, size, offset, readable, writable } => {
                if fds.len() > 1 {
                    return Err(Errno::EINVAL);
                }
                let fd = fds.into_iter().next();
                self.map(DmaMap { address, size, offset, readable, writable, fd }, device)?;
            }
            Request::DmaUnmap(unmap) => {
                self.unmap(unmap, device)?;
                reply.payload().extend_from_slice(&payload[..wire::DmaUnmap::SIZE]);
            }
            Request::DmaUnmapDirty { address, size, page_size, bitmap } => {
                let range = DmaRange { address, size };
                reply.payload().extend_from_slice(&payload[..wire::DmaUnmap::SIZE]);
                self.unmap_dirty(range, page_size, bitmap, device, reply.payload())?;
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
                if let Some(command) = irq_command(set, fds, device.irq(set.index))? {
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
            Request::Reset => {
                device.reset()?;
                self.features.reset();
            }
            Request::Feature { argsz, feature } => {
                self.feature(device, argsz, feature, payload, reply.payload())?;
            }
            Request::MigDataRead(size) => {
                self.features.read_state(device, size, reply.payload())?;
            }
            Request::MigDataWrite(data) => self.features.write_state(device, data)?,
        }
        Ok(ReplyFds::default())
    }

    /// Executes DMA_MAP.
    fn map<D: Device + ?Sized>(&mut self, map: DmaMap, device: &mut D) -> Result<(), Errno> {
        let DmaMap { address, size, readable, writable, .. } = map;
        self.dma.check(address, size)?;
        device.dma_map(map)?;
        self.dma.insert(address, size, readable, writable);
        Ok(())
    }

    /// Executes DMA_UNMAP.
    fn unmap<D: Device + ?Sized>(&mut self, unmap: DmaUnmap, device: &mut D) -> Result<(), Errno> {
        if let DmaUnmap::Range { address, size } = unmap
            && !self.dma.contains(address, size)
        {
            return Err(Errno::ENOENT);
        }
        self.remove_mappings(unmap, device)
    }

    /// Executes DMA_UNMAP with a dirty bitmap, which is appended to `out`.
    fn unmap_dirty<D: Device + ?Sized>(
        &mut self,
        range: DmaRange,
        page_size: u64,
        bitmap: u32,
        device: &mut D,
        out: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let DmaRange { address, size } = range;
        if !self.dma.contains(address, size) {
            return Err(Errno::ENOENT);
        }
        // The first report comes before the unmap, so that an error leaves the mapping in place.
        // The second adds the pages written until the unmap.
        self.features.dirty_bitmap(device, range, page_size, bitmap, out)?;
        self.remove_mappings(DmaUnmap::Range { address, size }, device)?;
        let start = out.len() - bitmap as usize;
        feature::update_dirty_bitmap(device, range, page_size, &mut out[start..])
    }

    /// Fails the transfers of mappings, then removes the mappings.
    fn remove_mappings<D: Device + ?Sized>(
        &mut self,
        unmap: DmaUnmap,
        device: &mut D,
    ) -> Result<(), Errno> {
        self.transfers.cancel_unmapped(unmap, device);
        device.dma_unmap(unmap)?;
        self.dma.remove(unmap);
        Ok(())
    }

    /// Returns the largest transfer that the client accepts, in bytes.
    pub fn max_transfer(&self) -> u64 {
        let client = self.client.and_then(|client| client.max_data_xfer_size);
        client.unwrap_or(MAX_DATA.into())
    }

    /// Returns the client's limits, once VERSION was handled.
    pub fn client_limits(&self) -> Option<ClientLimits> {
        let Capabilities { max_msg_fds, max_data_xfer_size, write_multiple, .. } = self.client?;
        let drops_replies = write_multiple == Some(true);
        Some(ClientLimits { max_msg_fds, max_data_xfer_size, drops_replies })
    }

    /// Sets the client's limits. `None` lets VERSION be handled again.
    pub fn set_client_limits(&mut self, limits: Option<ClientLimits>) {
        self.client = limits.map(|limits| {
            let ClientLimits { max_msg_fds, max_data_xfer_size, drops_replies } = limits;
            Capabilities {
                max_msg_fds,
                max_data_xfer_size,
                write_multiple: drops_replies.then_some(true),
                ..Capabilities::default()
            }
        });
    }

    /// Returns true once VERSION was handled.
    pub fn is_negotiated(&self) -> bool {
        self.client.is_some()
    }

    /// Executes VERSION: negotiates capabilities and makes the twin socket.
    fn version(
        &mut self,
        major: u16,
        minor: u16,
        data: &[u8],
        twin: bool,
        reply: &mut Reply<'_>,
    ) -> Result<(), Errno> {
        if major != VERSION.0 {
            return Err(Errno::EINVAL);
        }
        let proposed = Capabilities::decode(data)?;
        reply.version(major, minor.min(VERSION.1));
        let twin = TwinSocket { supported: twin, fd_index: Some(0) };
        let offered = Capabilities {
            twin_socket: Some(twin).filter(|twin| twin.supported),
            ..Capabilities::SERVER
        };
        let has_twin = offered.intersection(proposed).encode_within(data.len(), reply.payload());
        if has_twin {
            let (family, flags) = (AddressFamily::Unix, SockFlag::SOCK_CLOEXEC);
            self.new_twin = Some(socketpair(family, SockType::Stream, None, flags)?);
        }
        self.client = Some(proposed);
        Ok(())
    }

    /// Executes DEVICE_FEATURE. The reply to a set or a probe repeats the request; the reply to a
    /// get has the value after the fixed structure.
    fn feature<D: Device + ?Sized>(
        &mut self,
        device: &mut D,
        argsz: u32,
        feature: Feature<'_>,
        payload: &[u8],
        reply: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let start = reply.len();
        let room = (argsz as usize).saturating_sub(wire::Feature::SIZE);
        reply.extend_from_slice(&payload[..wire::Feature::SIZE]);
        if feature.access != FeatureAccess::Get {
            if feature.data.len() > room {
                return Err(Errno::EINVAL);
            }
            return self.features.access(device, feature, room, reply);
        }
        self.features.access(device, feature, room, reply)?;
        let needed = u32::try_from(reply.len() - start).map_err(|_| Errno::EOVERFLOW)?;
        reply[start..start + 4].copy_from_slice(needed.as_bytes());
        if needed > argsz {
            reply.truncate(start + wire::Feature::SIZE);
        }
        Ok(())
    }

    /// Executes DEVICE_GET_REGION_IO_FDS.
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

/// Checks the index of a region or interrupt.
fn check_index(index: u32, count: u32) -> Result<(), Errno> {
    if index < count { Ok(()) } else { Err(Errno::EINVAL) }
}

/// Checks that an access lies within its region and that the region allows it.
fn check_access<D: Device + ?Sized>(
    device: &D,
    access: Access,
    allowed: impl Fn(&Region<'_>) -> bool,
) -> Result<(), Errno> {
    let region = device.region(access.region).ok_or(Errno::EINVAL)?;
    // Decoding has checked that the sum does not overflow.
    if access.offset + u64::from(access.count) > region.size {
        return Err(Errno::EINVAL);
    }
    if allowed(&region) { Ok(()) } else { Err(Errno::EACCES) }
}

/// Executes a write to a region.
fn write<D: Device + ?Sized>(device: &mut D, access: Access, data: &[u8]) -> Result<(), Errno> {
    check_access(device, access, |region| region.writable)?;
    if data.is_empty() {
        return Ok(());
    }
    device.region_write(access.region, access.offset, data)
}

/// Executes the writes of REGION_WRITE_MULTI. All are checked before the first is executed.
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

/// Returns the device's command for DEVICE_SET_IRQS, or `None` if there is nothing to do.
fn irq_command(set: SetIrqs<'_>, fds: Fds, irq: Irq) -> Result<Option<IrqCommand<'_>>, Errno> {
    let SetIrqs { start, action, .. } = set;
    // Decoding has checked that the sum does not overflow.
    if start + set.count > irq.count {
        return Err(Errno::EINVAL);
    }
    if action != IrqAction::Trigger && irq.flags & VFIO_IRQ_INFO_MASKABLE == 0 {
        return Err(Errno::ENOTTY);
    }
    Ok(match set.data {
        IrqData::EventFd if fds.is_empty() => {
            Some(IrqCommand::Unassign { action, start, count: set.count })
        }
        IrqData::EventFd => {
            let all_eventfds = fds.iter().all(|fd| foreign_fds::is_eventfd(fd.as_fd()));
            if fds.len() != set.count as usize || !all_eventfds {
                return Err(Errno::EINVAL);
            }
            Some(IrqCommand::Assign { action, start, eventfds: fds })
        }
        _ if !fds.is_empty() => return Err(Errno::EINVAL),
        IrqData::None if set.count == 0 => (irq.count > 0).then_some(IrqCommand::Disable),
        IrqData::None => {
            let lines = IrqLines { start, count: set.count, selected: None };
            Some(IrqCommand::Perform { action, lines })
        }
        IrqData::Bool(selected) => {
            let lines = IrqLines { start, count: set.count, selected: Some(selected) };
            Some(IrqCommand::Perform { action, lines })
        }
    })
}
