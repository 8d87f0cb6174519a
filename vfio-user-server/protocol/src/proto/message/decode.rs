//! Decoding of request payloads.

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FEATURE_GET, VFIO_DEVICE_FEATURE_MASK, VFIO_DEVICE_FEATURE_PROBE,
    VFIO_DEVICE_FEATURE_SET, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE,
    VFIO_DMA_UNMAP_FLAG_ALL, VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP, VFIO_IRQ_SET_ACTION_MASK,
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_BOOL,
    VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::{Access, DMA_PAGE, Feature, FeatureAccess, IrqData, MultiWrites, Request, SetIrqs};
use crate::dma::DmaUnmap;
use crate::errno::Errno;
use crate::irq::IrqAction;
use crate::migration::DirtyPages;
use crate::proto::header::{Command, MAX_DATA};
use crate::proto::wire;

impl<'a> Request<'a> {
    /// Decodes the payload of a request.
    ///
    /// Bytes after a fixed structure are ignored: later versions may add fields. Counted data must
    /// have the counted length.
    ///
    /// # Errors
    ///
    /// `ENOTSUP` for commands that the server does not execute, `EINVAL` for invalid payloads.
    pub fn decode(command: u16, payload: &'a [u8]) -> Result<Self, Errno> {
        match Command::from_raw(command).ok_or(Errno::ENOTSUP)? {
            Command::Version => {
                let (version, data) = split::<wire::Version>(payload)?;
                Ok(Self::Version { major: version.major, minor: version.minor, data })
            }
            Command::DmaMap => dma_map(payload),
            Command::DmaUnmap => dma_unmap(payload),
            Command::GetInfo => {
                let (info, _) = split::<wire::DeviceInfo>(payload)?;
                require(info.argsz as usize >= wire::DeviceInfo::SIZE)?;
                Ok(Self::GetInfo)
            }
            Command::GetRegionInfo => {
                let (info, _) = split::<wire::RegionInfo>(payload)?;
                require(info.argsz as usize >= wire::RegionInfo::SIZE)?;
                Ok(Self::GetRegionInfo { index: info.index, argsz: info.argsz })
            }
            Command::GetRegionIoFds => {
                let (info, _) = split::<wire::RegionIoFds>(payload)?;
                require(info.argsz as usize >= wire::RegionIoFds::SIZE)?;
                require(info.flags == 0 && info.count == 0)?;
                Ok(Self::GetRegionIoFds { index: info.index, argsz: info.argsz })
            }
            Command::GetIrqInfo => {
                let (info, _) = split::<wire::IrqInfo>(payload)?;
                require(info.argsz as usize >= wire::IrqInfo::SIZE)?;
                Ok(Self::GetIrqInfo { index: info.index })
            }
            Command::SetIrqs => set_irqs(payload),
            Command::RegionRead => Ok(Self::RegionRead(access(split(payload)?.0)?)),
            Command::RegionWrite => {
                let (raw, data) = split(payload)?;
                let access = access(raw)?;
                require(data.len() == access.count as usize)?;
                Ok(Self::RegionWrite(access, data))
            }
            Command::RegionWriteMulti => {
                let (count, writes) = split::<u64>(payload)?;
                let bytes = usize::try_from(count).ok();
                let bytes = bytes.and_then(|count| count.checked_mul(wire::MultiWrite::SIZE));
                require(bytes == Some(writes.len()))?;
                Ok(Self::RegionWriteMulti(MultiWrites(writes)))
            }
            Command::Reset => Ok(Self::Reset),
            Command::Feature => feature(payload),
            Command::MigDataRead => {
                let (head, _) = migration_data(payload)?;
                require(head.argsz as usize - wire::MigrationData::SIZE >= head.size as usize)?;
                Ok(Self::MigDataRead(head.size))
            }
            Command::MigDataWrite => {
                let (head, data) = migration_data(payload)?;
                require(data.len() == head.size as usize)?;
                Ok(Self::MigDataWrite(data))
            }
            Command::DmaRead | Command::DmaWrite | Command::DirtyPages => Err(Errno::ENOTSUP),
        }
    }
}

/// Splits a fixed structure off the beginning of the payload.
fn split<T: FromBytes + Immutable + KnownLayout>(payload: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(payload).map_err(|_| Errno::EINVAL)
}

fn require(condition: bool) -> Result<(), Errno> {
    if condition { Ok(()) } else { Err(Errno::EINVAL) }
}

/// Checks an access's length and end.
#[inline]
pub(super) fn access(raw: wire::RegionAccess) -> Result<Access, Errno> {
    require(raw.count <= MAX_DATA && raw.offset.checked_add(raw.count.into()).is_some())?;
    Ok(Access { region: raw.region, offset: raw.offset, count: raw.count })
}

fn dma_map(payload: &[u8]) -> Result<Request<'_>, Errno> {
    let (map, _) = split::<wire::DmaMap>(payload)?;
    let known = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
    require(map.argsz as usize >= wire::DmaMap::SIZE)?;
    require(map.flags & !known == 0 && map.flags & known != 0)?;
    require(map.size > 0 && (map.address | map.size | map.offset).is_multiple_of(DMA_PAGE))?;
    require(map.address.checked_add(map.size - 1).is_some())?;
    require(map.offset.checked_add(map.size).is_some_and(|end| i64::try_from(end).is_ok()))?;
    Ok(Request::DmaMap {
        address: map.address,
        size: map.size,
        offset: map.offset,
        readable: map.flags & VFIO_DMA_MAP_FLAG_READ != 0,
        writable: map.flags & VFIO_DMA_MAP_FLAG_WRITE != 0,
    })
}

fn dma_unmap(payload: &[u8]) -> Result<Request<'_>, Errno> {
    let (unmap, rest) = split::<wire::DmaUnmap>(payload)?;
    require(unmap.argsz as usize >= wire::DmaUnmap::SIZE)?;
    match unmap.flags {
        0 => {
            require(unmap.size > 0 && unmap.address.checked_add(unmap.size - 1).is_some())?;
            Ok(Request::DmaUnmap(DmaUnmap::Range { address: unmap.address, size: unmap.size }))
        }
        VFIO_DMA_UNMAP_FLAG_ALL => {
            require(unmap.address == 0 && unmap.size == 0)?;
            Ok(Request::DmaUnmap(DmaUnmap::All))
        }
        VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP => {
            let (bitmap, _) = split::<wire::Bitmap>(rest)?;
            require(unmap.size > 0 && unmap.address.checked_add(unmap.size - 1).is_some())?;
            require(bitmap.page_size.is_power_of_two() && bitmap.page_size >= DMA_PAGE)?;
            require(bitmap.size >= DirtyPages::bytes(unmap.size, bitmap.page_size))?;
            require(bitmap.size <= MAX_DATA.into())?;
            let reply = wire::DmaUnmap::SIZE + wire::Bitmap::SIZE + bitmap.size as usize;
            require(unmap.argsz as usize >= reply)?;
            Ok(Request::DmaUnmapDirty {
                address: unmap.address,
                size: unmap.size,
                page_size: bitmap.page_size,
                bitmap: bitmap.size as u32,
            })
        }
        _ => Err(Errno::EINVAL),
    }
}

fn migration_data(payload: &[u8]) -> Result<(wire::MigrationData, &[u8]), Errno> {
    let (head, data) = split::<wire::MigrationData>(payload)?;
    require(head.size <= MAX_DATA && head.argsz as usize >= wire::MigrationData::SIZE)?;
    Ok((head, data))
}

fn set_irqs(payload: &[u8]) -> Result<Request<'_>, Errno> {
    const DATA: u32 = VFIO_IRQ_SET_DATA_NONE | VFIO_IRQ_SET_DATA_BOOL | VFIO_IRQ_SET_DATA_EVENTFD;
    let (set, rest) = split::<wire::IrqSet>(payload)?;
    let argsz = set.argsz as usize;
    require(argsz >= wire::IrqSet::SIZE && set.start.checked_add(set.count).is_some())?;
    let action = match set.flags & !DATA {
        VFIO_IRQ_SET_ACTION_MASK => IrqAction::Mask,
        VFIO_IRQ_SET_ACTION_UNMASK => IrqAction::Unmask,
        VFIO_IRQ_SET_ACTION_TRIGGER => IrqAction::Trigger,
        _ => return Err(Errno::EINVAL),
    };
    let data = match set.flags & DATA {
        VFIO_IRQ_SET_DATA_NONE => {
            require(set.count > 0 || (action == IrqAction::Trigger && set.start == 0))?;
            IrqData::None
        }
        VFIO_IRQ_SET_DATA_BOOL => {
            let count = set.count as usize;
            require(count > 0 && argsz - wire::IrqSet::SIZE >= count)?;
            IrqData::Bool(rest.get(..count).ok_or(Errno::EINVAL)?)
        }
        VFIO_IRQ_SET_DATA_EVENTFD => {
            require(set.count > 0)?;
            IrqData::EventFd
        }
        _ => return Err(Errno::EINVAL),
    };
    Ok(Request::SetIrqs(SetIrqs {
        index: set.index,
        start: set.start,
        count: set.count,
        action,
        data,
    }))
}

fn feature(payload: &[u8]) -> Result<Request<'_>, Errno> {
    const METHODS: u32 =
        VFIO_DEVICE_FEATURE_GET | VFIO_DEVICE_FEATURE_SET | VFIO_DEVICE_FEATURE_PROBE;
    let (head, data) = split::<wire::Feature>(payload)?;
    require(head.argsz as usize >= wire::Feature::SIZE)?;
    let get = head.flags & VFIO_DEVICE_FEATURE_GET != 0;
    let set = head.flags & VFIO_DEVICE_FEATURE_SET != 0;
    let access = match (head.flags & VFIO_DEVICE_FEATURE_PROBE != 0, get, set) {
        (true, get, set) => FeatureAccess::Probe { get, set },
        (false, true, false) => FeatureAccess::Get,
        (false, false, true) => FeatureAccess::Set,
        (false, _, _) => return Err(Errno::EINVAL),
    };
    require(head.flags & !(METHODS | VFIO_DEVICE_FEATURE_MASK) == 0)?;
    let index = (head.flags & VFIO_DEVICE_FEATURE_MASK) as u16;
    Ok(Request::Feature { argsz: head.argsz, feature: Feature { index, access, data } })
}
