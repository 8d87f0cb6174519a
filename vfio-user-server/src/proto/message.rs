//! Requests: what follows the header, decoded into types.
//!
//! Decoding checks all that can be known from the message alone: sizes, flags, and ranges that would overflow.

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FEATURE_GET, VFIO_DEVICE_FEATURE_MASK, VFIO_DEVICE_FEATURE_PROBE,
    VFIO_DEVICE_FEATURE_SET, VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE,
    VFIO_DMA_UNMAP_FLAG_ALL, VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP, VFIO_IRQ_SET_ACTION_MASK,
    VFIO_IRQ_SET_ACTION_TRIGGER, VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_BOOL,
    VFIO_IRQ_SET_DATA_EVENTFD, VFIO_IRQ_SET_DATA_NONE,
};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::dma::DmaUnmap;
use crate::errno::Errno;
use crate::irq::IrqAction;
use crate::migration::DirtyPages;
use crate::proto::header::{Command, MAX_DATA};
use crate::proto::wire;

/// Pages that DMA maps are made of.
pub const DMA_PAGE: u64 = 4096;

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// VERSION.
    Version {
        /// The protocol's version, which must be ours.
        major: u16,
        /// Its revision.
        minor: u16,
        /// [Capabilities](crate::proto::caps::Capabilities), to be decoded.
        data: &'a [u8],
    },
    /// DMA_MAP; a descriptor may come with it.
    DmaMap {
        /// Where the device sees the memory.
        address: u64,
        /// Bytes.
        size: u64,
        /// Where it is in the file.
        offset: u64,
        /// The device may read it.
        readable: bool,
        /// The device may write it.
        writable: bool,
    },
    /// DMA_UNMAP.
    DmaUnmap(DmaUnmap),
    /// DMA_UNMAP of one range, with the wish to know what of it was written.
    DmaUnmapDirty {
        /// Where the device saw it.
        address: u64,
        /// Bytes.
        size: u64,
        /// Bytes for each bit, a power of two.
        page_size: u64,
        /// Bytes of the bitmap, enough and at most [`MAX_DATA`].
        bitmap: u32,
    },
    /// DEVICE_GET_INFO.
    GetInfo,
    /// DEVICE_GET_REGION_INFO.
    GetRegionInfo {
        /// Which region.
        index: u32,
        /// Room that the client has for the reply.
        argsz: u32,
    },
    /// DEVICE_GET_REGION_IO_FDS.
    GetRegionIoFds {
        /// Which region.
        index: u32,
        /// Room that the client has for the reply.
        argsz: u32,
    },
    /// DEVICE_GET_IRQ_INFO.
    GetIrqInfo {
        /// Which interrupts.
        index: u32,
    },
    /// DEVICE_SET_IRQS.
    SetIrqs(SetIrqs<'a>),
    /// REGION_READ.
    RegionRead(Access),
    /// REGION_WRITE, with as many bytes as its count says.
    RegionWrite(Access, &'a [u8]),
    /// REGION_WRITE_MULTI.
    RegionWriteMulti(MultiWrites<'a>),
    /// DEVICE_RESET.
    Reset,
    /// DEVICE_FEATURE.
    Feature {
        /// Room that the client has for the reply.
        argsz: u32,
        /// The rest of it.
        feature: Feature<'a>,
    },
    /// MIG_DATA_READ of so many bytes, at most [`MAX_DATA`].
    MigDataRead(u32),
    /// MIG_DATA_WRITE.
    MigDataWrite(&'a [u8]),
}

/// A place in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Which region.
    pub region: u32,
    /// Where in it.
    pub offset: u64,
    /// Bytes, at most [`MAX_DATA`].
    pub count: u32,
}

/// DEVICE_SET_IRQS. `start + count` does not overflow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetIrqs<'a> {
    /// Which interrupts.
    pub index: u32,
    /// The first of them.
    pub start: u32,
    /// How many; 0 only to turn all off.
    pub count: u32,
    /// What event it is about.
    pub action: IrqAction,
    /// What comes along.
    pub data: IrqData<'a>,
}

/// What comes along with DEVICE_SET_IRQS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IrqData<'a> {
    /// Nothing: do it to all of them.
    None,
    /// One byte for each: do it where it is not 0.
    Bool(&'a [u8]),
    /// Descriptors, outside of the message's bytes.
    EventFd,
}

/// The writes of REGION_WRITE_MULTI.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MultiWrites<'a>(&'a [u8]);

impl<'a> MultiWrites<'a> {
    /// How many.
    pub const fn len(&self) -> usize {
        self.0.len() / wire::MultiWrite::SIZE
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Each write, in order; an error for one that is longer than 8 bytes.
    pub fn iter(&self) -> impl Iterator<Item = Result<(Access, &'a [u8]), Errno>> + use<'a> {
        self.0.chunks_exact(wire::MultiWrite::SIZE).map(|bytes| {
            let (write, _) =
                wire::RegionAccess::read_from_prefix(bytes).map_err(|_| Errno::EINVAL)?;
            let data = bytes[wire::RegionAccess::SIZE..].get(..write.count as usize);
            Ok((access(write)?, data.ok_or(Errno::EINVAL)?))
        })
    }
}

/// An optional feature that is probed, read or set (`VFIO_DEVICE_FEATURE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature<'a> {
    /// Which feature.
    pub index: u16,
    /// What is wanted of it.
    pub access: FeatureAccess,
    /// What came with the request: the value for a set, arguments for a get.
    pub data: &'a [u8],
}

/// What is wanted of a [`Feature`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureAccess {
    /// Its value.
    Get,
    /// That it takes a value.
    Set,
    /// Whether it is there, with these methods.
    Probe {
        /// Can it be read?
        get: bool,
        /// Can it be set?
        set: bool,
    },
}

fn split<T: FromBytes + Immutable + KnownLayout>(payload: &[u8]) -> Result<(T, &[u8]), Errno> {
    T::read_from_prefix(payload).map_err(|_| Errno::EINVAL)
}

fn require(condition: bool) -> Result<(), Errno> {
    if condition { Ok(()) } else { Err(Errno::EINVAL) }
}

fn access(raw: wire::RegionAccess) -> Result<Access, Errno> {
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

impl<'a> Request<'a> {
    /// Decodes what follows the header of a request.
    ///
    /// Bytes after a structure of fixed length are ignored, as a later version may have them; counted data must be
    /// exactly as long as the count says.
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

    /// Its command.
    pub const fn command(&self) -> Command {
        match self {
            Self::Version { .. } => Command::Version,
            Self::DmaMap { .. } => Command::DmaMap,
            Self::DmaUnmap(_) | Self::DmaUnmapDirty { .. } => Command::DmaUnmap,
            Self::GetInfo => Command::GetInfo,
            Self::GetRegionInfo { .. } => Command::GetRegionInfo,
            Self::GetRegionIoFds { .. } => Command::GetRegionIoFds,
            Self::GetIrqInfo { .. } => Command::GetIrqInfo,
            Self::SetIrqs(_) => Command::SetIrqs,
            Self::RegionRead(_) => Command::RegionRead,
            Self::RegionWrite(..) => Command::RegionWrite,
            Self::RegionWriteMulti(_) => Command::RegionWriteMulti,
            Self::Reset => Command::Reset,
            Self::Feature { .. } => Command::Feature,
            Self::MigDataRead(_) => Command::MigDataRead,
            Self::MigDataWrite(_) => Command::MigDataWrite,
        }
    }

    /// Appends what follows the header: the opposite of [`Self::decode`].
    pub fn encode(&self, out: &mut Vec<u8>) {
        let mut put = |fixed: &[u8], data: &[u8]| {
            out.extend_from_slice(fixed);
            out.extend_from_slice(data);
        };
        match *self {
            Self::Version { major, minor, data } => {
                put(wire::Version { major, minor }.as_bytes(), data);
            }
            Self::DmaMap { address, size, offset, readable, writable } => {
                let flags = if readable { VFIO_DMA_MAP_FLAG_READ } else { 0 }
                    | if writable { VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
                let argsz = wire::DmaMap::SIZE as u32;
                put(wire::DmaMap { argsz, flags, offset, address, size }.as_bytes(), &[]);
            }
            Self::DmaUnmap(unmap) => {
                let (flags, address, size) = match unmap {
                    DmaUnmap::Range { address, size } => (0, address, size),
                    DmaUnmap::All => (VFIO_DMA_UNMAP_FLAG_ALL, 0, 0),
                };
                let argsz = wire::DmaUnmap::SIZE as u32;
                put(wire::DmaUnmap { argsz, flags, address, size }.as_bytes(), &[]);
            }
            Self::DmaUnmapDirty { address, size, page_size, bitmap } => {
                let argsz = (wire::DmaUnmap::SIZE + wire::Bitmap::SIZE) as u32 + bitmap;
                let flags = VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP;
                put(
                    wire::DmaUnmap { argsz, flags, address, size }.as_bytes(),
                    wire::Bitmap { page_size, size: bitmap.into() }.as_bytes(),
                );
            }
            Self::GetInfo => {
                let argsz = wire::DeviceInfo::SIZE as u32;
                put(wire::DeviceInfo { argsz, ..Default::default() }.as_bytes(), &[]);
            }
            Self::GetRegionInfo { index, argsz } => {
                put(wire::RegionInfo { argsz, index, ..Default::default() }.as_bytes(), &[]);
            }
            Self::GetRegionIoFds { index, argsz } => {
                put(wire::RegionIoFds { argsz, index, ..Default::default() }.as_bytes(), &[]);
            }
            Self::GetIrqInfo { index } => {
                let argsz = wire::IrqInfo::SIZE as u32;
                put(wire::IrqInfo { argsz, index, ..Default::default() }.as_bytes(), &[]);
            }
            Self::SetIrqs(SetIrqs { index, start, count, action, data }) => {
                let (kind, bytes) = match data {
                    IrqData::None => (VFIO_IRQ_SET_DATA_NONE, &[][..]),
                    IrqData::Bool(bytes) => (VFIO_IRQ_SET_DATA_BOOL, bytes),
                    IrqData::EventFd => (VFIO_IRQ_SET_DATA_EVENTFD, &[][..]),
                };
                let flags = kind
                    | match action {
                        IrqAction::Mask => VFIO_IRQ_SET_ACTION_MASK,
                        IrqAction::Unmask => VFIO_IRQ_SET_ACTION_UNMASK,
                        IrqAction::Trigger => VFIO_IRQ_SET_ACTION_TRIGGER,
                    };
                let argsz = (wire::IrqSet::SIZE + bytes.len()) as u32;
                put(wire::IrqSet { argsz, flags, index, start, count }.as_bytes(), bytes);
            }
            Self::RegionRead(access) => put(access.wire().as_bytes(), &[]),
            Self::RegionWrite(access, data) => put(access.wire().as_bytes(), data),
            Self::RegionWriteMulti(writes) => put(&(writes.len() as u64).to_ne_bytes(), writes.0),
            Self::Reset => {}
            Self::Feature { argsz, feature: Feature { index, access, data } } => {
                let (probe, get, set) = match access {
                    FeatureAccess::Get => (false, true, false),
                    FeatureAccess::Set => (false, false, true),
                    FeatureAccess::Probe { get, set } => (true, get, set),
                };
                let flags = u32::from(index)
                    | if probe { VFIO_DEVICE_FEATURE_PROBE } else { 0 }
                    | if get { VFIO_DEVICE_FEATURE_GET } else { 0 }
                    | if set { VFIO_DEVICE_FEATURE_SET } else { 0 };
                put(wire::Feature { argsz, flags }.as_bytes(), data);
            }
            Self::MigDataRead(size) => {
                let argsz = wire::MigrationData::SIZE as u32 + size;
                put(wire::MigrationData { argsz, size }.as_bytes(), &[]);
            }
            Self::MigDataWrite(data) => {
                let (argsz, size) = (wire::MigrationData::SIZE as u32, data.len() as u32);
                put(wire::MigrationData { argsz, size }.as_bytes(), data);
            }
        }
    }
}

impl Access {
    /// As it goes over the wire, in requests and replies alike.
    pub const fn wire(&self) -> wire::RegionAccess {
        wire::RegionAccess { offset: self.offset, region: self.region, count: self.count }
    }
}
