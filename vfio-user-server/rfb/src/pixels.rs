//! Colours in a client's pixel format.

/// Pixel format of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PixelFormat {
    bits: u8,
    depth: u8,
    big_endian: bool,
    /// Maximum values of red, green and blue.
    max: [u16; 3],
    /// Bit positions of red, green and blue.
    shift: [u8; 3],
}

/// Unsupported pixel format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadFormat {
    /// Bits per pixel other than 8, 16 and 32.
    #[error("The viewer wants pixels of {0} bits; 8, 16 and 32 are supported")]
    Bits(u8),
    /// Colour map instead of true colours.
    #[error("The viewer wants a palette; only true colours are supported")]
    Palette,
    /// Colours outside of the pixel.
    #[error("The viewer wants colours that do not fit into its pixels")]
    Room,
}

impl PixelFormat {
    /// The server's format: 32 bits, blue in the lowest byte.
    pub const XRGB: Self =
        Self { bits: 32, depth: 24, big_endian: false, max: [255; 3], shift: [16, 8, 0] };

    /// Parses a PIXEL_FORMAT structure (RFC 6143, section 7.4).
    pub fn parse(bytes: &[u8; 16]) -> Result<Self, BadFormat> {
        let [bits, depth, big_endian, true_colour, r0, r1, g0, g1, b0, b1, red, green, blue, ..] =
            *bytes;
        if ![8, 16, 32].contains(&bits) {
            return Err(BadFormat::Bits(bits));
        }
        if true_colour == 0 {
            return Err(BadFormat::Palette);
        }
        let max = [[r0, r1], [g0, g1], [b0, b1]].map(u16::from_be_bytes);
        let shift = [red, green, blue];
        let fits = |(max, shift): (&u16, &u8)| {
            let width = u16::BITS - max.leading_zeros();
            width + u32::from(*shift) <= u32::from(bits)
        };
        if !max.iter().zip(&shift).all(fits) {
            return Err(BadFormat::Room);
        }
        Ok(Self { bits, depth, big_endian: big_endian != 0, max, shift })
    }

    /// Returns the PIXEL_FORMAT structure.
    pub fn bytes(self) -> [u8; 16] {
        let [[r0, r1], [g0, g1], [b0, b1]] = self.max.map(u16::to_be_bytes);
        let [red, green, blue] = self.shift;
        let big_endian = u8::from(self.big_endian);
        [self.bits, self.depth, big_endian, 1, r0, r1, g0, g1, b0, b1, red, green, blue, 0, 0, 0]
    }
}

/// Converter of colours to a pixel format.
#[derive(Clone, Debug)]
pub struct Packer {
    bytes: usize,
    big_endian: bool,
    /// Bytes of a pixel that a compressed pixel (ZRLE's CPIXEL) contains.
    compressed: std::ops::Range<usize>,
    tables: [[u32; 256]; 3],
}

impl Packer {
    /// Creates a converter to a format.
    pub fn new(format: &PixelFormat) -> Self {
        let table = |colour: usize| {
            let (max, shift) = (u32::from(format.max[colour]), format.shift[colour]);
            std::array::from_fn(|value| ((value as u32 * max + 127) / 255) << shift)
        };
        let tables = [table(0), table(1), table(2)];
        let used = tables.iter().fold(0, |used, table: &[u32; 256]| used | table[255]);
        let bytes = usize::from(format.bits) / 8;
        let small = format.bits == 32 && format.depth <= 24;
        let compressed = match (small, used >> 24 == 0, used.trailing_zeros() >= 8) {
            (true, true, _) if format.big_endian => 1..4,
            (true, true, _) => 0..3,
            (true, false, true) if format.big_endian => 0..3,
            (true, false, true) => 1..4,
            _ => 0..bytes,
        };
        Self { bytes, big_endian: format.big_endian, compressed, tables }
    }

    fn value(&self, [red, green, blue]: [u8; 3]) -> [u8; 4] {
        let [reds, greens, blues] = &self.tables;
        let value = reds[usize::from(red)] | greens[usize::from(green)] | blues[usize::from(blue)];
        if self.big_endian {
            (value << (32 - 8 * self.bytes as u32)).to_be_bytes()
        } else {
            value.to_le_bytes()
        }
    }

    /// Appends a pixel.
    pub fn put(&self, colour: [u8; 3], out: &mut Vec<u8>) {
        out.extend_from_slice(&self.value(colour)[..self.bytes]);
    }

    /// Appends a compressed pixel (ZRLE's CPIXEL), without an unused byte.
    pub fn put_compressed(&self, colour: [u8; 3], out: &mut Vec<u8>) {
        out.extend_from_slice(&self.value(colour)[self.compressed.clone()]);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn format(bits: u8, depth: u8, big: bool, max: [u16; 3], shift: [u8; 3]) -> PixelFormat {
        PixelFormat { bits, depth, big_endian: big, max, shift }
    }

    #[test]
    fn colours_are_converted_to_each_format() {
        let orange = [255, 165, 0];
        let rgb565 = ([31, 63, 31], [11, 5, 0]);
        for (format, pixel, compressed) in [
            (PixelFormat::XRGB, &[0, 165, 255, 0][..], &[0, 165, 255][..]),
            (format(32, 24, true, [255; 3], [16, 8, 0]), &[0, 255, 165, 0], &[255, 165, 0]),
            (format(32, 24, false, [255; 3], [24, 16, 8]), &[0, 0, 165, 255], &[0, 165, 255]),
            (format(32, 32, false, [255; 3], [16, 8, 0]), &[0, 165, 255, 0], &[0, 165, 255, 0]),
            (format(16, 16, false, rgb565.0, rgb565.1), &[0x20, 0xfd], &[0x20, 0xfd]),
            (format(16, 16, true, rgb565.0, rgb565.1), &[0xfd, 0x20], &[0xfd, 0x20]),
            (format(8, 8, false, [7, 7, 3], [0, 3, 6]), &[0x2f], &[0x2f]),
        ] {
            assert_eq!(PixelFormat::parse(&format.bytes()), Ok(format));
            let packer = Packer::new(&format);
            let (mut plain, mut small) = (Vec::new(), Vec::new());
            packer.put(orange, &mut plain);
            packer.put_compressed(orange, &mut small);
            assert_eq!((&plain[..], &small[..]), (pixel, compressed), "{format:?}");
        }
    }

    #[test]
    fn unsupported_formats_are_refused() {
        let parse = |format: PixelFormat| PixelFormat::parse(&format.bytes());
        let room = Err(BadFormat::Room);
        assert_eq!(parse(format(24, 24, false, [255; 3], [16, 8, 0])), Err(BadFormat::Bits(24)));
        assert_eq!(parse(format(16, 16, false, [255; 3], [16, 8, 0])), room);
        assert_eq!(parse(format(32, 24, false, [255; 3], [255, 8, 0])), room);
        for (bad, message) in [
            (BadFormat::Bits(24), "The viewer wants pixels of 24 bits; 8, 16 and 32 are supported"),
            (BadFormat::Room, "The viewer wants colours that do not fit into its pixels"),
        ] {
            assert_eq!(bad.to_string(), message);
        }
    }

    proptest! {
        #[test]
        fn any_format_converts_without_panic(bytes: [u8; 16], colour: [u8; 3]) {
            if let Ok(format) = PixelFormat::parse(&bytes) {
                let mut out = Vec::new();
                Packer::new(&format).put(colour, &mut out);
                prop_assert_eq!(out.len() * 8, usize::from(bytes[0]));
            }
        }
    }
}
