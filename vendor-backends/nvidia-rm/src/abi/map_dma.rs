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

call!(MapDma, 0x57, "RM_MAP_MEMORY_DMA");
call!(MapDma570, MapDma::NUMBER, MapDma::NAME);
call!(UnmapDma, 0x58, "RM_UNMAP_MEMORY_DMA");

impl From<MapDma> for MapDma570 {
    fn from(map: MapDma) -> Self {
        let MapDma { client, device, dma, memory, offset, length, flags, va, status, .. } = map;
        Self { client, device, dma, memory, offset, length, flags, pad0: 0, va, status, pad1: 0 }
    }
}

impl From<MapDma570> for MapDma {
    fn from(map: MapDma570) -> Self {
        let MapDma570 { client, device, dma, memory, offset, length, flags, va, status, .. } = map;
        let (flags2, kind) = (0, 0);
        Self {
            client,
            device,
            dma,
            memory,
            offset,
            length,
            flags,
            flags2,
            kind,
            pad0: 0,
            va,
            status,
            pad1: 0,
        }
    }
}
