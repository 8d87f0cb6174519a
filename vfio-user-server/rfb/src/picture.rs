//! Size and pixel format of a picture in memory.

use std::io;

/// Size and pixel format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Width, in pixels.
    pub width: u32,
    /// Height, in pixels.
    pub height: u32,
    /// Pixel format.
    pub format: Format,
}

impl Shape {
    /// Returns the size of a row, in bytes.
    pub fn row_bytes(self) -> usize {
        self.width as usize * self.format.bytes
    }
}

/// Pixel format in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    bits: u32,
    bytes: usize,
    big_endian: bool,
}

impl Format {
    /// Four bytes: blue, green, red, unused.
    pub const XRGB: Self = Self { bits: 32, bytes: 4, big_endian: false };

    /// Creates a format with a number of bits per pixel.
    pub fn new(bits: u32, big_endian: bool) -> io::Result<Self> {
        let bytes = match bits {
            8 => 1,
            15 | 16 => 2,
            24 => 3,
            32 => 4,
            _ => return Err(invalid(format!("it has {bits} bits per pixel"))),
        };
        Ok(Self { bits, bytes, big_endian })
    }

    /// Returns the size of a pixel, in bytes.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// Converts a pixel to red, green and blue. The palette of 8-bit modes is not in video memory;
    /// they become shades of grey.
    pub fn rgb(self, pixel: &[u8]) -> [u8; 3] {
        if let (Self::XRGB, [blue, green, red, _]) = (self, pixel) {
            return [*red, *green, *blue];
        }
        let mut value = 0_u32;
        for (place, byte) in pixel.iter().enumerate() {
            let shift = if self.big_endian { pixel.len() - 1 - place } else { place };
            value |= u32::from(*byte) << (8 * shift);
        }
        let field = |low: u32, bits: u32| {
            let max = (1 << bits) - 1;
            (((value >> low) & max) * 255 / max) as u8
        };
        match self.bits {
            8 => [value as u8; 3],
            15 => [field(10, 5), field(5, 5), field(0, 5)],
            16 => [field(11, 5), field(5, 6), field(0, 5)],
            _ => [field(16, 8), field(8, 8), field(0, 8)],
        }
    }
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}
