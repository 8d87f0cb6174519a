//! Reading a vGPU's screen out of its video memory.
//!
//! What a worker says of the screen comes from its guest, and the worker itself reads what its guest wrote: nothing of
//! it is trusted. Sizes are bounded, and video memory is read with `pread`, so that neither a wrong offset nor a file
//! that shrinks is more than an error. Files of physical video memory cannot be read, only mapped: then it is a mapping
//! that survives the same. What is read is what a moment shows: rows may be of different frames.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use mdev_core::device::Scanout;
use mdev_core::units::PAGE_SIZE;
use vendor_backends::mem::Mapping;

/// Longest row, and most rows: what the display registers' 16 bits could say is more than any mode.
const MAX_SIDE: u32 = 8192;

/// Most pixels: 4096 by 4096. A picture of noise takes three bytes for each.
const MAX_PIXELS: u64 = 1 << 24;

/// A screen that was found to be in its video memory.
#[derive(Debug)]
pub struct Readout {
    memory: Memory,
    /// Where in it the first pixel is.
    offset: u64,
    stride: u64,
    shape: Shape,
}

/// How video memory is read.
#[derive(Debug)]
enum Memory {
    File(File),
    Mapped(Arc<Mapping>),
}

/// What a screen's pixels are like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// How a pixel is in memory.
    pub format: Format,
}

impl Shape {
    /// Bytes of a row's pixels.
    pub fn row_bytes(self) -> usize {
        self.width as usize * self.format.bytes
    }
}

impl Readout {
    /// What a scanout says is in a file, checked.
    pub fn new(scanout: &Scanout, memory: OwnedFd) -> io::Result<Self> {
        let memory = File::from(memory);
        let (width, height) = (scanout.width, scanout.height);
        let format = Format::new(scanout.bits_per_pixel, scanout.big_endian)?;
        let pixels = u64::from(width) * u64::from(height);
        if width == 0 || height == 0 || width.max(height) > MAX_SIDE || pixels > MAX_PIXELS {
            return Err(invalid(format!("it is {width} by {height} pixels")));
        }
        let shape = Shape { width, height, format };
        let (stride, row_bytes) = (u64::from(scanout.stride), shape.row_bytes() as u64);
        if stride < row_bytes {
            return Err(invalid(format!("its rows overlap: {stride} bytes for {width} pixels")));
        }
        let rows = u64::from(height - 1) * stride + row_bytes;
        let end = scanout.offset.checked_add(rows);
        let end = end.filter(|end| {
            i64::try_from(*end).is_ok() && memory.metadata().is_ok_and(|it| it.is_file())
        });
        let end = end.ok_or_else(|| invalid("it is outside of video memory".into()))?;
        let (memory, offset) = match memory.read_at(&mut [0], scanout.offset) {
            Ok(_) => (Memory::File(memory), scanout.offset),
            Err(error) => mapped(&memory, scanout.offset, end).map_err(|_| error)?,
        };
        Ok(Self { memory, offset, stride, shape })
    }

    /// What its pixels are like.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Reads one row's pixels; `row` is [`Shape::row_bytes`] long.
    pub fn read_row(&self, y: u32, row: &mut [u8]) -> io::Result<()> {
        let at = self.offset + u64::from(y) * self.stride;
        match &self.memory {
            Memory::File(file) => file.read_exact_at(row, at),
            Memory::Mapped(mapping) => match mapping.read(at, row) {
                Some(()) if !mapping.poisoned() => Ok(()),
                _ => Err(io::ErrorKind::UnexpectedEof.into()),
            },
        }
    }
}

/// Maps a range of a file that cannot be read; also where in the mapping the range begins.
fn mapped(file: &File, start: u64, end: u64) -> io::Result<(Memory, u64)> {
    let page = start / PAGE_SIZE * PAGE_SIZE;
    let mapping = Mapping::new(file.as_fd(), page, end.next_multiple_of(PAGE_SIZE) - page, false)?;
    Ok((Memory::Mapped(mapping), start - page))
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// How a pixel is in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Format {
    bits: u32,
    bytes: usize,
    big_endian: bool,
}

impl Format {
    /// Four bytes: blue, green, red, and one that says nothing.
    pub const XRGB: Self = Self { bits: 32, bytes: 4, big_endian: false };

    /// One of so many bits.
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

    /// Bytes of a pixel.
    pub fn bytes(self) -> usize {
        self.bytes
    }

    /// One pixel as red, green and blue. Modes of 8 bits have a palette that is not in video memory; they show as
    /// shades of grey.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_is_mapped_and_shows_the_same() {
        let file = tempfile::tempfile().unwrap();
        let bytes: Vec<u8> = (0..4 * PAGE_SIZE as usize).map(|n| (n * 7 / 3) as u8).collect();
        file.write_all_at(&bytes, 0).unwrap();
        let (start, end) = (PAGE_SIZE + 20, 3 * PAGE_SIZE + 44);
        let (memory, offset) = mapped(&file, start, end).unwrap();
        let shape = Shape { width: 8, height: 2, format: Format::XRGB };
        let stride = 2 * PAGE_SIZE - 8;
        let screen = Readout { memory, offset, stride, shape };
        let mut row = [0; 32];
        for y in 0..2 {
            screen.read_row(y, &mut row).unwrap();
            let at = (start + u64::from(y) * stride) as usize;
            assert_eq!(row, bytes[at..at + 32]);
        }
        file.set_len(PAGE_SIZE).unwrap();
        assert!(screen.read_row(0, &mut row).is_err(), "it has shrunk");
        assert!(mapped(&file, u64::MAX - 8 * PAGE_SIZE, u64::MAX - 7 * PAGE_SIZE).is_err());
    }
}
