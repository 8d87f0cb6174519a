//! Compute class `HOPPER_COMPUTE_A` (cbc0). Symbols: clcbc0.h.

/// `HOPPER_COMPUTE_A`.
pub const CLASS: u32 = 0xcbc0;

/// `NO_OPERATION`.
pub const NO_OPERATION: u32 = 0x0100;
/// `WAIT_FOR_IDLE`.
pub const WAIT_FOR_IDLE: u32 = 0x0110;
/// `SET_REPORT_SEMAPHORE_PAYLOAD_LOWER`; `PAYLOAD_UPPER`, `ADDRESS_LOWER` and `ADDRESS_UPPER`
/// follow.
pub const SET_REPORT_SEMAPHORE_PAYLOAD_LOWER: u32 = 0x0158;
/// `SET_REPORT_SEMAPHORE_PAYLOAD_UPPER`.
pub const SET_REPORT_SEMAPHORE_PAYLOAD_UPPER: u32 = 0x015c;
/// `SET_REPORT_SEMAPHORE_ADDRESS_LOWER`.
pub const SET_REPORT_SEMAPHORE_ADDRESS_LOWER: u32 = 0x0160;
/// `SET_REPORT_SEMAPHORE_ADDRESS_UPPER`.
pub const SET_REPORT_SEMAPHORE_ADDRESS_UPPER: u32 = 0x0164;
/// `REPORT_SEMAPHORE_EXECUTE`: see [`report`].
pub const REPORT_SEMAPHORE_EXECUTE: u32 = 0x0168;
/// `LINE_LENGTH_IN` of an inline copy, bytes.
pub const LINE_LENGTH_IN: u32 = 0x0180;
/// `LINE_COUNT` of an inline copy: one.
pub const LINE_COUNT: u32 = 0x0184;
/// `OFFSET_OUT_UPPER`: upper half of the target of an inline copy.
pub const OFFSET_OUT_UPPER: u32 = 0x0188;
/// `OFFSET_OUT`: lower half.
pub const OFFSET_OUT: u32 = 0x018c;
/// `PITCH_OUT`, without effect on one line.
pub const PITCH_OUT: u32 = 0x0190;
/// `LAUNCH_DMA`: begins an inline copy. See [`inline_copy`].
pub const LAUNCH_DMA: u32 = 0x01b0;
/// `LOAD_INLINE_DATA`: the next word of an inline copy.
pub const LOAD_INLINE_DATA: u32 = 0x01b4;
/// `SET_I2M_SEMAPHORE_A`: upper half of the semaphore of inline copies.
pub const SET_I2M_SEMAPHORE_A: u32 = 0x01dc;
/// `SET_I2M_SEMAPHORE_B`: lower half.
pub const SET_I2M_SEMAPHORE_B: u32 = 0x01e0;
/// `SET_I2M_SEMAPHORE_C`: payload.
pub const SET_I2M_SEMAPHORE_C: u32 = 0x01e4;
/// `INVALIDATE_SHADER_CACHES`.
pub const INVALIDATE_SHADER_CACHES: u32 = 0x021c;
/// `INVALIDATE_SKED_CACHES`.
pub const INVALIDATE_SKED_CACHES: u32 = 0x0298;
/// `SET_SHADER_SHARED_MEMORY_WINDOW_A`: upper half.
pub const SET_SHADER_SHARED_MEMORY_WINDOW_A: u32 = 0x02a0;
/// `SET_SHADER_SHARED_MEMORY_WINDOW_B`: lower half. If zero, the window is 4 GiB long.
pub const SET_SHADER_SHARED_MEMORY_WINDOW_B: u32 = 0x02a4;
/// `SEND_PCAS_A`: QMD address >> 8.
pub const SEND_PCAS_A: u32 = 0x02b4;
/// `SEND_SIGNALING_PCAS2_B`: the action, such as [`PCAS_INVALIDATE_COPY_SCHEDULE`].
pub const SEND_SIGNALING_PCAS2_B: u32 = 0x02c0;
/// `PCAS_ACTION_INVALIDATE_COPY_SCHEDULE`: launches a QMD.
pub const PCAS_INVALIDATE_COPY_SCHEDULE: u32 = 3;
/// `PCAS_ACTION_INVALIDATE_PREFETCH_COPY_SCHEDULE`: launches a QMD, as NVIDIA's libraries do.
pub const PCAS_INVALIDATE_PREFETCH_COPY_SCHEDULE: u32 = 10;
/// `SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A`; B and C follow.
pub const SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A: u32 = 0x02e4;
/// `SET_SHADER_LOCAL_MEMORY_A`: upper half; B follows.
pub const SET_SHADER_LOCAL_MEMORY_A: u32 = 0x0790;
/// `SET_SHADER_LOCAL_MEMORY_WINDOW_A`: upper half.
pub const SET_SHADER_LOCAL_MEMORY_WINDOW_A: u32 = 0x07b0;
/// `SET_SHADER_LOCAL_MEMORY_WINDOW_B`: lower half. If zero, the window is 4 GiB long.
pub const SET_SHADER_LOCAL_MEMORY_WINDOW_B: u32 = 0x07b4;
/// `SET_REPORT_SEMAPHORE_A`: upper half of the address.
pub const SET_REPORT_SEMAPHORE_A: u32 = 0x1b00;
/// `SET_REPORT_SEMAPHORE_B`: lower half.
pub const SET_REPORT_SEMAPHORE_B: u32 = 0x1b04;
/// `SET_REPORT_SEMAPHORE_C`: payload.
pub const SET_REPORT_SEMAPHORE_C: u32 = 0x1b08;
/// `SET_REPORT_SEMAPHORE_D`: releases the semaphore. See [`report_d`].
pub const SET_REPORT_SEMAPHORE_D: u32 = 0x1b0c;

/// Methods, from the first to the last of each range, that set what only machine code uses: caches,
/// local memory, texture pools, the trap handler, version numbers, counters, and registers for the
/// driver's own use. The software GPU accepts them without effect.
pub const SET_UP: &[(u32, u32)] = &[
    (NO_OPERATION, NO_OPERATION),
    (WAIT_FOR_IDLE, WAIT_FOR_IDLE),
    // SET_SM_SCG_CONTROL; SET_I2M_SPARE_NOOP00 to 03; SET_VALID_SPAN_OVERFLOW_AREA_A to C
    (0x01e8, 0x01e8),
    (0x01f0, 0x0208),
    // INVALIDATE_SHADER_CACHES, SET_RESERVED_SW_METHOD00 to 07
    (INVALIDATE_SHADER_CACHES, 0x023c),
    // INVALIDATE_TEXTURE_HEADER_CACHE_NO_WFI, SET_CWD_REF_COUNTER, SET_RESERVED_SW_METHOD08 to 15
    (0x0244, 0x0268),
    // SET_COMPUTE_CLASS_VERSION, CHECK_COMPUTE_CLASS_VERSION, SET_QMD_VERSION
    (0x0280, 0x0288),
    (INVALIDATE_SKED_CACHES, INVALIDATE_SKED_CACHES),
    // SET_CWD_SLOT_COUNT; SET_SKED_CACHE_CONTROL
    (0x02b0, 0x02b0),
    (0x02cc, 0x02cc),
    (SET_SHADER_LOCAL_MEMORY_NON_THROTTLED_A, 0x02ec),
    // SET_SPA_VERSION; SET_FALCON00 to 15
    (0x0310, 0x0310),
    (0x0500, 0x053c),
    (SET_SHADER_LOCAL_MEMORY_A, 0x0794),
    // SET_TEXTURE_HEADER_VERSION; THROTTLE_SM; SET_SHADER_CACHE_CONTROL
    (0x07ac, 0x07ac),
    (0x07fc, 0x07fc),
    (0x0d94, 0x0d94),
    // SET_SCG_COMPUTE_SCHEDULING_PARAMETERS; SET_SM_TIMEOUT_INTERVAL
    (0x0da0, 0x0ddc),
    (0x0de4, 0x0de4),
    // Invalidation of texture and sampler caches; ACTIVATE_PERF_SETTINGS_FOR_COMPUTE_CONTEXT
    (0x1288, 0x1288),
    (0x12a8, 0x12a8),
    (0x1330, 0x1338),
    (0x1424, 0x1424),
    // SET_SHADER_EXCEPTIONS; SET_TEX_SAMPLER_POOL_A to C; SET_TEX_HEADER_POOL_A to C
    (0x1528, 0x1528),
    (0x155c, 0x1564),
    (0x1574, 0x157c),
    // INVALIDATE_SHADER_CACHES_NO_WFI; SET_RENDER_ENABLE_OVERRIDE; PIPE_NOP, SET_SPARE00 to 03
    (0x1698, 0x1698),
    (0x1944, 0x1944),
    (0x1a2c, 0x1a3c),
    // SET_TRAP_HANDLER_A and B; SET_BINDLESS_TEXTURE; SET_MME_SHADOW_SCRATCH
    (0x25f8, 0x25fc),
    (0x2608, 0x2608),
    (0x3400, 0x37fc),
];

/// Returns whether a method is one of [`SET_UP`].
pub fn is_set_up(method: u32) -> bool {
    SET_UP.iter().any(|(first, last)| (*first..=*last).contains(&method))
}

/// Fields of `LAUNCH_DMA`.
pub mod inline_copy {
    /// `DST_MEMORY_LAYOUT_PITCH`; block-linear is refused.
    pub const PITCH: u32 = 1 << 0;
    /// `REDUCTION_ENABLE_TRUE`: refused.
    pub const REDUCTION: u32 = 1 << 1;
    /// `COMPLETION_TYPE`, bits 5:4.
    pub const COMPLETION_MASK: u32 = 3 << 4;
    /// `COMPLETION_TYPE_RELEASE_SEMAPHORE`.
    pub const COMPLETION_SEMAPHORE: u32 = 2 << 4;
    /// `INTERRUPT_TYPE_INTERRUPT`.
    pub const INTERRUPT: u32 = 1 << 8;
    /// `SEMAPHORE_STRUCT_SIZE_ONE_WORD`: without a timestamp.
    pub const ONE_WORD: u32 = 1 << 12;
}

/// Fields of `SET_REPORT_SEMAPHORE_D`.
pub mod report_d {
    /// `OPERATION`, bits 1:0: 0 release, or [`TRAP`]; others are refused.
    pub const OPERATION_MASK: u32 = 3;
    /// `OPERATION_TRAP`: raises an interrupt and does nothing else.
    pub const TRAP: u32 = 3;
    /// `REDUCTION_ENABLE_TRUE`.
    pub const REDUCTION: u32 = 1 << 3;
    /// Shift of `REDUCTION_OP`, bits 11:9: 0 add, 1 min, 2 max, 3 inc, 4 dec, 5 and, 6 or, 7 xor.
    pub const REDUCTION_SHIFT: u32 = 9;
    /// `REDUCTION_FORMAT_SIGNED_32`.
    pub const REDUCTION_SIGNED: u32 = 1 << 17;
    /// `CONDITIONAL_TRAP_TRUE` and `AWAKEN_ENABLE_TRUE`: raise an interrupt.
    pub const INTERRUPT_MASK: u32 = 3 << 19;
    /// `STRUCTURE_SIZE_ONE_WORD`: without a timestamp.
    pub const ONE_WORD: u32 = 1 << 28;
}

/// Fields of `REPORT_SEMAPHORE_EXECUTE`.
pub mod report {
    /// `OPERATION`, bits 1:0: 0 release, or [`TRAP`]; others are refused.
    pub const OPERATION_MASK: u32 = 3;
    /// `OPERATION_TRAP`: raises an interrupt and does nothing else.
    pub const TRAP: u32 = 3;
    /// `AWAKEN_ENABLE_TRUE`: raises an interrupt.
    pub const AWAKEN: u32 = 1 << 2;
    /// `STRUCTURE_SIZE`, bits 4:3: 0 is four words, with a timestamp at +8.
    pub const SIZE_MASK: u32 = 3 << 3;
    /// `REDUCTION_ENABLE_TRUE`.
    pub const REDUCTION: u32 = 1 << 6;
    /// Shift of `REDUCTION_OP`, bits 9:7, numbered as in [`report_d`](super::report_d).
    pub const REDUCTION_SHIFT: u32 = 7;
    /// `REDUCTION_FORMAT_SIGNED`.
    pub const REDUCTION_SIGNED: u32 = 1 << 10;
    /// `PAYLOAD_SIZE64_TRUE`.
    pub const PAYLOAD_64: u32 = 1 << 12;
    /// `TRAP_TYPE`, bits 14:13: if not 0, raises an interrupt.
    pub const TRAP_MASK: u32 = 3 << 13;
}

/// Offset in constant buffer 0 of the threads of a block in x, y and z, 32 bits each, for compiled
/// kernels.
pub const BLOCK_BASE: u64 = 0x0;
/// Offset in constant buffer 0 of the blocks of the grid in x, y and z.
pub const GRID_BASE: u64 = 0xc;
/// Offset in constant buffer 0 of the kernel's parameters.
pub const PARAM_BASE: u64 = 0x210;
