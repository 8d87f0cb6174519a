//! Controls of objects (`NV_ESC_RM_CONTROL`).

use crate::abi::{
    ActiveDevices, AddressSpaceType, BuildVersion, BusInfoV1, ClassEngine, ContextBufferSize,
    DrainState, ErrorStates, FbInfo, FsInfo, GidInfo, GrInfoV1, IdInfo, IdInfoV1, NameString,
    P2pCaps, Pair, PciInfo, PidInfos, Pids, PreemptionMode, SharePolicy, ShortNameString,
    TimeCorrelation,
};
use crate::numbers::status::NOT_SUPPORTED;
use crate::table::Policy::{Answer, Operate, Query, Refuse, Succeed};
use crate::table::{bytes, find};
use crate::version::Layout;

handlers! {
    /// Code that carries out a control.
    Control:
    ActiveDevices, AddressSpaceType, BuildVersion, BusInfoV1, ClassEngine, ClearErrorStates,
    ContextBufferSize, DrainState, ErrorStates, ExceptionMask, FbInfo, GidInfo, GpuIds, GrInfoV1,
    IdInfo, IdInfoV1, InheritedSharePolicy, NameString, NvlinkCaps, P2pCaps, PciInfo, PerfBoost, PidInfo, Pids,
    PreemptionMode, ResetChannel, ShortName, StatusPagePoll, TimeCorrelation, Token,
}

/// Returns the length of a control's parameters in a series, in bytes, if a row has it.
pub fn params_bytes(command: u32, layout: &Layout) -> Option<usize> {
    Some(find(ROWS, command)?.form(layout.series)?.bytes)
}

const ATTACHED: &str = "an emulated GPU is always attached";
const NO_PEERS: &str = "a vGPU has no peers";
const SCHEDULED: &str = "the host schedules";
const WATCHDOG: &str = "the driver's watchdog is the host's";
const UNKNOWN: &str = "it has no parameters that a vGPU has to answer";
const SENSOR: &str = "temperature and power are the host's";

rows! { Control:
    0x0000_0101 NV0000_CTRL_CMD_SYSTEM_GET_BUILD_VERSION [form!(BuildVersion)]
        => Answer(Control::BuildVersion);
    0x0000_012b NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS_V2 [form!(P2pCaps)] => Answer(Control::P2pCaps);
    0x0000_013a NV0000_CTRL_CMD_SYSTEM_GET_P2P_CAPS_MATRIX [] => Succeed(NO_PEERS);
    0x0000_01f0 NV0000_CTRL_CMD_SYSTEM_GET_FEATURES [bytes(4)] => Query, Numbers;
    0x0000_0201 NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS [bytes(128)] => Answer(Control::GpuIds);
    0x0000_0202 NV0000_CTRL_CMD_GPU_GET_ID_INFO [form!(IdInfoV1)] => Answer(Control::IdInfoV1);
    0x0000_0205 NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2 as ID_INFO [form!(IdInfo)]
        => Answer(Control::IdInfo);
    0x0000_0214 NV0000_CTRL_CMD_GPU_GET_PROBED_IDS [bytes(384).since(580), bytes(256)]
        => Answer(Control::GpuIds);
    0x0000_0215 NV0000_CTRL_CMD_GPU_ATTACH_IDS [] => Succeed(ATTACHED);
    0x0000_0216 NV0000_CTRL_CMD_GPU_DETACH_IDS [] => Succeed(ATTACHED);
    0x0000_021b NV0000_CTRL_CMD_GPU_GET_PCI_INFO [form!(PciInfo)] => Answer(Control::PciInfo);
    0x0000_0279 NV0000_CTRL_CMD_GPU_QUERY_DRAIN_STATE [form!(DrainState)]
        => Answer(Control::DrainState);
    0x0000_027b NV0000_CTRL_CMD_GPU_GET_MEMOP_ENABLE [bytes(4)] => Query, Numbers;
    0x0000_0288 NV0000_CTRL_CMD_GPU_GET_ACTIVE_DEVICE_IDS [form!(ActiveDevices)]
        => Answer(Control::ActiveDevices);
    0x0000_0289 NV0000_CTRL_CMD_GPU_ASYNC_ATTACH_ID [] => Succeed(ATTACHED);
    0x0000_0a04 NV0000_CTRL_CMD_SYNC_GPU_BOOST_GROUP_INFO [bytes(2244)] => Query;
    0x0000_0d01 NV0000_CTRL_CMD_CLIENT_GET_ADDR_SPACE_TYPE [form!(AddressSpaceType)]
        => Answer(Control::AddressSpaceType);
    0x0000_0d04 NV0000_CTRL_CMD_CLIENT_SET_INHERITED_SHARE_POLICY [form!(SharePolicy)]
        => Operate(Control::InheritedSharePolicy);

    0x0080_0280 NV0080_CTRL_CMD_GPU_GET_NUM_SUBDEVICES [bytes(4)] => Query, Numbers;
    0x0080_0288 NV0080_CTRL_CMD_GPU_QUERY_SW_STATE_PERSISTENCE [bytes(4)] => Query;
    0x0080_0289 NV0080_CTRL_CMD_GPU_GET_VIRTUALIZATION_MODE [bytes(8).since(570), bytes(4)]
        => Query;
    0x0080_028b UNNAMED [] => Succeed(UNKNOWN);
    0x0080_0292 NV0080_CTRL_CMD_GPU_GET_CLASSLIST_V2 as CLASS_LIST
        [bytes(804).since(580), bytes(404).since(570), bytes(700)] => Query, Numbers;
    0x0080_1307 NV0080_CTRL_CMD_FB_GET_CAPS_V2 [bytes(3)] => Query, Numbers;
    0x0080_1402 NV0080_CTRL_CMD_HOST_GET_CAPS_V2 [bytes(3)] => Query, Numbers;
    0x0080_170d NV0080_CTRL_CMD_FIFO_GET_CHANNELLIST [] => Succeed(UNKNOWN);
    0x0080_1909 NV0080_CTRL_CMD_PERF_CUDA_LIMIT_SET_CONTROL [] => Succeed("clocks are the host's");

    0x00de_0001 NV00DE_CTRL_CMD_REQUEST_DATA_POLL [] => Answer(Control::StatusPagePoll);

    0x2080_0102 NV2080_CTRL_CMD_GPU_GET_INFO_V2
        [bytes(564).since(580), bytes(532).since(575), bytes(524)] => Query, Numbers;
    0x2080_0110 NV2080_CTRL_CMD_GPU_GET_NAME_STRING as NAME_STRING
        [bytes(68).since(595), form!(NameString)]
        => Answer(Control::NameString);
    0x2080_0111 NV2080_CTRL_CMD_GPU_GET_SHORT_NAME_STRING [form!(ShortNameString)]
        => Answer(Control::ShortName);
    0x2080_0119 NV2080_CTRL_CMD_GPU_GET_SIMULATION_INFO [bytes(4)] => Query, Numbers;
    0x2080_012f NV2080_CTRL_CMD_GPU_QUERY_ECC_STATUS
        [bytes(1664).since(590), bytes(1464).since(570), bytes(1024)] => Query, Numbers;
    0x2080_0131 NV2080_CTRL_CMD_GPU_QUERY_COMPUTE_MODE_RULES [bytes(4)] => Query;
    0x2080_0133 NV2080_CTRL_CMD_GPU_QUERY_ECC_CONFIGURATION [bytes(8)] => Query, Numbers;
    0x2080_0145 UNNAMED [] => Succeed(UNKNOWN);
    0x2080_0146 UNNAMED [] => Succeed(UNKNOWN);
    0x2080_014a NV2080_CTRL_CMD_GPU_GET_GID_INFO [form!(GidInfo)] => Answer(Control::GidInfo);
    0x2080_014b NV2080_CTRL_CMD_GPU_GET_INFOROM_OBJECT_VERSION [bytes(5)] => Query;
    0x2080_0157 NV2080_CTRL_CMD_GPU_QUERY_INFOROM_ECC_SUPPORT [bytes(0)] => Query, Numbers;
    0x2080_0170 NV2080_CTRL_CMD_GPU_GET_ENGINES_V2 [bytes(340).since(570), bytes(260)]
        => Query, Numbers;
    0x2080_018b NV2080_CTRL_CMD_GPU_GET_ACTIVE_PARTITION_IDS [] => Succeed("there are none");
    0x2080_018d NV2080_CTRL_CMD_GPU_GET_PIDS [form!(Pids)] => Answer(Control::Pids);
    0x2080_018e NV2080_CTRL_CMD_GPU_GET_PID_INFO [form!(PidInfos)] => Answer(Control::PidInfo);
    0x2080_0195 NV2080_CTRL_CMD_GPU_GET_COMPUTE_POLICY_CONFIG [bytes(260)] => Query;
    0x2080_01a3 NV2080_CTRL_CMD_GET_GPU_FABRIC_PROBE_INFO [bytes(56).since(580), bytes(48)]
        => Query, Numbers;
    0x2080_0406 NV2080_CTRL_CMD_TIMER_GET_GPU_CPU_TIME_CORRELATION_INFO as TIME_CORRELATION
        [form!(TimeCorrelation)] => Answer(Control::TimeCorrelation), Numbers;
    0x2080_0513 NV2080_CTRL_CMD_THERMAL_SYSTEM_EXECUTE_V2 [] => Refuse(NOT_SUPPORTED, SENSOR);
    0x2080_1201 NV2080_CTRL_CMD_GR_GET_INFO [form!(GrInfoV1)] => Answer(Control::GrInfoV1);
    0x2080_1210 NV2080_CTRL_CMD_GR_SET_CTXSW_PREEMPTION_MODE as PREEMPTION_MODE
        [form!(PreemptionMode)] => Operate(Control::PreemptionMode);
    0x2080_1218 NV2080_CTRL_CMD_GR_GET_CTX_BUFFER_SIZE [form!(ContextBufferSize)]
        => Answer(Control::ContextBufferSize);
    0x2080_121b NV2080_CTRL_CMD_GR_GET_GLOBAL_SM_ORDER as SM_ORDER
        [
            bytes(9240).route(9224).since(580), bytes(7192).route(7176).since(575),
            bytes(6168).route(6152),
        ] => Query, Route;
    0x2080_1227 NV2080_CTRL_CMD_GR_GET_CAPS_V2 [bytes(48).route(24)] => Query, Route;
    0x2080_1228 NV2080_CTRL_CMD_GR_GET_INFO_V2 as GR_INFO [
        bytes(496).route(480).since(590), bytes(488).route(472).since(560), bytes(472).route(456)
    ] => Query, Route;
    0x2080_122a NV2080_CTRL_CMD_GR_GET_GPC_MASK [bytes(24).route(0)] => Query, Route;
    0x2080_122b NV2080_CTRL_CMD_GR_GET_TPC_MASK [bytes(24).route(0)] => Query, Route;
    0x2080_1230 NV2080_CTRL_CMD_GR_GET_SM_ISSUE_RATE_MODIFIER [bytes(32).route(0)] => Query, Route;
    0x2080_1303 NV2080_CTRL_CMD_FB_GET_INFO_V2 as FB_INFO
        [form!(FbInfo).since(580), bytes(460).since(570), bytes(444)]
        => Answer(Control::FbInfo), Numbers;
    0x2080_1357 NV2080_CTRL_CMD_FB_QUERY_DRAM_ENCRYPTION_INFOROM_SUPPORT [bytes(4)]
        => Query, Numbers;
    0x2080_1701 NV2080_CTRL_CMD_MC_GET_ARCH_INFO [bytes(16)] => Query, Numbers;
    // libcuda asks for it while it waits for long, and stops waiting if it is refused.
    0x2080_1702 NV2080_CTRL_CMD_MC_SERVICE_INTERRUPTS [] => Succeed("the host serves interrupts");
    0x2080_1801 NV2080_CTRL_CMD_BUS_GET_PCI_INFO [bytes(16)] => Query, Numbers;
    0x2080_1802 NV2080_CTRL_CMD_BUS_GET_INFO [form!(BusInfoV1)] => Answer(Control::BusInfoV1);
    0x2080_1803 NV2080_CTRL_CMD_BUS_GET_PCI_BAR_INFO [bytes(200)] => Query, Numbers;
    0x2080_1823 NV2080_CTRL_CMD_BUS_GET_INFO_V2 as BUS_INFO [bytes(420)] => Query, Numbers;
    0x2080_182a NV2080_CTRL_CMD_BUS_GET_PCIE_SUPPORTED_GPU_ATOMICS [bytes(112).since(570), bytes(104)]
        => Query, Numbers;
    0x2080_182b NV2080_CTRL_CMD_BUS_GET_C2C_INFO [bytes(28)] => Query, Numbers;
    0x2080_200a NV2080_CTRL_CMD_PERF_BOOST as PERF_BOOST [form!(Pair)]
        => Operate(Control::PerfBoost);
    0x2080_2068 NV2080_CTRL_CMD_PERF_GET_CURRENT_PSTATE [bytes(4)] => Query, Numbers;
    0x2080_2209 NV2080_CTRL_CMD_RC_GET_WATCHDOG_INFO [bytes(4)] => Query, Numbers;
    0x2080_220c NV2080_CTRL_CMD_RC_RELEASE_WATCHDOG_REQUESTS [] => Succeed(WATCHDOG);
    0x2080_2210 NV2080_CTRL_CMD_RC_SOFT_DISABLE_WATCHDOG [] => Succeed(WATCHDOG);
    0x2080_2a0a NV2080_CTRL_CMD_CE_GET_ALL_CAPS [bytes(136)] => Query, Numbers;
    0x2080_3001 NV2080_CTRL_CMD_NVLINK_GET_NVLINK_CAPS [] => Answer(Control::NvlinkCaps);
    0x2080_3002 NV2080_CTRL_CMD_NVLINK_GET_NVLINK_STATUS [
        bytes(13864).since(590), bytes(13344).since(580), bytes(13320).since(570), bytes(5896)
    ] => Query;
    0x2080_3401 NV2080_CTRL_CMD_ECC_GET_VOLATILE_COUNTS [bytes(40)] => Query, Numbers;
    0x2080_3601 NV2080_CTRL_CMD_GSP_GET_FEATURES [bytes(72)] => Query, Numbers;
    0x2080_3801 NV2080_CTRL_CMD_GRMGR_GET_GR_FS_INFO as GR_FS_INFO [form!(FsInfo)]
        => Query, Numbers;
    0x2080_8159 UNNAMED [bytes(332)] => Query;
    0x2080_8162 UNNAMED [bytes(1)] => Query;
    0x2080_852e UNNAMED [bytes(528)] => Query;
    0x2080_852f UNNAMED [] => Refuse(NOT_SUPPORTED, SENSOR);
    0x2080_9001 UNNAMED [bytes(8)] => Query;
    0x2080_9009 UNNAMED [bytes(8)] => Query;
    0x2080_9038 UNNAMED [bytes(4)] => Query;
    0x2080_9064 UNNAMED [bytes(520)] => Query;
    0x2080_a026 UNNAMED [bytes(532)] => Query;
    0x2080_a084 UNNAMED [bytes(4)] => Query;
    0x2080_a612 UNNAMED [bytes(11680)] => Query;
    0x2080_a613 UNNAMED [] => Refuse(NOT_SUPPORTED, SENSOR);
    0x2080_a618 UNNAMED [bytes(8620)] => Query;
    0x2080_a61f UNNAMED [] => Refuse(NOT_SUPPORTED, SENSOR);
    0x2081_0108 UNNAMED [bytes(992)] => Query;
    0x2081_0110 UNNAMED [bytes(1)] => Query;
    0x208f_1105 NV208F_CTRL_CMD_GPU_VERIFY_INFOROM [bytes(8)] => Query;

    0x503c_0102 NV503C_CTRL_CMD_REGISTER_VA_SPACE [] => Succeed(NO_PEERS);
    0x503c_0104 NV503C_CTRL_CMD_REGISTER_VIDMEM [] => Succeed(NO_PEERS);
    0x503c_0105 NV503C_CTRL_CMD_UNREGISTER_VIDMEM [] => Succeed(NO_PEERS);
    0x83de_0309 NV83DE_CTRL_CMD_DEBUG_SET_EXCEPTION_MASK as EXCEPTION_MASK [bytes(4)]
        => Operate(Control::ExceptionMask);
    0x83de_030c NV83DE_CTRL_CMD_DEBUG_READ_ALL_SM_ERROR_STATES as ERROR_STATES
        [form!(ErrorStates)] => Answer(Control::ErrorStates);
    0x83de_0310 NV83DE_CTRL_CMD_DEBUG_CLEAR_ALL_SM_ERROR_STATES as CLEAR_ERROR_STATES
        [form!(Pair)] => Operate(Control::ClearErrorStates);
    0x906f_0101 NV906F_CTRL_GET_CLASS_ENGINEID as CLASS_ENGINE [form!(ClassEngine)]
        => Answer(Control::ClassEngine);
    0x906f_0102 NV906F_CTRL_CMD_RESET_CHANNEL as RESET_CHANNEL []
        => Operate(Control::ResetChannel);
    0x90e6_0102 NV90E6_CTRL_CMD_MASTER_GET_VIRTUAL_FUNCTION_ERROR_CONT_INTR_MASK [bytes(8)]
        => Query;
    0xa06c_0101 NVA06C_CTRL_CMD_GPFIFO_SCHEDULE as SCHEDULE [] => Succeed(SCHEDULED);
    0xa06c_0103 NVA06C_CTRL_CMD_SET_TIMESLICE as SET_TIMESLICE [] => Succeed(SCHEDULED);
    0xa06f_0103 NVA06F_CTRL_CMD_GPFIFO_SCHEDULE [] => Succeed(SCHEDULED);
    0xa06f_0104 NVA06F_CTRL_CMD_BIND [] => Succeed(SCHEDULED);
    // The same in series 550.
    0xc36f_0101 NVC36F_CTRL_GET_CLASS_ENGINEID [form!(ClassEngine)] => Answer(Control::ClassEngine);
    0xc36f_0108 NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN as TOKEN [bytes(4)]
        => Answer(Control::Token);
    0xcb33_0101 NV_CONF_COMPUTE_CTRL_CMD_SYSTEM_GET_CAPABILITIES [bytes(6)] => Query;
}
