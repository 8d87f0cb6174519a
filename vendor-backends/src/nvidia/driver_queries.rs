//! Queries about the GPU that the driver answers for CUDA programs.
//!
//! Only the commands in the list below reach the driver, with parameters of exactly this length.
//! They change nothing, and their parameters hold neither pointers nor handles.

use super::device::Device;
use super::generation::{CLASS_LIST, CLASS_LIST_BYTES};
use super::sys::numbers::status;

/// Command and length of the parameters in bytes, as in series 580.
const QUERIES: &[(u32, usize)] = &[
    // NV0000_CTRL_CMD_SYSTEM_GET_FEATURES
    (0x0000_01f0, 4),
    // NV0000_CTRL_CMD_GPU_GET_MEMOP_ENABLE
    (0x0000_027b, 4),
    // NV0080_CTRL_CMD_GPU_GET_NUM_SUBDEVICES
    (0x0080_0280, 4),
    (CLASS_LIST, CLASS_LIST_BYTES),
    // NV0080_CTRL_CMD_FB_GET_CAPS_V2
    (0x0080_1307, 3),
    // NV0080_CTRL_CMD_HOST_GET_CAPS_V2
    (0x0080_1402, 3),
    // NV2080_CTRL_CMD_GPU_GET_INFO_V2
    (0x2080_0102, 564),
    // NV2080_CTRL_CMD_GPU_GET_SIMULATION_INFO
    (0x2080_0119, 4),
    // NV2080_CTRL_CMD_GPU_QUERY_ECC_STATUS
    (0x2080_012f, 1464),
    // NV2080_CTRL_CMD_GPU_QUERY_ECC_CONFIGURATION
    (0x2080_0133, 8),
    // NV2080_CTRL_CMD_GPU_QUERY_INFOROM_ECC_SUPPORT
    (0x2080_0157, 0),
    // NV2080_CTRL_CMD_GPU_GET_ENGINES_V2
    (0x2080_0170, 340),
    // NV2080_CTRL_CMD_GET_GPU_FABRIC_PROBE_INFO
    (0x2080_01a3, 56),
    // NV2080_CTRL_CMD_TIMER_GET_GPU_CPU_TIME_CORRELATION_INFO
    (0x2080_0406, 264),
    // NV2080_CTRL_CMD_GR_GET_GLOBAL_SM_ORDER
    (0x2080_121b, 9240),
    // NV2080_CTRL_CMD_GR_GET_CAPS_V2
    (0x2080_1227, 48),
    // NV2080_CTRL_CMD_GR_GET_GPC_MASK
    (0x2080_122a, 24),
    // NV2080_CTRL_CMD_GR_GET_TPC_MASK
    (0x2080_122b, 24),
    // NV2080_CTRL_CMD_GR_GET_SM_ISSUE_RATE_MODIFIER
    (0x2080_1230, 32),
    // NV2080_CTRL_CMD_GR_GET_INFO_V2
    (0x2080_1228, 488),
    // NV2080_CTRL_CMD_FB_GET_INFO_V2
    (0x2080_1303, 1028),
    // NV2080_CTRL_CMD_FB_QUERY_DRAM_ENCRYPTION_INFOROM_SUPPORT
    (0x2080_1357, 4),
    // NV2080_CTRL_CMD_MC_GET_ARCH_INFO
    (0x2080_1701, 16),
    // NV2080_CTRL_CMD_BUS_GET_PCI_INFO
    (0x2080_1801, 16),
    // NV2080_CTRL_CMD_BUS_GET_PCI_BAR_INFO
    (0x2080_1803, 200),
    // NV2080_CTRL_CMD_BUS_GET_INFO_V2
    (0x2080_1823, 420),
    // NV2080_CTRL_CMD_BUS_GET_PCIE_SUPPORTED_GPU_ATOMICS
    (0x2080_182a, 112),
    // NV2080_CTRL_CMD_BUS_GET_C2C_INFO
    (0x2080_182b, 28),
    // NV2080_CTRL_CMD_PERF_GET_CURRENT_PSTATE
    (0x2080_2068, 4),
    // NV2080_CTRL_CMD_RC_GET_WATCHDOG_INFO
    (0x2080_2209, 4),
    // NV2080_CTRL_CMD_CE_GET_ALL_CAPS
    (0x2080_2a0a, 136),
    // NV2080_CTRL_CMD_ECC_GET_VOLATILE_COUNTS
    (0x2080_3401, 40),
    // NV2080_CTRL_CMD_GSP_GET_FEATURES
    (0x2080_3601, 72),
    // NV2080_CTRL_CMD_GRMGR_GET_GR_FS_INFO
    (0x2080_3801, 1928),
];

/// Offset of `NV2080_CTRL_GR_ROUTE_INFO` in the parameters of commands that have it.
const ROUTES: &[(u32, usize)] = &[
    // NV2080_CTRL_CMD_GR_GET_GLOBAL_SM_ORDER
    (0x2080_121b, 9224),
    // NV2080_CTRL_CMD_GR_GET_CAPS_V2
    (0x2080_1227, 24),
    // NV2080_CTRL_CMD_GR_GET_INFO_V2
    (0x2080_1228, 472),
    // NV2080_CTRL_CMD_GR_GET_GPC_MASK
    (0x2080_122a, 0),
    // NV2080_CTRL_CMD_GR_GET_TPC_MASK
    (0x2080_122b, 0),
    // NV2080_CTRL_CMD_GR_GET_SM_ISSUE_RATE_MODIFIER
    (0x2080_1230, 0),
];

/// Classes of the objects that commands are for, in their upper half.
const CLIENT: u32 = 0;
const DEVICE: u32 = 0x80;

/// Answers a query in `params`. Returns the driver's status, or `None` for other commands.
pub fn query(device: &Device, command: u32, params: &mut [u8]) -> Option<u32> {
    QUERIES.iter().find(|query| **query == (command, params.len()))?;
    if names_channel(command, params) {
        return Some(status::INVALID_ARGUMENT);
    }
    let done = match command >> 16 {
        CLIENT => device.rm_client.control_root_bytes(command, params),
        DEVICE => device.device.control_bytes(command, params),
        _ => device.subdevice.control_bytes(command, params),
    };
    match done {
        Ok(()) => Some(0),
        Err(error) => {
            log::debug!("{error}");
            error.status()
        }
    }
}

/// Returns whether the route of a query to the graphics engine names a channel, by a handle
/// (`NV2080_CTRL_GR_ROUTE_INFO_FLAGS_TYPE_CHANNEL`). A vGPU has one such engine.
fn names_channel(command: u32, params: &[u8]) -> bool {
    const TYPE: u8 = 3;
    let route = ROUTES.iter().find(|(routed, _)| *routed == command);
    route.is_some_and(|(_, at)| params.get(*at).is_some_and(|flags| flags & TYPE > 1))
}
