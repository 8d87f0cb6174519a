//! Records of the context switch log.

/// Size of `NV_EVENT_BUFFER_RECORD_HEADER` and `NV_EVENT_BUFFER_FECS_RECORD_V1`.
pub const RECORD_BYTES: usize = 32;

/// `NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_START`: a context gets the engine.
pub const START: u8 = 6;
/// `NV_EVENT_BUFFER_FECS_CTXSWTAG_SIMPLE_END`: a context releases the engine.
pub const END: u8 = 7;
/// `NV_EVENT_BUFFER_FECS_CTXSWTAG_ENGINE_RESET`.
pub const ENGINE_RESET: u8 = 0xfe;

/// Record of the context switch log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CtxswRecord {
    /// Kind of the event (`NV_EVENT_BUFFER_FECS_CTXSWTAG_*`).
    pub tag: u8,
    /// Sequence number; a gap means lost records.
    pub number: u16,
    /// Handle of the context.
    pub context: u32,
    /// Process ID.
    pub process: u64,
    /// Time of the event, in nanoseconds of the GPU's clock.
    pub at_ns: u64,
}

impl CtxswRecord {
    /// Reads a record.
    pub fn read(bytes: &[u8; RECORD_BYTES]) -> Self {
        let (payload, _) = bytes[8..].as_chunks::<8>();
        let word = |index: usize| payload.get(index).copied().map_or(0, u64::from_le_bytes);
        Self {
            tag: word(0) as u8,
            number: (word(0) >> 16) as u16,
            context: (word(0) >> 32) as u32,
            process: word(1),
            at_ns: word(2),
        }
    }
}
