//! Constants of the driver: classes, controls, engines, events, flags and status codes.

/// Classes of objects.
pub mod class {
    /// `NV01_ROOT_CLIENT`.
    pub const CLIENT: u32 = 0x41;
    /// `NV01_DEVICE_0`.
    pub const DEVICE: u32 = 0x80;
    /// `NV20_SUBDEVICE_0`.
    pub const SUBDEVICE: u32 = 0x2080;
    /// `FERMI_VASPACE_A`.
    pub const VA_SPACE: u32 = 0x90f1;
    /// `NV01_MEMORY_VIRTUAL`.
    pub const VIRTUAL: u32 = 0x70;
    /// `NV01_MEMORY_SYSTEM_OS_DESCRIPTOR`.
    pub const OS_DESCRIPTOR: u32 = 0x71;
    /// `NV01_MEMORY_SYSTEM`.
    pub const SYSTEM_MEMORY: u32 = 0x3e;
    /// `NV01_MEMORY_LOCAL_USER`.
    pub const VIDEO_MEMORY: u32 = 0x40;
    /// `NV01_EVENT_OS_EVENT`.
    pub const OS_EVENT: u32 = 0x79;
    /// `KEPLER_CHANNEL_GROUP_A`.
    pub const GROUP: u32 = 0xa06c;
    /// `HOPPER_USERMODE_A`.
    pub const USERMODE: u32 = 0xc661;
    /// `NV_EVENT_BUFFER`.
    pub const EVENT_BUFFER: u32 = 0x90cd;
}

/// Controls.
pub mod control {
    /// `NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2`.
    pub const ID_INFO: u32 = 0x205;
    /// `NV2080_CTRL_CMD_GPU_GET_NAME_STRING`.
    pub const NAME_STRING: u32 = 0x2080_0110;
    /// `NV2080_CTRL_CMD_EVENT_SET_NOTIFICATION`.
    pub const SET_NOTIFICATION: u32 = 0x2080_0301;
    /// `NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS`.
    pub const DISABLE_CHANNELS: u32 = 0x2080_110b;
    /// `NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE`.
    pub const PREEMPTION_MODE: u32 = 0x2080_1210;
    /// `NV2080_CTRL_CMD_GR_FECS_BIND_EVTBUF_FOR_UID`.
    pub const BIND_CTXSW_LOG: u32 = 0x2080_1231;
    /// `NV2080_CTRL_CMD_FB_GET_INFO_V2`.
    pub const FB_INFO: u32 = 0x2080_1303;
    /// `NV2080_CTRL_CMD_PERF_BOOST`.
    pub const PERF_BOOST: u32 = 0x2080_200a;
    /// `NV2080_CTRL_CMD_CE_GET_CE_PCE_MASK`.
    pub const PCE_MASK: u32 = 0x2080_2a02;
    /// `NVA06C_CTRL_CMD_GPFIFO_SCHEDULE`.
    pub const SCHEDULE: u32 = 0xa06c_0101;
    /// `NVA06C_CTRL_CMD_SET_TIMESLICE`.
    pub const SET_TIMESLICE: u32 = 0xa06c_0103;
    /// `NV906F_CTRL_CMD_RESET_CHANNEL`.
    pub const RESET_CHANNEL: u32 = 0x906f_0102;
    /// `NV906F_CTRL_CMD_GET_MMU_FAULT_INFO`.
    pub const MMU_FAULT: u32 = 0x906f_0106;
    /// `NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN`.
    pub const TOKEN: u32 = 0xc36f_0108;
    /// `NV_EVENT_BUFFER_CTRL_CMD_ENABLE_EVENTS`.
    pub const EVENT_BUFFER_ENABLE: u32 = 0x90cd_0101;
    /// `NV_EVENT_BUFFER_CTRL_CMD_UPDATE_GET`.
    pub const EVENT_BUFFER_UPDATE_GET: u32 = 0x90cd_0102;
    /// `NV_EVENT_BUFFER_CTRL_CMD_FLUSH`.
    pub const EVENT_BUFFER_FLUSH: u32 = 0x90cd_0104;
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
    /// `NV01_EVENT_WITHOUT_EVENT_DATA`.
    pub const WITHOUT_DATA: u32 = 0x1000_0000;
    /// Action: notify repeatedly.
    pub const REPEAT: u32 = 2;
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
    /// `NVOS04_FLAGS_DENY_PHYSICAL_MODE_CE`.
    pub const DENY_PHYSICAL: u32 = 1 << 7;
    /// `NVOS04_FLAGS_CHANNEL_DENY_AUTH_LEVEL_PRIV`.
    pub const DENY_PRIVILEGE: u32 = 1 << 22;
    /// `NVOS04_FLAGS_CHANNEL_PBDMA_ACQUIRE_TIMEOUT`.
    pub const ACQUIRE_TIMEOUT: u32 = 1 << 27;
    /// `NV2080_CTRL_PERF_BOOST_FLAGS`: to the maximum, for CUDA, asynchronously.
    pub const BOOST: u32 = 2 | 1 << 4 | 1 << 6;
}

/// Indices of `NV2080_CTRL_FB_INFO`.
pub mod fb {
    /// Video memory for allocations, in KiB.
    pub const HEAP_SIZE: u32 = 0x9;
    /// Free part of the heap, in KiB.
    pub const HEAP_FREE: u32 = 0x16;
    /// Video memory that the CPU can map, in KiB.
    pub const BAR1_SIZE: u32 = 0x5;
}

/// `NV_STATUS`.
pub mod status {
    /// `NV_OK`.
    pub const OK: u32 = 0;
    /// `NV_ERR_GPU_IS_LOST`.
    pub const GPU_IS_LOST: u32 = 0x0f;
    /// `NV_ERR_INSERT_DUPLICATE_NAME`.
    pub const DUPLICATE: u32 = 0x19;
    /// `NV_ERR_INSUFFICIENT_RESOURCES`.
    pub const INSUFFICIENT_RESOURCES: u32 = 0x1a;
    /// `NV_ERR_INSUFFICIENT_PERMISSIONS`.
    pub const INSUFFICIENT_PERMISSIONS: u32 = 0x1b;
    /// `NV_ERR_INVALID_ARGUMENT`.
    pub const INVALID_ARGUMENT: u32 = 0x1f;
    /// `NV_ERR_INVALID_CLASS`.
    pub const INVALID_CLASS: u32 = 0x22;
    /// `NV_ERR_INVALID_CLIENT`.
    pub const INVALID_CLIENT: u32 = 0x23;
    /// `NV_ERR_INVALID_OBJECT_HANDLE`.
    pub const INVALID_OBJECT_HANDLE: u32 = 0x33;
    /// `NV_ERR_INVALID_OBJECT_PARENT`.
    pub const INVALID_OBJECT_PARENT: u32 = 0x36;
    /// `NV_ERR_INVALID_PARAM_STRUCT`.
    pub const INVALID_PARAM_STRUCT: u32 = 0x3a;
    /// `NV_ERR_INVALID_STATE`.
    pub const INVALID_STATE: u32 = 0x40;
    /// `NV_ERR_NO_MEMORY`.
    pub const NO_MEMORY: u32 = 0x51;
    /// `NV_ERR_NOT_SUPPORTED`.
    pub const NOT_SUPPORTED: u32 = 0x56;
    /// `NV_ERR_OBJECT_NOT_FOUND`.
    pub const OBJECT_NOT_FOUND: u32 = 0x57;
}
