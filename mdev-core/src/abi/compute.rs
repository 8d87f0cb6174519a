//! Compute class `HOPPER_COMPUTE_A` (cbc0). Symbols: clcbc0.h.

/// `HOPPER_COMPUTE_A`.
pub const CLASS: u32 = 0xcbc0;

/// `NO_OPERATION`.
pub const NO_OPERATION: u32 = 0x0100;
/// `WAIT_FOR_IDLE`.
pub const WAIT_FOR_IDLE: u32 = 0x0110;
/// `INVALIDATE_SHADER_CACHES`.
pub const INVALIDATE_SHADER_CACHES: u32 = 0x021c;
/// `INVALIDATE_SKED_CACHES`.
pub const INVALIDATE_SKED_CACHES: u32 = 0x0298;
/// `SET_SHADER_SHARED_MEMORY_WINDOW_A`: upper half.
pub const SET_SHADER_SHARED_MEMORY_WINDOW_A: u32 = 0x02a0;
/// `SET_SHADER_SHARED_MEMORY_WINDOW_B`: lower half, zero: the window is 4 GiB long and aligned.
pub const SET_SHADER_SHARED_MEMORY_WINDOW_B: u32 = 0x02a4;
/// `SEND_PCAS_A`: QMD address >> 8.
pub const SEND_PCAS_A: u32 = 0x02b4;
/// `SEND_SIGNALING_PCAS2_B`: the action, [`PCAS_INVALIDATE_COPY_SCHEDULE`].
pub const SEND_SIGNALING_PCAS2_B: u32 = 0x02c0;
/// `PCAS_ACTION_INVALIDATE_COPY_SCHEDULE`: the action with which drivers launch a QMD.
pub const PCAS_INVALIDATE_COPY_SCHEDULE: u32 = 3;
/// `SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A`; B and C follow.
pub const SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A: u32 = 0x02e4;
/// `SET_SHADER_LOCAL_MEMORY_A`: upper half; B follows.
pub const SET_SHADER_LOCAL_MEMORY_A: u32 = 0x0790;
/// `SET_SHADER_LOCAL_MEMORY_WINDOW_A`: upper half.
pub const SET_SHADER_LOCAL_MEMORY_WINDOW_A: u32 = 0x07b0;
/// `SET_SHADER_LOCAL_MEMORY_WINDOW_B`: lower half, zero.
pub const SET_SHADER_LOCAL_MEMORY_WINDOW_B: u32 = 0x07b4;

/// Offset in constant buffer 0 of the threads of a block in x, y and z, 32 bits each, for compiled
/// kernels.
pub const BLOCK_BASE: u64 = 0x0;
/// Offset in constant buffer 0 of the blocks of the grid in x, y and z.
pub const GRID_BASE: u64 = 0xc;
/// Offset in constant buffer 0 of the kernel's parameters.
pub const PARAM_BASE: u64 = 0x210;
