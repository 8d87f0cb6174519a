//! Encoding of request payloads.

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FEATURE_GET, VFIO_DEVICE_FEATURE_PROBE, VFIO_DEVICE_FEATURE_SET,
    VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, VFIO_DMA_UNMAP_FLAG_ALL,
    VFIO_DMA_UNMAP_FLAG_GET_DIRTY_BITMAP, VFIO_IRQ_SET_ACTION_MASK, VFIO_IRQ_SET_ACTION_TRIGGER,
    VFIO_IRQ_SET_ACTION_UNMASK, VFIO_IRQ_SET_DATA_BOOL, VFIO_IRQ_SET_DATA_EVENTFD,
    VFIO_IRQ_SET_DATA_NONE,
};
use zerocopy::IntoBytes;

use super::{Feature, FeatureAccess, IrqData, Request, SetIrqs};
use crate::dma::DmaUnmap;
use crate::irq::IrqAction;
use crate::proto::wire;

impl Request<'_> {
    /// Appends the payload of the request to `out`. The opposite of [`Self::decode`].
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
            Self::SetIrqs(set) => put(irq_set(set).as_bytes(), irq_data(set.data)),
            Self::RegionRead(access) => put(access.wire().as_bytes(), &[]),
            Self::RegionWrite(access, data) => put(access.wire().as_bytes(), data),
            Self::RegionWriteMulti(writes) => put(&(writes.len() as u64).to_ne_bytes(), writes.0),
            Self::Reset => {}
            Self::Feature { argsz, feature } => {
                let flags = feature_flags(feature);
                put(wire::Feature { argsz, flags }.as_bytes(), feature.data);
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

fn irq_set(set: SetIrqs<'_>) -> wire::IrqSet {
    let SetIrqs { index, start, count, action, data } = set;
    let kind = match data {
        IrqData::None => VFIO_IRQ_SET_DATA_NONE,
        IrqData::Bool(_) => VFIO_IRQ_SET_DATA_BOOL,
        IrqData::EventFd => VFIO_IRQ_SET_DATA_EVENTFD,
    };
    let action = match action {
        IrqAction::Mask => VFIO_IRQ_SET_ACTION_MASK,
        IrqAction::Unmask => VFIO_IRQ_SET_ACTION_UNMASK,
        IrqAction::Trigger => VFIO_IRQ_SET_ACTION_TRIGGER,
    };
    let argsz = (wire::IrqSet::SIZE + irq_data(data).len()) as u32;
    wire::IrqSet { argsz, flags: kind | action, index, start, count }
}

fn irq_data(data: IrqData<'_>) -> &[u8] {
    match data {
        IrqData::None | IrqData::EventFd => &[],
        IrqData::Bool(bytes) => bytes,
    }
}

fn feature_flags(feature: Feature<'_>) -> u32 {
    let (probe, get, set) = match feature.access {
        FeatureAccess::Get => (false, true, false),
        FeatureAccess::Set => (false, false, true),
        FeatureAccess::Probe { get, set } => (true, get, set),
    };
    u32::from(feature.index)
        | if probe { VFIO_DEVICE_FEATURE_PROBE } else { 0 }
        | if get { VFIO_DEVICE_FEATURE_GET } else { 0 }
        | if set { VFIO_DEVICE_FEATURE_SET } else { 0 }
}
