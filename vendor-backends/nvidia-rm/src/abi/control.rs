//! Parameters of controls.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

structure!(
    /// `NV0000_CTRL_GPU_GET_ID_INFO_V2_PARAMS`.
    IdInfo {
        gpu_id: u32,
        flags: u32,
        device: u32,
        subdevice: u32,
        sli_status: u32,
        board: u32,
        instance: u32,
        numa_node: u32,
    }
);

structure!(
    /// `NV2080_CTRL_FB_GET_INFO_V2_PARAMS`.
    FbInfo { count: u32, list: [[u32; 2]; 128], }
);

structure!(
    /// `NV2080_CTRL_GPU_GET_NAME_STRING_PARAMS`.
    NameString { flags: u32, text: [u8; 128], }
);

structure!(
    /// `NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS`.
    DisableChannels {
        disable: u8,
        pad0: [u8; 3],
        count: u32,
        only_scheduling: u8,
        rewind: u8,
        pad1: [u8; 6],
        preempt_event: u64,
        clients: [u32; 64],
        channels: [u32; 64],
    }
);

structure!(
    /// `NV906F_CTRL_CMD_RESET_CHANNEL_PARAMS`.
    ResetChannel { engine: u32, subdevice: u32, reason: u32, rc_pending: u8, pad0: [u8; 3], }
);

structure!(
    /// `NV2080_CTRL_GR_SET_CTXSW_PREEMPTION_MODE_PARAMS`.
    PreemptionMode { flags: u32, object: u32, graphics: u32, compute: u32, route: [u32; 4], }
);

structure!(
    /// `NV2080_CTRL_EVENT_SET_NOTIFICATION_PARAMS`.
    SetNotification { event: u32, action: u32, notify_state: u32, info32: u32, info16: u32, }
);

structure!(
    /// `NV83DE_SM_ERROR_STATE_REGISTERS`.
    SmErrorState {
        global_esr: u32,
        warp_esr: u32,
        warp_pc: u32,
        global_mask: u32,
        warp_mask: u32,
        pad0: u32,
        address: u64,
        warp_pc64: u64,
        cluster_esr: u32,
        cluster_mask: u32,
    }
);

structure!(
    /// `NV83DE_CTRL_DEBUG_READ_ALL_SM_ERROR_STATES_PARAMS`.
    ErrorStates {
        channel: u32,
        count: u32,
        states: [SmErrorState; 100],
        old_fault_info: u32,
        fault_valid: u32,
        fault_info: u32,
        first: u32,
    }
);

structure!(
    /// `NV906F_CTRL_GET_MMU_FAULT_INFO_PARAMS`.
    MmuFault {
        address_hi: u32,
        address_lo: u32,
        kind: u32,
        text: [u8; 32],
        pad0: [u8; 4],
        programs: [u64; 7],
    }
);

structure!(
    /// `NV2080_CTRL_GR_FECS_BIND_EVTBUF_FOR_UID_PARAMS`.
    BindCtxswLog {
        buffer: u32,
        record_bytes: u32,
        detail: u32,
        filter: u32,
        all_users: u8,
        pad0: [u8; 3],
    }
);

structure!(
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
);

structure!(
    /// `NV2080_CTRL_PERF_GPUMON_PERFMON_UTIL_SAMPLE`: frame buffer, graphics, and the video engines.
    UtilizationSample {
        at_ns: u64,
        engines: [EngineUtilization; 6],
    }
);

structure!(
    /// `NV2080_CTRL_PERF_GET_GPUMON_PERFMON_UTIL_SAMPLES_V2_PARAMS`.
    UtilizationSamples {
        kind: u8,
        pad0: [u8; 3],
        bytes: u32,
        count: u32,
        tracker: u32,
        samples: [UtilizationSample; 72],
    }
);

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

structure!(
    /// Two words, the parameters of several controls.
    Pair { first: u32, second: u32, }
);

impl DisableChannels {
    /// Maximum number of channels in one call (`NV2080_CTRL_FIFO_DISABLE_CHANNELS_MAX_ENTRIES`).
    pub const MAX: usize = 64;
}

sizes! {
    IdInfo = 32;
    FbInfo = 1028;
    NameString = 132;
    DisableChannels = 536;
    ResetChannel = 16;
    PreemptionMode = 32;
    SetNotification = 20;
    SmErrorState = 48;
    ErrorStates = 4824;
    MmuFault = 104;
    BindCtxswLog = 20;
    UtilizationSample = 776;
    UtilizationSamples = 55_888;
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(DisableChannels, clients) == 24);
    assert!(offset_of!(DisableChannels, channels) == 280);
};
