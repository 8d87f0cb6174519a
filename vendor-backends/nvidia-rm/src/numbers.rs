//! Constants of the driver: classes, controls, engines, events, flags and status codes.

/// Defines constants with the names of the driver's headers, which a test compares.
macro_rules! numbers {
    ($($number:literal $name:ident as $short:ident;)*) => {
        $(
            #[doc = concat!("`", stringify!($name), "`.")]
            pub const $short: u32 = $number;
        )*

        /// Numbers and names of the constants.
        pub static NUMBERS: &[(u32, &str)] = &[$(($number, stringify!($name))),*];
    };
}

/// Classes of objects: those of [`classes`](crate::classes), and those that only the host uses.
pub mod class {
    pub use crate::classes::*;

    numbers! {
        0x70 NV01_MEMORY_VIRTUAL as VIRTUAL;
        0x71 NV01_MEMORY_SYSTEM_OS_DESCRIPTOR as OS_DESCRIPTOR;
        0x90cd NV_EVENT_BUFFER as EVENT_BUFFER;
    }
}

/// Controls: those of [`controls`](crate::controls), and those that only the host uses.
pub mod control {
    pub use crate::controls::*;

    numbers! {
        0x2080_0301 NV2080_CTRL_CMD_EVENT_SET_NOTIFICATION as SET_NOTIFICATION;
        0x2080_110b NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS as DISABLE_CHANNELS;
        0x2080_1231 NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID as BIND_CTXSW_LOG;
        0x2080_2096 NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2 as UTILIZATION_SAMPLES;
        0x2080_2a02 NV2080_CTRL_CMD_CE_GET_CE_PCE_MASK as PCE_MASK;
        0x2080_2a03 NV2080_CTRL_CMD_CE_GET_CAPS_V2 as COPY_ENGINE_CAPS;
        0x906f_0106 NV906F_CTRL_CMD_GET_MMU_FAULT_INFO as MMU_FAULT;
        0x90cd_0101 NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS as EVENT_BUFFER_ENABLE;
        0x90cd_0102 NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET as EVENT_BUFFER_UPDATE_GET;
        0x90cd_0104 NV_EVENT_BUFFER_CTRL_CMD_FLUSH as EVENT_BUFFER_FLUSH;
    }
}

/// Engines, as `NV2080_ENGINE_TYPE_*`.
pub mod engine {
    /// Graphics and compute.
    pub const GRAPHICS: u32 = 1;
    /// The first copy engine; the others follow.
    pub const COPY0: u32 = 9;
    /// Number of consecutive copy engines.
    pub const COPY_ENGINES: u32 = 10;
}

/// Events, as `NV2080_NOTIFIERS_*`.
pub mod event {
    /// A channel was torn down after an error.
    pub const RC_ERROR: u32 = 37;
    /// A channel raised a non-stall interrupt.
    pub const FIFO_EVENT_METHOD: u32 = 35;
    /// `NV01_EVENT_NONSTALL_INTR`.
    pub const NON_STALL: u32 = 0x0800_0000;
    /// `NV01_EVENT_SUBDEVICE_SPECIFIC`.
    pub const SUBDEVICE_SPECIFIC: u32 = 0x2000_0000;
    /// `NV01_EVENT_WITHOUT_EVENT_DATA`.
    pub const WITHOUT_DATA: u32 = 0x1000_0000;
    /// Mask of the notifier's number.
    pub const INDEX: u32 = 0xffff;
    /// Action: notify repeatedly.
    pub const REPEAT: u32 = 2;
}

/// Parameters of [`control::PREEMPTION_MODE`] (`NV2080_CTRL_SET_CTXSW_PREEMPTION_MODE_*`).
pub mod preemption {
    /// `FLAGS_CILP_SET`: the mode of compute is set.
    pub const SET_COMPUTE: u32 = 1;
    /// `COMPUTE_CTA`: between thread blocks.
    pub const BLOCKS: u32 = 1;
    /// `COMPUTE_CILP`: between instructions.
    pub const INSTRUCTIONS: u32 = 2;
}

/// Flags of memory and mappings.
pub mod flag {
    /// `NVOS02_FLAGS`: noncontiguous pages, cached by the CPU, without a mapping in the kernel.
    pub const OS_DESCRIPTOR: u32 = 1 << 4 | 1 << 12 | 1 << 30;
    /// `NVOS46_FLAGS_DMA_OFFSET_FIXED`.
    pub const FIXED_VA: u32 = 1 << 15;
    /// `NVOS46_FLAGS_PAGE_SIZE_4KB`.
    pub const PAGE_4K: u32 = 1 << 8;
    /// `NVOS46_FLAGS_CACHE_SNOOP`.
    pub const SNOOP: u32 = 1 << 4;
    /// `NVOS46_FLAGS_GPU_CACHEABLE_YES`.
    pub const GPU_CACHES: u32 = 1 << 17;
    /// `NVOS46_FLAGS_PAGE_KIND_OVERRIDE_YES`.
    pub const KIND_OVERRIDE: u32 = 1 << 19;
    /// `NV_MMU_PTE_KIND_SMSKED_MESSAGE`.
    pub const KIND_LAUNCH_REGION: u32 = 0xf;
    /// `NVOS46_FLAGS_ACCESS_READ_ONLY`.
    pub const READ_ONLY: u32 = 1;
    /// `NVOS33_FLAGS_ACCESS_READ_ONLY`.
    pub const CPU_READ_ONLY: u32 = 1;
    /// `NVOS32_ALLOC_FLAGS`: handle provided, mapping on demand, forced alignment, bank placement
    /// ignored.
    pub const MEMORY: u32 = 0x8000 | 0x4000 | 0x100 | 0x1;
    /// `NVOS32_ALLOC_FLAGS_PERSISTENT_VIDMEM`.
    pub const PERSISTENT: u32 = 0x1_0000;
    /// `NVOS04_FLAGS`: no physical copies, no privilege, and a timeout for semaphore acquires.
    pub const CHANNEL: u32 = DENY_PHYSICAL | DENY_PRIVILEGE | ACQUIRE_TIMEOUT;
    /// The same for channels of programs, which wait in semaphore acquires for as long as other
    /// channels work.
    pub const PROGRAM_CHANNEL: u32 = DENY_PHYSICAL | DENY_PRIVILEGE;
    /// `NVOS04_FLAGS_GROUP_CHANNEL_RUNQUEUE_ONE`.
    pub const SECOND_RUNQUEUE: u32 = 1 << 4;
    /// `NV_CTXSHARE_ALLOCATION_FLAGS_SUBCONTEXT_ASYNC`.
    pub const ASYNC_SUBCONTEXT: u32 = 1;
    /// `NVOS04_FLAGS_DENY_PHYSICAL_MODE_CE`.
    pub const DENY_PHYSICAL: u32 = 1 << 7;
    /// `NVOS04_FLAGS_CHANNEL_DENY_AUTH_LEVEL_PRIV`.
    pub const DENY_PRIVILEGE: u32 = 1 << 22;
    /// `NVOS04_FLAGS_CHANNEL_PBDMA_ACQUIRE_TIMEOUT`.
    pub const ACQUIRE_TIMEOUT: u32 = 1 << 27;
    /// `NV2080_CTRL_PERF_BOOST_FLAGS`: to the maximum, for CUDA, with high priority.
    pub const BOOST: u32 = 2 | 1 << 4 | 1 << 6;
    /// `NV2080_CTRL_PERF_BOOST_FLAGS`: to the maximum, for CUDA, as libcuda asks.
    pub const BOOST_FOR_CUDA: u32 = 2 | 1 << 4;
    /// `NV2080_CTRL_PERF_BOOST_FLAGS`: ends the client's boost.
    pub const BOOST_CLEAR: u32 = 1 << 4;
    /// `NV2080_CTRL_PERF_BOOST_DURATION_INFINITE`.
    pub const BOOST_WITHOUT_END: u32 = u32::MAX;
}

/// Indices of `NV2080_CTRL_FB_INFO`. Sizes are in KiB.
pub mod fb {
    numbers! {
        0x5 NV2080_CTRL_FB_INFO_INDEX_BAR1_SIZE as BAR1_SIZE;
        0x7 NV2080_CTRL_FB_INFO_INDEX_RAM_SIZE as RAM_SIZE;
        0x8 NV2080_CTRL_FB_INFO_INDEX_TOTAL_RAM_SIZE as TOTAL_RAM_SIZE;
        0x9 NV2080_CTRL_FB_INFO_INDEX_HEAP_SIZE as HEAP_SIZE;
        0x16 NV2080_CTRL_FB_INFO_INDEX_HEAP_FREE as HEAP_FREE;
    }
}

/// `NV_STATUS`.
pub mod status {
    numbers! {
        0 NV_OK as OK;
        0x0f NV_ERR_GPU_IS_LOST as GPU_IS_LOST;
        0x19 NV_ERR_INSERT_DUPLICATE_NAME as DUPLICATE;
        0x1a NV_ERR_INSUFFICIENT_RESOURCES as INSUFFICIENT_RESOURCES;
        0x1b NV_ERR_INSUFFICIENT_PERMISSIONS as INSUFFICIENT_PERMISSIONS;
        0x1e NV_ERR_INVALID_ADDRESS as INVALID_ADDRESS;
        0x1f NV_ERR_INVALID_ARGUMENT as INVALID_ARGUMENT;
        0x22 NV_ERR_INVALID_CLASS as INVALID_CLASS;
        0x23 NV_ERR_INVALID_CLIENT as INVALID_CLIENT;
        0x33 NV_ERR_INVALID_OBJECT_HANDLE as INVALID_OBJECT_HANDLE;
        0x36 NV_ERR_INVALID_OBJECT_PARENT as INVALID_OBJECT_PARENT;
        0x3a NV_ERR_INVALID_PARAM_STRUCT as INVALID_PARAM_STRUCT;
        0x40 NV_ERR_INVALID_STATE as INVALID_STATE;
        0x51 NV_ERR_NO_MEMORY as NO_MEMORY;
        0x56 NV_ERR_NOT_SUPPORTED as NOT_SUPPORTED;
        0x57 NV_ERR_OBJECT_NOT_FOUND as OBJECT_NOT_FOUND;
    }
}
