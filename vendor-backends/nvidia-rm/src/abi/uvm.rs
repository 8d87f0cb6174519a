//! Arguments of nvidia-uvm's ioctls (`uvm_ioctl.h`).

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Number of GPUs for which an argument has attributes (`UVM_MAX_GPUS`).
pub const MAX_GPUS: usize = 256;

structures! {
    /// `UVM_INITIALIZE_PARAMS`.
    Initialize { flags: u64, status: u32, pad0: u32 }

    /// `UVM_CREATE_RANGE_GROUP_PARAMS` and `UVM_DESTROY_RANGE_GROUP_PARAMS`.
    CreateRangeGroup { group: u64, status: u32, pad0: u32 }

    /// `UVM_REGISTER_GPU_VASPACE_PARAMS`.
    RegisterSpace { gpu: [u8; 16], control: i32, client: u32, space: u32, status: u32 }

    /// Arguments that name a GPU only.
    Gpu { gpu: [u8; 16], status: u32 }

    /// `UVM_REGISTER_CHANNEL_PARAMS`.
    RegisterChannel {
        gpu: [u8; 16], control: i32, client: u32, channel: u32, pad0: u32, base: u64, length: u64,
        status: u32, pad1: u32,
    }

    /// `UVM_UNREGISTER_CHANNEL_PARAMS` since series 590.
    UnregisterChannel590 { client: u32, channel: u32, status: u32 }

    /// `UVM_UNREGISTER_CHANNEL_PARAMS` before series 590.
    UnregisterChannel { gpu: [u8; 16], client: u32, channel: u32, status: u32 }

    /// `UVM_DISABLE_PEER_ACCESS_PARAMS`.
    DisablePeerAccess { gpus: [[u8; 16]; 2], status: u32 }

    /// `UVM_SET_RANGE_GROUP_PARAMS`.
    SetRangeGroup { group: u64, base: u64, length: u64, status: u32, pad0: u32 }

    /// `UvmGpuMappingAttributes`.
    GpuAttributes {
        gpu: [u8; 16], mapping: u32, caching: u32, format: u32, element_bits: u32, compression: u32,
    }

    /// `UVM_MAP_EXTERNAL_ALLOCATION_PARAMS`.
    MapExternal {
        base: u64, length: u64, offset: u64, attributes: [GpuAttributes; MAX_GPUS], count: u64,
        control: i32, client: u32, memory: u32, status: u32,
    }

    /// Arguments that name a range only, and `UVM_FREE_PARAMS` before series 590.
    Range { base: u64, length: u64, status: u32, pad0: u32 }

    /// `UVM_FREE_PARAMS` since series 590.
    Free590 { base: u64, status: u32, pad0: u32 }

    /// Arguments that name a range and a GPU.
    GpuRange { base: u64, length: u64, gpu: [u8; 16], status: u32, pad0: u32 }

    /// `UVM_REGISTER_GPU_PARAMS`.
    RegisterGpu {
        gpu: [u8; 16], is_numa_node: u8, pad0: [u8; 3], numa_node: i32, control: i32, client: u32,
        partition: u32, status: u32,
    }

    /// `UVM_PAGEABLE_MEM_ACCESS_PARAMS`.
    PageableMemAccess { access: u8, pad0: [u8; 3], status: u32 }

    /// `UVM_PAGEABLE_MEM_ACCESS_ON_GPU_PARAMS`.
    PageableMemAccessOnGpu { gpu: [u8; 16], access: u8, pad0: [u8; 3], status: u32 }

    /// `UVM_SET_PREFERRED_LOCATION_PARAMS`.
    SetPreferredLocation {
        base: u64, length: u64, processor: [u8; 16], numa_node: i32, status: u32,
    }

    /// `UVM_MIGRATE_PARAMS`.
    Migrate {
        base: u64, length: u64, processor: [u8; 16], flags: u32, pad0: u32, semaphore: u64,
        payload: u32, numa_node: i32, rest_start: u64, rest_length: u64, status: u32, pad1: u32,
    }

    /// `UVM_ALLOC_SEMAPHORE_POOL_PARAMS`.
    AllocSemaphorePool {
        base: u64, length: u64, attributes: [GpuAttributes; MAX_GPUS], count: u64, status: u32,
        pad0: u32,
    }

    /// `UVM_MM_INITIALIZE_PARAMS`.
    MmInitialize { uvm: i32, status: u32 }
}
