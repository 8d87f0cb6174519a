//! A validated display mode, in the units of the adapter's registers.

use std::fmt;

use mdev_core::device::Scanout;

use super::memory::Range;

/// Error of a guest's mode that the physical screen cannot show.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModeError {
    /// The scanout exceeds the partition. Only a faulty worker sends such a scanout, since the
    /// emulated registers cannot express it.
    #[error("The picture exceeds the vGPU's video memory")]
    Outside,
    /// A register cannot hold a value of the mode.
    #[error("The screen cannot show {width}x{height} with {bits} bits: {why}")]
    Unshowable {
        /// Width in pixels.
        width: u32,
        /// Height in pixels.
        height: u32,
        /// Bits per pixel.
        bits: u32,
        /// Reason.
        why: &'static str,
    },
}

/// A display mode in register values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Visible width in pixels.
    pub width: u16,
    /// Visible height in pixels.
    pub height: u16,
    /// Bits per pixel.
    pub bits: u16,
    /// Stride in pixels.
    pub stride: u16,
    /// Horizontal offset in pixels.
    pub x: u16,
    /// Vertical offset in rows.
    pub y: u16,
    /// Whether pixels are big-endian.
    pub big_endian: bool,
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{} with {} bits", self.width, self.height, self.bits)
    }
}

impl Mode {
    /// Converts a scanout in `memory` to register values. Returns `None` for a disabled scanout.
    pub fn of(scanout: &Scanout, memory: Range) -> Result<Option<Self>, ModeError> {
        let Scanout { enabled, width, height, stride, bits_per_pixel: bits, offset, big_endian } =
            *scanout;
        if !enabled {
            return Ok(None);
        }
        let unshowable = |why| ModeError::Unshowable { width, height, bits, why };
        let pixel = match bits {
            8 => 1,
            15 | 16 => 2,
            24 => 3,
            32 => 4,
            _ => return Err(unshowable("the colour depth is not supported")),
        };
        if width == 0 || height == 0 {
            return Err(unshowable("the picture is empty"));
        }
        let (row, stride) = (u64::from(width) * pixel, u64::from(stride));
        let rows = u64::from(height - 1).checked_mul(stride);
        let end = rows.and_then(|rows| rows.checked_add(row)?.checked_add(offset));
        if stride < row || end.is_none_or(|end| end > memory.len) {
            return Err(ModeError::Outside);
        }
        // The check above covers the first to the last pixel, so the mode stays inside the
        // adapter's memory.
        let start = memory.offset + offset;
        let (y, rest) = (start / stride, start % stride);
        if !stride.is_multiple_of(pixel) || !rest.is_multiple_of(pixel) {
            return Err(unshowable("its memory does not begin at a whole pixel"));
        }
        let register =
            |value: u64| u16::try_from(value).map_err(|_| unshowable("the picture is too large"));
        Ok(Some(Self {
            width: register(width.into())?,
            height: register(height.into())?,
            bits: bits as u16,
            stride: register(stride / pixel)?,
            x: register(rest / pixel)?,
            y: register(y)?,
            big_endian,
        }))
    }

    /// Returns the displayed memory, from the first to the last pixel.
    pub fn memory(&self) -> Range {
        let pixel = u64::from(self.bits.div_ceil(8));
        let row = u64::from(self.stride) * pixel;
        let offset = u64::from(self.y) * row + u64::from(self.x) * pixel;
        let rows = u64::from(self.height).saturating_sub(1) * row;
        Range { offset, len: rows + u64::from(self.width) * pixel }
    }
}

#[cfg(test)]
mod tests {
    use mdev_core::units::MIB;
    use proptest::prelude::*;

    use super::*;

    fn scanout(width: u32, height: u32, bits_per_pixel: u32) -> Scanout {
        let stride = width * bits_per_pixel.div_ceil(8);
        Scanout { enabled: true, width, height, stride, bits_per_pixel, ..Scanout::default() }
    }

    #[test]
    fn any_offset_of_whole_pixels_has_a_mode() {
        let memory = Range { offset: 4 * MIB, len: 4 * MIB };
        let mode = Mode::of(&scanout(1024, 768, 32), memory).unwrap().unwrap();
        assert_eq!((mode.x, mode.y, mode.stride), (0, 1024, 1024));
        // 4 MiB is not a multiple of this stride.
        let mode = Mode::of(&scanout(800, 600, 32), memory).unwrap().unwrap();
        assert_eq!((mode.y, mode.x), (1310, 576));
        assert_eq!(mode.memory(), Range { offset: 4 * MIB, len: 800 * 600 * 4 });
        let panned = Scanout { offset: 40 + 2 * 3200, ..scanout(800, 600, 32) };
        let mode = Mode::of(&panned, memory).unwrap().unwrap();
        assert_eq!(mode.memory().offset, 4 * MIB + 6440);
        assert_eq!(Mode::of(&Scanout::default(), memory), Ok(None));
    }

    #[test]
    fn modes_outside_memory_or_registers_are_refused() {
        let memory = Range { offset: 4 * MIB, len: 4 * MIB };
        let refused = |scanout: Scanout| Mode::of(&scanout, memory).unwrap_err().to_string();
        for outside in [
            scanout(1024, 1025, 32),
            Scanout { offset: 4 * MIB, ..scanout(1, 1, 32) },
            Scanout { offset: u64::MAX, ..scanout(1, 1, 32) },
            Scanout { stride: 4, ..scanout(800, 600, 32) },
            Scanout { stride: u32::MAX, height: u32::MAX, ..scanout(800, 600, 32) },
        ] {
            assert_eq!(refused(outside), ModeError::Outside.to_string());
        }
        assert!(refused(scanout(640, 480, 24)).contains("does not begin at a whole pixel"));
        assert!(refused(scanout(640, 480, 12)).contains("colour depth is not supported"));
        assert!(refused(scanout(0, 480, 32)).contains("empty"));
        assert!(refused(scanout(70_000, 2, 8)).contains("too large"));
    }

    proptest! {
        #[test]
        fn a_mode_shows_exactly_the_scanout(
            width in 1..4096_u32,
            height in 1..3000_u32,
            more in 0..64_u32,
            depth in 0..5_usize,
            offset in 0..8 * MIB,
            partition in 0..16_u64,
        ) {
            let bits_per_pixel = [8_u32, 15, 16, 24, 32][depth];
            let bytes = bits_per_pixel.div_ceil(8);
            let stride = (width + more) * bytes;
            let scanout = Scanout { offset, stride, ..scanout(width, height, bits_per_pixel) };
            let memory = Range { offset: partition * 16 * MIB, len: 16 * MIB };
            if let Ok(mode) = Mode::of(&scanout, memory) {
                let mode = mode.unwrap();
                let shown = mode.memory();
                prop_assert_eq!(shown.offset, memory.offset + offset);
                prop_assert_eq!(shown.len, u64::from((height - 1) * stride + width * bytes));
                prop_assert_eq!(u32::from(mode.stride) * bytes, stride);
                prop_assert!(offset + shown.len <= memory.len);
            }
        }
    }
}
