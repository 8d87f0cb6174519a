//! The fixed structures of the messages. Where `<linux/vfio.h>` has the structure, this is its layout.

// zerocopy's derives make helper types of their own; every structure here is Debug.
#![allow(missing_debug_implementations)]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! wire {
    ($($(#[$doc:meta])* $name:ident[$size:literal] { $($field:ident: $type:ty,)* })*) => {
        $(
            $(#[$doc])*
            #[derive(
                Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
            )]
            #[repr(C)]
            #[allow(missing_docs)] // The fields are the specification's.
            pub struct $name { $(pub $field: $type,)* }

            const _: () = assert!(size_of::<$name>() == $size);

            impl $name {
                /// Bytes.
                pub const SIZE: usize = $size;
            }
        )*
    };
}

wire! {
    /// VERSION, both ways; JSON and a NUL follow.
    Version[4] { major: u16, minor: u16, }
    /// DMA_MAP.
    DmaMap[32] { argsz: u32, flags: u32, offset: u64, address: u64, size: u64, }
    /// DMA_UNMAP, both ways.
    DmaUnmap[24] { argsz: u32, flags: u32, address: u64, size: u64, }
    /// DEVICE_GET_INFO, both ways.
    DeviceInfo[16] { argsz: u32, flags: u32, regions: u32, irqs: u32, }
    /// DEVICE_GET_REGION_INFO, both ways; capabilities follow a reply.
    RegionInfo[32] {
        argsz: u32, flags: u32, index: u32, cap_offset: u32, size: u64, offset: u64,
    }
    /// The beginning of a region's capability.
    CapHeader[8] { id: u16, version: u16, next: u32, }
    /// The capability "only these areas may be mapped"; [`SparseArea`]s follow.
    SparseMmap[8] { areas: u32, reserved: u32, }
    /// One area that may be mapped.
    SparseArea[16] { offset: u64, size: u64, }
    /// DEVICE_GET_REGION_IO_FDS, both ways; [`IoFd`]s follow a reply.
    RegionIoFds[16] { argsz: u32, flags: u32, index: u32, count: u32, }
    /// A place whose writes come as signals.
    IoFd[40] {
        offset: u64, size: u64, fd_index: u32, kind: u32, flags: u32, padding: u32, datamatch: u64,
    }
    /// DEVICE_GET_IRQ_INFO, both ways.
    IrqInfo[16] { argsz: u32, flags: u32, index: u32, count: u32, }
    /// DEVICE_SET_IRQS; one byte for each interrupt may follow.
    IrqSet[20] { argsz: u32, flags: u32, index: u32, start: u32, count: u32, }
    /// REGION_READ and REGION_WRITE, both ways; data follow.
    RegionAccess[16] { offset: u64, region: u32, count: u32, }
    /// One write of REGION_WRITE_MULTI.
    MultiWrite[24] { offset: u64, region: u32, count: u32, data: [u8; 8], }
    /// DMA_READ and DMA_WRITE, both ways; data follow.
    DmaAccess[16] { address: u64, count: u64, }
    /// DEVICE_FEATURE, both ways; data follow.
    Feature[8] { argsz: u32, flags: u32, }
    /// The value of the migration feature.
    Migration[8] { flags: u64, }
    /// The value of the device state feature.
    DeviceState[8] { device_state: u32, data_fd: u32, }
    /// The value of "start DMA logging"; [`LoggingRange`]s follow.
    LoggingControl[16] { page_size: u64, ranges: u32, reserved: u32, }
    /// One range to log.
    LoggingRange[16] { address: u64, size: u64, }
    /// The value of "report logged DMA", both ways; a bitmap follows a reply.
    LoggingReport[24] { address: u64, size: u64, page_size: u64, }
    /// In DMA_UNMAP, both ways; a bitmap follows a reply.
    Bitmap[16] { page_size: u64, size: u64, }
    /// MIG_DATA_READ and MIG_DATA_WRITE; data follow what has them.
    MigrationData[8] { argsz: u32, size: u32, }
}
