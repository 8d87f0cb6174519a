//! Constants of the driver: classes, controls, engines, events, flags and status codes.

/// Numbers of ioctls (`NV_ESC_*`).
pub mod escape {
    /// `NV_ESC_RM_ALLOC_MEMORY`.
    pub const ALLOC_MEMORY: u32 = 0x27;
    /// `NV_ESC_RM_FREE`.
    pub const FREE: u32 = 0x29;
    /// `NV_ESC_RM_CONTROL`.
    pub const CONTROL: u32 = 0x2a;
    /// `NV_ESC_RM_ALLOC`.
    pub const ALLOC: u32 = 0x2b;
    /// `NV_ESC_RM_DUP_OBJECT`.
    pub const DUP_OBJECT: u32 = 0x34;
    /// `NV_ESC_RM_SHARE`.
    pub const SHARE: u32 = 0x35;
    /// `NV_ESC_RM_MAP_MEMORY`.
    pub const MAP_MEMORY: u32 = 0x4e;
    /// `NV_ESC_RM_UNMAP_MEMORY`.
    pub const UNMAP_MEMORY: u32 = 0x4f;
    /// `NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO`.
    pub const UPDATE_MAPPING: u32 = 0x5e;
    /// `NV_ESC_CARD_INFO`.
    pub const CARD_INFO: u32 = 0xc8;
    /// `NV_ESC_REGISTER_FD`.
    pub const REGISTER_FD: u32 = 0xc9;
    /// `NV_ESC_ALLOC_OS_EVENT`.
    pub const ALLOC_OS_EVENT: u32 = 0xce;
    /// `NV_ESC_FREE_OS_EVENT`.
    pub const FREE_OS_EVENT: u32 = 0xcf;
    /// `NV_ESC_CHECK_VERSION_STR`.
    pub const CHECK_VERSION: u32 = 0xd2;
    /// `NV_ESC_ATTACH_GPUS_TO_FD`.
    pub const ATTACH_GPUS: u32 = 0xd4;
    /// `NV_ESC_SYS_PARAMS`.
    pub const SYS_PARAMS: u32 = 0xd6;
    /// `NV_ESC_NUMA_INFO`.
    pub const NUMA_INFO: u32 = 0xd7;
    /// `NV_ESC_WAIT_OPEN_COMPLETE`.
    pub const WAIT_OPEN: u32 = 0xda;
}

/// Numbers of nvidia-uvm's ioctls (`UVM_*`).
pub mod uvm {
    /// `UVM_INITIALIZE`.
    pub const INITIALIZE: u32 = 0x3000_0001;
    /// `UVM_DEINITIALIZE`.
    pub const DEINITIALIZE: u32 = 0x3000_0002;
    /// `UVM_CREATE_RANGE_GROUP`.
    pub const CREATE_RANGE_GROUP: u32 = 23;
    /// `UVM_DESTROY_RANGE_GROUP`.
    pub const DESTROY_RANGE_GROUP: u32 = 24;
    /// `UVM_REGISTER_GPU_VASPACE`.
    pub const REGISTER_GPU_VASPACE: u32 = 25;
    /// `UVM_UNREGISTER_GPU_VASPACE`.
    pub const UNREGISTER_GPU_VASPACE: u32 = 26;
    /// `UVM_REGISTER_CHANNEL`.
    pub const REGISTER_CHANNEL: u32 = 27;
    /// `UVM_UNREGISTER_CHANNEL`.
    pub const UNREGISTER_CHANNEL: u32 = 28;
    /// `UVM_DISABLE_PEER_ACCESS`.
    pub const DISABLE_PEER_ACCESS: u32 = 30;
    /// `UVM_SET_RANGE_GROUP`.
    pub const SET_RANGE_GROUP: u32 = 31;
    /// `UVM_MAP_EXTERNAL_ALLOCATION`.
    pub const MAP_EXTERNAL: u32 = 33;
    /// `UVM_FREE`.
    pub const FREE: u32 = 34;
    /// `UVM_REGISTER_GPU`.
    pub const REGISTER_GPU: u32 = 37;
    /// `UVM_UNREGISTER_GPU`.
    pub const UNREGISTER_GPU: u32 = 38;
    /// `UVM_PAGEABLE_MEM_ACCESS`.
    pub const PAGEABLE_MEM_ACCESS: u32 = 39;
    /// `UVM_SET_PREFERRED_LOCATION`.
    pub const SET_PREFERRED_LOCATION: u32 = 42;
    /// `UVM_UNSET_PREFERRED_LOCATION`.
    pub const UNSET_PREFERRED_LOCATION: u32 = 43;
    /// `UVM_ENABLE_READ_DUPLICATION`.
    pub const ENABLE_READ_DUPLICATION: u32 = 44;
    /// `UVM_DISABLE_READ_DUPLICATION`.
    pub const DISABLE_READ_DUPLICATION: u32 = 45;
    /// `UVM_SET_ACCESSED_BY`.
    pub const SET_ACCESSED_BY: u32 = 46;
    /// `UVM_UNSET_ACCESSED_BY`.
    pub const UNSET_ACCESSED_BY: u32 = 47;
    /// `UVM_MIGRATE`.
    pub const MIGRATE: u32 = 51;
    /// `UVM_MAP_DYNAMIC_PARALLELISM_REGION`.
    pub const MAP_DYNAMIC_PARALLELISM: u32 = 65;
    /// `UVM_UNMAP_EXTERNAL`.
    pub const UNMAP_EXTERNAL: u32 = 66;
    /// `UVM_ALLOC_SEMAPHORE_POOL`.
    pub const ALLOC_SEMAPHORE_POOL: u32 = 68;
    /// `UVM_PAGEABLE_MEM_ACCESS_ON_GPU`.
    pub const PAGEABLE_MEM_ACCESS_ON_GPU: u32 = 70;
    /// `UVM_VALIDATE_VA_RANGE`.
    pub const VALIDATE_VA_RANGE: u32 = 72;
    /// `UVM_CREATE_EXTERNAL_RANGE`.
    pub const CREATE_EXTERNAL_RANGE: u32 = 73;
    /// `UVM_MM_INITIALIZE`.
    pub const MM_INITIALIZE: u32 = 75;
}

/// Classes of objects.
pub mod class {
    /// `NV01_ROOT`.
    pub const ROOT: u32 = 0;
    /// `NV01_ROOT_NON_PRIV`.
    pub const ROOT_CLIENT: u32 = 1;
    /// `RM_USER_SHARED_DATA`: a page with the GPU's state.
    pub const STATUS_PAGE: u32 = 0xde;
    /// `NV04_DISPLAY_COMMON`.
    pub const DISPLAY: u32 = 0x73;
    /// `NV20_SUBDEVICE_DIAG`.
    pub const SUBDEVICE_DIAG: u32 = 0x208f;
    /// `NV2081_BINAPI`.
    pub const BINAPI: u32 = 0x2081;
    /// `NV50_THIRD_PARTY_P2P`.
    pub const THIRD_PARTY_P2P: u32 = 0x503c;
    /// `NV50_MEMORY_VIRTUAL`.
    pub const VIRTUAL_MEMORY: u32 = 0x50a0;
    /// `GT200_DEBUGGER`.
    pub const DEBUGGER: u32 = 0x83de;
    /// `FERMI_CONTEXT_SHARE_A`.
    pub const CONTEXT_SHARE: u32 = 0x9067;
    /// `GF100_SUBDEVICE_MASTER`.
    pub const SUBDEVICE_MASTER: u32 = 0x90e6;
    /// `AMPERE_SMC_MONITOR_SESSION`.
    pub const SMC_MONITOR_SESSION: u32 = 0xc640;
    /// `NV_CONFIDENTIAL_COMPUTE`.
    pub const CONFIDENTIAL_COMPUTE: u32 = 0xcb33;
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
    /// `NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION`.
    pub const BUILD_VERSION: u32 = 0x101;
    /// `NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS_V2`.
    pub const P2P_CAPS: u32 = 0x12b;
    /// `NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS_MATRIX`.
    pub const P2P_CAPS_MATRIX: u32 = 0x13a;
    /// `NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS`.
    pub const ATTACHED_IDS: u32 = 0x201;
    /// `NV0000_CTRL_CMD_GPU_GET_ID_INFO`.
    pub const ID_INFO_V1: u32 = 0x202;
    /// `NV0000_CTRL_CMD_GPU_GET_PROBED_IDS`.
    pub const PROBED_IDS: u32 = 0x214;
    /// `NV0000_CTRL_CMD_GPU_ATTACH_IDS`.
    pub const ATTACH_IDS: u32 = 0x215;
    /// `NV0000_CTRL_CMD_GPU_DETACH_IDS`.
    pub const DETACH_IDS: u32 = 0x216;
    /// `NV0000_CTRL_CMD_GPU_GET_PCI_INFO`.
    pub const PCI_INFO: u32 = 0x21b;
    /// `NV0000_CTRL_CMD_GPU_QUERY_DRAIN_STATE`.
    pub const DRAIN_STATE: u32 = 0x279;
    /// `NV0000_CTRL_CMD_GPU_GET_ACTIVE_DEVICE_IDS`.
    pub const ACTIVE_DEVICES: u32 = 0x288;
    /// `NV0000_CTRL_CMD_GPU_ASYNC_ATTACH_ID`.
    pub const ASYNC_ATTACH_ID: u32 = 0x289;
    /// `NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE`.
    pub const ADDRESS_SPACE_TYPE: u32 = 0xd01;
    /// `NV0000_CTRL_CMD_CLIENT_SET_INHERITED_SHARE_POLICY`.
    pub const INHERITED_SHARE_POLICY: u32 = 0xd04;
    /// `NV0080_CTRL_CMD_FIFO_GET_CHANNELLIST`.
    pub const CHANNEL_LIST: u32 = 0x0080_170d;
    /// `NV0080_CTRL_CMD_PERF_CUDA_LIMIT_SET_CONTROL`.
    pub const CUDA_LIMIT: u32 = 0x0080_1909;
    /// `NV00DE_CTRL_CMD_REQUEST_DATA_POLL`.
    pub const STATUS_PAGE_POLL: u32 = 0x00de_0001;
    /// A control of the subdevice without parameters, which the public headers do not name.
    pub const UNNAMED_2080_0145: u32 = 0x2080_0145;
    /// The counterpart of [`UNNAMED_2080_0145`].
    pub const UNNAMED_2080_0146: u32 = 0x2080_0146;
    /// A control of the subdevice in series 550, which the public headers do not name.
    pub const UNNAMED_2080_018B: u32 = 0x2080_018b;
    /// A control of the device in series 550, which the public headers do not name.
    pub const UNNAMED_0080_028B: u32 = 0x0080_028b;
    /// `NV2080_CTRL_CMD_GPU_GET_SHORT_NAME_STRING`.
    pub const SHORT_NAME_STRING: u32 = 0x2080_0111;
    /// `NV2080_CTRL_CMD_GPU_GET_GID_INFO`.
    pub const GID_INFO: u32 = 0x2080_014a;
    /// `NV2080_CTRL_CMD_GPU_GET_PIDS`.
    pub const PIDS: u32 = 0x2080_018d;
    /// `NV2080_CTRL_CMD_GPU_GET_PID_INFO`.
    pub const PID_INFO: u32 = 0x2080_018e;
    /// `NV2080_CTRL_CMD_THERMAL_SYSTEM_EXECUTE_V2`.
    pub const THERMAL_SYSTEM: u32 = 0x2080_0513;
    /// A control of the thermal interface, which the public headers do not name.
    pub const UNNAMED_2080_852F: u32 = 0x2080_852f;
    /// A control of the power interface, which the public headers do not name.
    pub const UNNAMED_2080_A613: u32 = 0x2080_a613;
    /// A control of the power interface, which the public headers do not name.
    pub const UNNAMED_2080_A61F: u32 = 0x2080_a61f;
    /// `NV2080_CTRL_CMD_NVLINK_GET_NVLINK_CAPS`.
    pub const NVLINK_CAPS: u32 = 0x2080_3001;
    /// `NV2080_CTRL_CMD_TIMER_GET_GPU_CPU_TIME_CORRELATION_INFO`.
    pub const TIME_CORRELATION: u32 = 0x2080_0406;
    /// `NV2080_CTRL_CMD_BUS_GET_INFO`.
    pub const BUS_INFO_V1: u32 = 0x2080_1802;
    /// `NV2080_CTRL_CMD_BUS_GET_INFO_V2`.
    pub const BUS_INFO: u32 = 0x2080_1823;
    /// `NV2080_CTRL_CMD_GR_GET_INFO_V2`.
    pub const GR_INFO: u32 = 0x2080_1228;
    /// `NV2080_CTRL_CMD_GRMGR_GET_GR_FS_INFO`.
    pub const GR_FS_INFO: u32 = 0x2080_3801;
    /// `NV2080_CTRL_CMD_GR_GET_INFO`.
    pub const GR_INFO_V1: u32 = 0x2080_1201;
    /// `NV2080_CTRL_CMD_GR_GET_CTX_BUFFER_SIZE`.
    pub const CTX_BUFFER_SIZE: u32 = 0x2080_1218;
    /// `NV2080_CTRL_CMD_MC_SERVICE_INTERRUPTS`.
    pub const SERVICE_INTERRUPTS: u32 = 0x2080_1702;
    /// `NV2080_CTRL_CMD_RC_RELEASE_WATCHDOG_REQUESTS`.
    pub const RELEASE_WATCHDOG: u32 = 0x2080_220c;
    /// `NV2080_CTRL_CMD_RC_SOFT_DISABLE_WATCHDOG`.
    pub const DISABLE_WATCHDOG: u32 = 0x2080_2210;
    /// `NV503C_CTRL_CMD_REGISTER_VA_SPACE`.
    pub const P2P_REGISTER_SPACE: u32 = 0x503c_0102;
    /// `NV503C_CTRL_CMD_REGISTER_VIDMEM`.
    pub const P2P_REGISTER_MEMORY: u32 = 0x503c_0104;
    /// `NV503C_CTRL_CMD_UNREGISTER_VIDMEM`.
    pub const P2P_UNREGISTER_MEMORY: u32 = 0x503c_0105;
    /// `NV83DE_CTRL_CMD_DEBUG_SET_EXCEPTION_MASK`.
    pub const EXCEPTION_MASK: u32 = 0x83de_0309;
    /// `NV83DE_CTRL_CMD_DEBUG_READ_ALL_SM_ERROR_STATES`.
    pub const ERROR_STATES: u32 = 0x83de_030c;
    /// `NV83DE_CTRL_CMD_DEBUG_CLEAR_ALL_SM_ERROR_STATES`.
    pub const CLEAR_ERROR_STATES: u32 = 0x83de_0310;
    /// `NV906F_CTRL_GET_CLASS_ENGINEID`.
    pub const CLASS_ENGINE: u32 = 0x906f_0101;
    /// `NVC36F_CTRL_GET_CLASS_ENGINEID`: the same in series 550.
    pub const CLASS_ENGINE_550: u32 = 0xc36f_0101;
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
    /// `NV2080_CTRL_CMD_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2`.
    pub const UTILIZATION_SAMPLES: u32 = 0x2080_2096;
    /// `NV2080_CTRL_CMD_CE_GET_CE_PCE_MASK`.
    pub const PCE_MASK: u32 = 0x2080_2a02;
    /// `NV2080_CTRL_CMD_CE_GET_CAPS_V2`.
    pub const COPY_ENGINE_CAPS: u32 = 0x2080_2a03;
    /// `NVA06F_CTRL_CMD_GPFIFO_SCHEDULE`, of a channel without a group.
    pub const SCHEDULE_CHANNEL: u32 = 0xa06f_0103;
    /// `NVA06F_CTRL_CMD_BIND`.
    pub const BIND_CHANNEL: u32 = 0xa06f_0104;
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

/// Indices of `NV2080_CTRL_FB_INFO`.
pub mod fb {
    /// Video memory, in KiB.
    pub const RAM_SIZE: u32 = 0x7;
    /// Video memory with reserved parts, in KiB.
    pub const TOTAL_RAM_SIZE: u32 = 0x8;
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
    /// `NV_ERR_INVALID_ADDRESS`.
    pub const INVALID_ADDRESS: u32 = 0x1e;
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
