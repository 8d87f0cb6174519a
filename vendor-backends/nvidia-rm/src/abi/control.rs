//! Parameters of controls.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

structures! {
    /// `NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS`.
    IdInfo {
        gpu_id: u32, flags: u32, device: u32, subdevice: u32, sli_status: u32, board: u32,
        instance: u32, numa_node: u32,
    }

    /// `NV2080_CTRL_FB_GET_INFO_V2_PARAMS`.
    FbInfo { count: u32, list: [[u32; 2]; 128] }

    /// `NV2080_CTRL_GPU_GET_NAME_STRING_PARAMS`.
    NameString { flags: u32, text: [u8; 128] }

    /// `NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS`.
    DisableChannels {
        disable: u8, pad0: [u8; 3], count: u32, only_scheduling: u8, rewind: u8, pad1: [u8; 6],
        preempt_event: u64, clients: [u32; 64], channels: [u32; 64],
    }

    /// `NV906F_CTRL_CMD_RESET_CHANNEL_PARAMS`.
    ResetChannel { engine: u32, subdevice: u32, reason: u32, rc_pending: u8, pad0: [u8; 3] }

    /// `NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS`.
    PreemptionMode { flags: u32, object: u32, graphics: u32, compute: u32, route: [u32; 4] }

    /// `NV2080_CTRL_EVENT_SET_NOTIFICATION_PARAMS`.
    SetNotification { event: u32, action: u32, notify_state: u32, info32: u32, info16: u32 }

    /// `NV83DE_SM_ERROR_STATE_REGISTERS`.
    SmErrorState {
        global_esr: u32, warp_esr: u32, warp_pc: u32, global_mask: u32, warp_mask: u32, pad0: u32,
        address: u64, warp_pc64: u64, cluster_esr: u32, cluster_mask: u32,
    }

    /// `NV83DE_CTRL_DEBUG_READ_ALL_SM_ERROR_STATES_PARAMS`.
    ErrorStates {
        channel: u32, count: u32, states: [SmErrorState; 100], old_fault_info: u32,
        fault_valid: u32, fault_info: u32, first: u32,
    }

    /// `NV906F_CTRL_GET_MMU_FAULT_INFO_PARAMS`.
    MmuFault {
        address_hi: u32, address_lo: u32, kind: u32, text: [u8; 32], pad0: [u8; 4],
        programs: [u64; 7],
    }

    /// `NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_PARAMS`.
    BindCtxswLog {
        buffer: u32, record_bytes: u32, detail: u32, filter: u32, all_users: u8, pad0: [u8; 3],
    }

    /// `NV2080_CTRL_PERF_GPUMON_ENGINE_UTIL_SAMPLE`.
    EngineUtilization {
        /// Part of the time in which the engine worked, in hundredths of a percent.
        hundredths: u32,
        scale: u32,
        process: u32,
        vm_process: u32,
        vm_process_name: [u8; 100],
        pad0: [u8; 4],
        process_info: u64,
    }

    /// `NV2080_CTRL_PERF_GPUMON_PERFMON_UTIL_SAMPLE`: frame buffer, graphics, and the video
    /// engines.
    UtilizationSample { at_ns: u64, engines: [EngineUtilization; 6] }

    /// `NV2080_CTRL_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2_PARAMS`.
    UtilizationSamples {
        kind: u8, pad0: [u8; 3], bytes: u32, count: u32, tracker: u32,
        samples: [UtilizationSample; 72],
    }

    /// Two words, the parameters of several controls.
    Pair { first: u32, second: u32 }

    /// `NV0000_CTRL_SYSTEM_GET_BUILD_VERSION_PARAMS`: `room` bytes behind each pointer.
    BuildVersion {
        room: u32, pad0: u32, driver: u64, version: u64, title: u64, changelist: u32, official: u32,
    }

    /// `NV0000_CTRL_GPU_GET_ACTIVE_DEVICE_IDS_PARAMS`: ids of GPUs and of their partitions.
    ActiveDevices { count: u32, devices: [[u32; 3]; 256] }

    /// `NV0000_CTRL_GPU_GET_PCI_INFO_PARAMS`.
    PciInfo { gpu_id: u32, domain: u32, bus: u16, slot: u16 }

    /// `NV0000_CTRL_GPU_QUERY_DRAIN_STATE_PARAMS`.
    DrainState { gpu_id: u32, state: u32, flags: u32 }

    /// `NV0000_CTRL_GPU_GET_ID_INFO_PARAMS`.
    IdInfoV1 {
        gpu_id: u32, flags: u32, device: u32, subdevice: u32, name: u64, sli_status: u32,
        board: u32, instance: u32, numa_node: u32,
    }

    /// `NV0000_CTRL_CLIENT_GET_ADDR_SPACE_TYPE_PARAMS`.
    AddressSpaceType { object: u32, map_flags: u32, kind: u32 }

    /// `NV0000_CTRL_SYSTEM_GET_P2P_CAPS_V2_PARAMS`.
    P2pCaps {
        gpus: [u32; 32], count: u32, caps: u32, read_engines: u32, write_engines: u32,
        states: [u8; 9], pad0: [u8; 3], peers: [u32; 1024], egm_peers: [u32; 1024],
    }

    /// `NV2080_CTRL_GPU_GET_SHORT_NAME_STRING_PARAMS`.
    ShortNameString { text: [u8; 64] }

    /// `NV2080_CTRL_GPU_GET_GID_INFO_PARAMS`.
    GidInfo { index: u32, flags: u32, length: u32, data: [u8; 256] }

    /// `NV2080_CTRL_GPU_GET_PIDS_PARAMS`: processes with an object of a class.
    Pids { kind: u32, class: u32, count: u32, pids: [u32; 950] }

    /// `NV2080_CTRL_GPU_PID_INFO`. `bytes` are of video memory.
    PidInfo {
        pid: u32, index: u32, status: u32, pad0: u32, bytes: u64, other_bytes: [u64; 5],
        partitions: [u32; 2],
    }

    /// `NV2080_CTRL_GPU_GET_PID_INFO_PARAMS`.
    PidInfos { count: u32, pad0: u32, list: [PidInfo; 200] }

    /// `NV2080_CTRL_TIMER_GET_GPU_CPU_TIME_CORRELATION_INFO_PARAMS`: times of the CPU and the GPU.
    TimeCorrelation { clock: u8, count: u8, pad0: [u8; 6], samples: [[u64; 2]; 16] }

    /// `NV2080_CTRL_GR_GET_INFO_PARAMS`: `count` indices and data behind `list`.
    GrInfoV1 { count: u32, pad0: u32, list: u64, route_flags: u32, pad1: u32, route: u64 }

    /// `NV2080_CTRL_BUS_GET_INFO_PARAMS`: `count` indices and data behind `list`.
    BusInfoV1 { count: u32, pad0: u32, list: u64 }

    /// `NV2080_CTRL_GR_GET_CTX_BUFFER_SIZE_PARAMS`.
    ContextBufferSize { channel: u32, pad0: u32, bytes: u64 }

    /// `NV2080_CTRL_GRMGR_GR_FS_INFO_QUERY_PARAMS`, of a cluster (GPC).
    FsQuery { kind: u16, pad0: [u8; 2], status: u32, cluster: u32, answer: u32, rest: u32 }

    /// `NV2080_CTRL_GRMGR_GET_GR_FS_INFO_PARAMS`.
    FsInfo { count: u16, pad0: [u8; 6], queries: [FsQuery; 96] }

    /// `NV906F_CTRL_GET_CLASS_ENGINEID_PARAMS`.
    ClassEngine { object: u32, class_engine: u32, class: u32, engine: u32 }
}

impl UtilizationSample {
    /// Returns the utilization of the graphics engine, which computes.
    pub fn graphics(&self) -> &EngineUtilization {
        &self.engines[1]
    }
}

impl UtilizationSamples {
    /// `NV2080_CTRL_GPUMON_SAMPLE_TYPE_PERFMON_UTIL`.
    pub const PERFMON: u8 = 2;
}

impl DisableChannels {
    /// Maximum number of channels in one call (`NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES`).
    pub const MAX: usize = 64;
}
