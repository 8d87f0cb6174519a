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
/// `SEND_SIGNALING_PCAS2_B`: the action; see [`PCAS_INVALIDATE_COPY_SCHEDULE`].
pub const SEND_SIGNALING_PCAS2_B: u32 = 0x02c0;
/// `PCAS_ACTION_INVALIDATE_COPY_SCHEDULE`: what drivers launch a QMD with.
pub const PCAS_INVALIDATE_COPY_SCHEDULE: u32 = 3;
/// `SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A`: A, B, C.
pub const SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A: u32 = 0x02e4;
/// `SET_SHADER_LOCAL_MEMORY_A`: upper half; B follows.
pub const SET_SHADER_LOCAL_MEMORY_A: u32 = 0x0790;
/// `SET_SHADER_LOCAL_MEMORY_WINDOW_A`: upper half.
pub const SET_SHADER_LOCAL_MEMORY_WINDOW_A: u32 = 0x07b0;
/// `SET_SHADER_LOCAL_MEMORY_WINDOW_B`: lower half, zero as well.
pub const SET_SHADER_LOCAL_MEMORY_WINDOW_B: u32 = 0x07b4;

/// Where kernels that compilers make read the threads of a block in x, y and z, 32 bits each, in constant buffer 0.
pub const BLOCK_BASE: u64 = 0x0;
/// The same for the blocks of the grid.
pub const GRID_BASE: u64 = 0xc;
/// Where a kernel's parameters start in constant buffer 0, in bytes.
pub const PARAM_BASE: u64 = 0x210;
