//! Methods of the copy class.

use mdev_core::abi::copy::{
    LAUNCH_DMA, LINE_LENGTH_IN, OFFSET_IN_UPPER, OFFSET_OUT_UPPER, PITCH_IN, SET_REMAP_COMPONENTS,
    SET_REMAP_CONST_A, SET_SEMAPHORE_A, launch, remap,
};
use mdev_core::abi::host::SUBCHANNEL_COPY as COPY;

use crate::pushbuffer::Methods;

/// Limit of bytes in one launch; longer copies take several launches.
const MAX_LINE: u64 = 1 << 30;

const PLAIN: u32 =
    launch::TRANSFER_NON_PIPELINED | launch::FLUSH | launch::SRC_PITCH | launch::DST_PITCH;

/// Copies `len` bytes.
pub fn linear(methods: &mut Methods, mut to: u64, mut from: u64, mut len: u64) {
    while len > 0 {
        let line = len.min(MAX_LINE);
        methods
            .push_address(COPY, OFFSET_IN_UPPER, from)
            .push_address(COPY, OFFSET_OUT_UPPER, to)
            .push(COPY, LINE_LENGTH_IN, &[line as u32])
            .push(COPY, LAUNCH_DMA, &[PLAIN]);
        (to, from, len) = (to + line, from + line, len - line);
    }
}

/// Rectangle in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Surface {
    /// GPU address of the first byte.
    pub va: u64,
    /// Bytes from one row to the next.
    pub pitch: u32,
}

/// Copies `rows` rows of `width` bytes.
pub fn rectangle(methods: &mut Methods, to: Surface, from: Surface, width: u32, rows: u32) {
    methods
        .push_address(COPY, OFFSET_IN_UPPER, from.va)
        .push_address(COPY, OFFSET_OUT_UPPER, to.va)
        // PITCH_IN, PITCH_OUT, LINE_LENGTH_IN and LINE_COUNT are consecutive.
        .push(COPY, PITCH_IN, &[from.pitch, to.pitch, width, rows])
        .push(COPY, LAUNCH_DMA, &[PLAIN | launch::MULTI_LINE]);
}

/// Writes `value` to `words` words.
pub fn fill(methods: &mut Methods, to: u64, value: u32, words: u32) {
    let components = remap::CONST_A << remap::DST_SHIFTS[0] | 3 << remap::COMPONENT_SIZE_SHIFT;
    methods
        .push(COPY, SET_REMAP_CONST_A, &[value])
        .push(COPY, SET_REMAP_COMPONENTS, &[components])
        .push_address(COPY, OFFSET_OUT_UPPER, to)
        .push(COPY, LINE_LENGTH_IN, &[words])
        .push(COPY, LAUNCH_DMA, &[PLAIN | launch::REMAP]);
}

/// Writes `payload` to `va` with the copy engine, once its earlier writes are visible.
pub fn release(methods: &mut Methods, va: u64, payload: u32) {
    methods.push(COPY, SET_SEMAPHORE_A, &[(va >> 32) as u32, va as u32, payload]).push(
        COPY,
        LAUNCH_DMA,
        &[launch::FLUSH | launch::SEMAPHORE_ONE_WORD],
    );
}
