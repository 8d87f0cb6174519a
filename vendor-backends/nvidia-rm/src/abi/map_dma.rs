//! Mapping of memory at GPU virtual addresses.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::Call;

structures! {
    /// `NVOS46_PARAMETERS` since series 580.
    MapDma {
        client: u32, device: u32, dma: u32, memory: u32, offset: u64, length: u64, flags: u32,
        flags2: u32, kind: u32, pad0: u32, va: u64, status: u32, pad1: u32,
    }

    /// `NVOS46_PARAMETERS` before series 580.
    MapDma570 {
        client: u32, device: u32, dma: u32, memory: u32, offset: u64, length: u64, flags: u32,
        pad0: u32, va: u64, status: u32, pad1: u32,
    }

    /// `NVOS47_PARAMETERS`: unmaps `size` bytes at a GPU virtual address, or with size 0 the
    /// mapping that begins there.
    UnmapDma {
        client: u32, device: u32, dma: u32, memory: u32, flags: u32, pad0: u32, va: u64, size: u64,
        status: u32, pad1: u32,
    }
}

/// Fields that all forms of `NVOS46_PARAMETERS` have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs, reason = "fields are named after the driver's")]
pub struct DmaMapping {
    pub client: u32,
    pub device: u32,
    pub dma: u32,
    pub memory: u32,
    pub offset: u64,
    pub length: u64,
    pub flags: u32,
    pub va: u64,
}

/// Form of `NVOS46_PARAMETERS`.
pub trait MapDmaForm: Call {
    /// Returns the argument that requests `mapping`.
    fn new(mapping: &DmaMapping) -> Self;

    /// Returns the mapping that is requested or, after the call, was made.
    fn mapping(&self) -> DmaMapping;

    /// Sets the status, as the driver does.
    fn set_status(&mut self, status: u32);
}

macro_rules! map_dma_form {
    ($name:ident) => {
        call!($name, 0x57, "RM_MAP_MEMORY_DMA");

        impl MapDmaForm for $name {
            fn new(mapping: &DmaMapping) -> Self {
                let DmaMapping { client, device, dma, memory, offset, length, flags, va } =
                    *mapping;
                Self { client, device, dma, memory, offset, length, flags, va, ..Self::default() }
            }

            fn mapping(&self) -> DmaMapping {
                let Self { client, device, dma, memory, offset, length, flags, va, .. } = *self;
                DmaMapping { client, device, dma, memory, offset, length, flags, va }
            }

            fn set_status(&mut self, status: u32) {
                self.status = status;
            }
        }
    };
}

map_dma_form!(MapDma);

map_dma_form!(MapDma570);

call!(UnmapDma, 0x58, "RM_UNMAP_MEMORY_DMA");
