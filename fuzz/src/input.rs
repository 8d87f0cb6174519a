//! Decoder of the fuzzer's bytes.

/// Addresses and lengths at limits of ranges and types.
const EDGES: [u64; 16] = [
    0,
    1,
    8,
    16,
    64,
    0xfff,
    0x1000,
    0x2000,
    1 << 20,
    (1 << 20) + 1,
    1 << 31,
    u32::MAX as u64,
    1 << 32,
    i64::MAX as u64,
    1 << 63,
    u64::MAX,
];

/// Remaining bytes of an input.
#[derive(Debug)]
pub struct Input<'a>(pub &'a [u8]);

impl<'a> Input<'a> {
    /// Returns whether no bytes remain.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes at most `len` bytes.
    pub fn bytes(&mut self, len: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(len.min(self.0.len()));
        self.0 = rest;
        taken
    }

    /// Takes a byte, or returns 0 at the end.
    pub fn byte(&mut self) -> u8 {
        self.bytes(1).first().copied().unwrap_or_default()
    }

    /// Takes a 32-bit word. Missing bytes are 0.
    pub fn u32(&mut self) -> u32 {
        self.u64_of(4) as u32
    }

    fn u64_of(&mut self, len: usize) -> u64 {
        self.bytes(len).iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    /// Takes a number in few bytes: a small number, a page, a limit, or any number.
    pub fn number(&mut self) -> u64 {
        match self.byte() {
            small @ 0..=0x7f => small.into(),
            page @ 0x80..=0xbf => u64::from(page & 0x3f) << 12,
            edge @ 0xc0..=0xcf => EDGES[usize::from(edge & 0xf)],
            0xd0..=0xdf => self.u64_of(2),
            0xe0..=0xef => self.u64_of(4),
            0xf0..=0xff => self.u64_of(8),
        }
    }
}
