//! Fixed structures of the messages, with the layout of `<linux/vfio.h>` where it declares them.

// The structures implement Debug; helper types that zerocopy's derives generate do not.
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
            #[allow(missing_docs)] // The specification documents the fields.
            pub struct $name { $(pub $field: $type,)* }

            const _: () = assert!(size_of::<$name>() == $size);

            impl $name {
                /// Length in bytes.
                pub const SIZE: usize = $size;
            }
        )*
    };
}

wire! {
    /// VERSION, in requests and replies; JSON and a NUL follow.
    Version[4] { major: u16, minor: u16, }
    /// DMA_MAP.
    DmaMap[32] { argsz: u32, flags: u32, offset: u64, address: u64, size: u64, }
    /// DMA_UNMAP, in requests and replies.
    DmaUnmap[24] { argsz: u32, flags: u32, address: u64, size: u64, }
    /// DEVICE_GET_INFO, in requests and replies.
    DeviceInfo[16] { argsz: u32, flags: u32, regions: u32, irqs: u32, }
    /// DEVICE_GET_REGION_INFO, in requests and replies; capabilities follow in replies.
    RegionInfo[32] {
        argsz: u32, flags: u32, index: u32, cap_offset: u32, size: u64, offset: u64,
    }
    /// Header of a region's capability.
    CapHeader[8] { id: u16, version: u16, next: u32, }
    /// Sparse mmap capability; [`SparseArea`]s follow.
    SparseMmap[8] { areas: u32, reserved: u32, }
    /// Mappable area of the sparse mmap capability.
    SparseArea[16] { offset: u64, size: u64, }
    /// DEVICE_GET_REGION_IO_FDS, in requests and replies; [`IoFd`]s follow in replies.
    RegionIoFds[16] { argsz: u32, flags: u32, index: u32, count: u32, }
    /// Ioeventfd in the reply to DEVICE_GET_REGION_IO_FDS.
    IoFd[40] {
        offset: u64, size: u64, fd_index: u32, kind: u32, flags: u32, padding: u32, datamatch: u64,
    }
    /// DEVICE_GET_IRQ_INFO, in requests and replies.
    IrqInfo[16] { argsz: u32, flags: u32, index: u32, count: u32, }
    /// DEVICE_SET_IRQS; a byte per interrupt may follow.
    IrqSet[20] { argsz: u32, flags: u32, index: u32, start: u32, count: u32, }
    /// REGION_READ and REGION_WRITE, in requests and replies; data may follow.
    RegionAccess[16] { offset: u64, region: u32, count: u32, }
    /// Single write of REGION_WRITE_MULTI.
    MultiWrite[24] { offset: u64, region: u32, count: u32, data: [u8; 8], }
    /// DMA_READ and DMA_WRITE, in requests and replies; data may follow.
    DmaAccess[16] { address: u64, count: u64, }
    /// DEVICE_FEATURE, in requests and replies; data may follow.
    Feature[8] { argsz: u32, flags: u32, }
    /// Value of the migration feature.
    Migration[8] { flags: u64, }
    /// Value of the device state feature.
    DeviceState[8] { device_state: u32, data_fd: u32, }
    /// Value of the DMA logging start feature; [`LoggingRange`]s follow.
    LoggingControl[16] { page_size: u64, ranges: u32, reserved: u32, }
    /// Range of DMA logging.
    LoggingRange[16] { address: u64, size: u64, }
    /// Value of the DMA logging report feature, in requests and replies; a bitmap follows in
    /// replies.
    LoggingReport[24] { address: u64, size: u64, page_size: u64, }
    /// Dirty bitmap of DMA_UNMAP, in requests and replies; the bits follow in replies.
    Bitmap[16] { page_size: u64, size: u64, }
    /// MIG_DATA_READ and MIG_DATA_WRITE; data follow in a write and in the reply to a read.
    MigrationData[8] { argsz: u32, size: u32, }
}
