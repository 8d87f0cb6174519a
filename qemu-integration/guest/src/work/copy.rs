//! Copies: guest RAM to video memory and back, and a rectangle cut out of a picture.

use mdev_core::units::{KIB, MIB};

use super::{Work, compare};
use crate::GuestError;
use crate::copy::{Surface, linear, rectangle};
use crate::device::Device;
use crate::memory::Buffer;
use crate::pushbuffer::Methods;

/// Bytes compared at a time.
const CHUNK: u64 = 64 * KIB;

/// Copies a pattern to an intermediate buffer and back.
#[derive(Debug)]
pub struct Copy {
    from: Buffer,
    middle: Buffer,
    to: Buffer,
    len: u64,
}

impl Copy {
    /// Copies `len` bytes, a multiple of 4, through video memory if there is any. The CPU need not
    /// access the video memory.
    pub fn new(device: &Device, len: u64) -> Result<Self, GuestError> {
        if len == 0 || !len.is_multiple_of(4) {
            return Err(GuestError::Invalid(format!("copying {len} bytes: not a multiple of 4")));
        }
        Ok(Self {
            from: Buffer::guest(device, len)?,
            middle: if device.info().vram_bytes > 0 {
                Buffer::video(device, len)?
            } else {
                Buffer::guest(device, len)?
            },
            to: Buffer::guest(device, len)?,
            len,
        })
    }

    fn chunks(&self) -> impl Iterator<Item = (u64, u64)> + use<> {
        let len = self.len;
        (0..len).step_by(CHUNK as usize).map(move |at| (at, CHUNK.min(len - at)))
    }
}

/// Returns word `index` of the pattern, in which no two chunks are equal.
fn pattern(index: u64) -> u32 {
    (index as u32).wrapping_mul(0x9e37_79b1) ^ (index >> 11) as u32
}

impl Work for Copy {
    fn name(&self) -> &'static str {
        "copy"
    }

    fn amount(&self) -> (f64, &'static str) {
        (2.0 * self.len as f64, "bytes")
    }

    fn prepare(&self) {
        for (at, len) in self.chunks() {
            let words: Vec<u32> = (at / 4..(at + len) / 4).map(pattern).collect();
            self.from.store(at, &words);
        }
        self.to.window().fill(0);
    }

    fn push(&self, methods: &mut Methods) {
        linear(methods, self.middle.va(), self.from.va(), self.len);
        linear(methods, self.to.va(), self.middle.va(), self.len);
    }

    fn verify(&self) -> Result<u64, GuestError> {
        let mut checked = 0;
        for (at, len) in self.chunks() {
            let words: Vec<u32> = self.to.load(at, len as usize / 4);
            checked += compare(self.name(), &words, |index| pattern(at / 4 + index as u64))?;
        }
        Ok(checked)
    }
}

/// Copies a rectangle out of a picture with another pitch.
#[derive(Debug)]
pub struct Rectangle {
    from: Buffer,
    to: Buffer,
}

impl Rectangle {
    const FROM_PITCH: u32 = 4096;
    const TO_PITCH: u32 = 640;
    /// Copied bytes of each row; the rest of the target must stay unchanged.
    const WIDTH: u32 = 600;
    const ROWS: u32 = 100;
    /// Offset of the rectangle in the source.
    const CORNER: u64 = 32 * Self::FROM_PITCH as u64 + 256;

    /// Allocates both pictures.
    pub fn new(device: &Device) -> Result<Self, GuestError> {
        Ok(Self { from: Buffer::guest(device, MIB)?, to: Buffer::guest(device, 64 * KIB)? })
    }
}

impl Work for Rectangle {
    fn name(&self) -> &'static str {
        "rectangle"
    }

    fn amount(&self) -> (f64, &'static str) {
        (f64::from(Self::WIDTH * Self::ROWS), "bytes")
    }

    fn prepare(&self) {
        let words: Vec<u32> = (0..MIB / 4).map(pattern).collect();
        self.from.store(0, &words);
        self.to.window().fill(0xee);
    }

    fn push(&self, methods: &mut Methods) {
        let to = Surface { va: self.to.va(), pitch: Self::TO_PITCH };
        let from = Surface { va: self.from.va() + Self::CORNER, pitch: Self::FROM_PITCH };
        rectangle(methods, to, from, Self::WIDTH, Self::ROWS);
    }

    fn verify(&self) -> Result<u64, GuestError> {
        let words: Vec<u32> = self.to.load(0, (Self::TO_PITCH * Self::ROWS / 4) as usize);
        compare(self.name(), &words, |index| {
            let (row, column) =
                (index as u32 / (Self::TO_PITCH / 4), index as u32 % (Self::TO_PITCH / 4));
            if column * 4 >= Self::WIDTH {
                return 0xeeee_eeee;
            }
            let at = Self::CORNER + u64::from(row) * u64::from(Self::FROM_PITCH);
            pattern(at / 4 + u64::from(column))
        })
    }
}
