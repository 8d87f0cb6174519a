//! Copy class `HOPPER_DMA_COPY_A` (c8b5). Symbols: clc8b5.h.

/// `HOPPER_DMA_COPY_A`.
pub const CLASS: u32 = 0xc8b5;

/// `NOP`.
pub const NOP: u32 = 0x0100;
/// `SET_SEMAPHORE_A`: bits 24:0 are the upper half of the address.
pub const SET_SEMAPHORE_A: u32 = 0x0240;
/// `SET_SEMAPHORE_B`: the lower half of the address.
pub const SET_SEMAPHORE_B: u32 = 0x0244;
/// `SET_SEMAPHORE_PAYLOAD`.
pub const SET_SEMAPHORE_PAYLOAD: u32 = 0x0248;
/// `SET_SEMAPHORE_PAYLOAD_UPPER`, with [`launch::SEMAPHORE_PAYLOAD_64`].
pub const SET_SEMAPHORE_PAYLOAD_UPPER: u32 = 0x024c;
/// `SET_SRC_PHYS_MODE`: refused.
pub const SET_SRC_PHYS_MODE: u32 = 0x0260;
/// `SET_DST_PHYS_MODE`: refused.
pub const SET_DST_PHYS_MODE: u32 = 0x0264;
/// `LAUNCH_DMA`: see [`launch`].
pub const LAUNCH_DMA: u32 = 0x0300;
/// `OFFSET_IN_UPPER`, bits 24:0.
pub const OFFSET_IN_UPPER: u32 = 0x0400;
/// `OFFSET_IN_LOWER`.
pub const OFFSET_IN_LOWER: u32 = 0x0404;
/// `OFFSET_OUT_UPPER`, bits 24:0.
pub const OFFSET_OUT_UPPER: u32 = 0x0408;
/// `OFFSET_OUT_LOWER`.
pub const OFFSET_OUT_LOWER: u32 = 0x040c;
/// `PITCH_IN`, bytes, signed.
pub const PITCH_IN: u32 = 0x0410;
/// `PITCH_OUT`, bytes, signed.
pub const PITCH_OUT: u32 = 0x0414;
/// `LINE_LENGTH_IN`: bytes, or elements with remapping.
pub const LINE_LENGTH_IN: u32 = 0x0418;
/// `LINE_COUNT`.
pub const LINE_COUNT: u32 = 0x041c;
/// `SET_REMAP_CONST_A`.
pub const SET_REMAP_CONST_A: u32 = 0x0700;
/// `SET_REMAP_CONST_B`.
pub const SET_REMAP_CONST_B: u32 = 0x0704;
/// `SET_REMAP_COMPONENTS`: see [`remap`].
pub const SET_REMAP_COMPONENTS: u32 = 0x0708;

/// Fields of `LAUNCH_DMA`.
pub mod launch {
    /// `DATA_TRANSFER_TYPE`, bits 1:0: 0 none, 1 pipelined, 2 non-pipelined.
    pub const TRANSFER_MASK: u32 = 0x3;
    /// `DATA_TRANSFER_TYPE_NON_PIPELINED`.
    pub const TRANSFER_NON_PIPELINED: u32 = 2;
    /// `FLUSH_ENABLE_TRUE`.
    pub const FLUSH: u32 = 1 << 2;
    /// `SEMAPHORE_TYPE`, bits 4:3.
    pub const SEMAPHORE_MASK: u32 = 0x3 << 3;
    /// `RELEASE_SEMAPHORE_NO_TIMESTAMP` (one word).
    pub const SEMAPHORE_ONE_WORD: u32 = 1 << 3;
    /// `RELEASE_SEMAPHORE_WITH_TIMESTAMP`: payload at +0, nanoseconds at +8.
    pub const SEMAPHORE_TIMESTAMP: u32 = 2 << 3;
    /// `INTERRUPT_TYPE`, bits 6:5: 0 none, 1 blocking, 2 non-blocking.
    pub const INTERRUPT_MASK: u32 = 0x3 << 5;
    /// `INTERRUPT_TYPE_NON_BLOCKING`.
    pub const INTERRUPT_NON_BLOCKING: u32 = 2 << 5;
    /// `SRC_MEMORY_LAYOUT_PITCH`; block-linear is refused.
    pub const SRC_PITCH: u32 = 1 << 7;
    /// `DST_MEMORY_LAYOUT_PITCH`; block-linear is refused.
    pub const DST_PITCH: u32 = 1 << 8;
    /// `MULTI_LINE_ENABLE_TRUE`.
    pub const MULTI_LINE: u32 = 1 << 9;
    /// `REMAP_ENABLE_TRUE`.
    pub const REMAP: u32 = 1 << 10;
    /// `SRC_TYPE_PHYSICAL`: refused.
    pub const SRC_PHYSICAL: u32 = 1 << 12;
    /// `DST_TYPE_PHYSICAL`: refused.
    pub const DST_PHYSICAL: u32 = 1 << 13;
    /// Shift of `SEMAPHORE_REDUCTION`, bits 17:14: numbers as in
    /// [`sem`](crate::abi::host::sem::REDUCTION).
    pub const SEMAPHORE_REDUCTION_SHIFT: u32 = 14;
    /// `SEMAPHORE_REDUCTION_SIGN_UNSIGNED`.
    pub const SEMAPHORE_REDUCTION_UNSIGNED: u32 = 1 << 18;
    /// `SEMAPHORE_REDUCTION_ENABLE_TRUE`.
    pub const SEMAPHORE_REDUCTION: u32 = 1 << 19;
    /// `SEMAPHORE_PAYLOAD_SIZE_TWO_WORD`.
    pub const SEMAPHORE_PAYLOAD_64: u32 = 1 << 27;
}

/// Fields of `SET_REMAP_COMPONENTS`.
pub mod remap {
    /// The destination component is `CONST_A`.
    pub const CONST_A: u32 = 4;
    /// The destination component is `CONST_B`.
    pub const CONST_B: u32 = 5;
    /// The destination component is not written.
    pub const NO_WRITE: u32 = 6;
    /// Shifts of `DST_X` (bits 2:0), `DST_Y` (6:4), `DST_Z` (10:8) and `DST_W` (14:12).
    pub const DST_SHIFTS: [u32; 4] = [0, 4, 8, 12];
    /// `COMPONENT_SIZE`, bits 17:16, bytes minus one.
    pub const COMPONENT_SIZE_SHIFT: u32 = 16;
    /// `NUM_SRC_COMPONENTS`, bits 21:20, minus one.
    pub const NUM_SRC_SHIFT: u32 = 20;
    /// `NUM_DST_COMPONENTS`, bits 25:24, minus one.
    pub const NUM_DST_SHIFT: u32 = 24;
}
