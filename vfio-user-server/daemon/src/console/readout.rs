//! Reads a vGPU's screen from video memory.
//!
//! The description of the screen comes from the guest, by way of the worker, and is not trusted.
//! Sizes are bounded. Video memory is read with `pread`, so that a wrong offset or a shrinking file
//! is only an error. Files of physical video memory can only be mapped; the mapping survives the
//! same faults. Rows of one read can belong to different frames.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use ipc::mem::Mapping;
use mdev_core::device::Scanout;
use mdev_core::units::PAGE_SIZE;
use rfb::picture::{Format, Shape};

/// Limit of width and height, in pixels. No mode is larger; the display registers have 16 bits.
const MAX_SIDE: u32 = 8192;

/// Limit of the number of pixels: 4096 by 4096. A PNG of noise takes three bytes per pixel.
const MAX_PIXELS: u64 = 1 << 24;

/// Screen within its video memory.
#[derive(Debug)]
pub struct Readout {
    memory: Memory,
    /// Offset of the first pixel in `memory`.
    offset: u64,
    stride: u64,
    shape: Shape,
}

/// Access to video memory.
#[derive(Debug)]
enum Memory {
    File(File),
    Mapped(Arc<Mapping>),
}

impl Readout {
    /// Checks that the screen that `scanout` describes is within a file of video memory.
    pub fn new(scanout: &Scanout, memory: OwnedFd) -> io::Result<Self> {
        let memory = File::from(memory);
        let (width, height) = (scanout.width, scanout.height);
        let format = Format::new(scanout.bits_per_pixel, scanout.big_endian)?;
        let pixels = u64::from(width) * u64::from(height);
        if width == 0 || height == 0 || width.max(height) > MAX_SIDE || pixels > MAX_PIXELS {
            return Err(invalid(format!("its size is {width} by {height} pixels")));
        }
        let shape = Shape { width, height, format };
        let (stride, row_bytes) = (u64::from(scanout.stride), shape.row_bytes() as u64);
        if stride < row_bytes {
            return Err(invalid(format!("its rows overlap: {stride} bytes for {width} pixels")));
        }
        let rows = u64::from(height - 1) * stride + row_bytes;
        let end = scanout.offset.checked_add(rows);
        let end = end.filter(|end| {
            i64::try_from(*end).is_ok() && memory.metadata().is_ok_and(|file| file.is_file())
        });
        let end = end.ok_or_else(|| invalid("it is outside of video memory".into()))?;
        let (memory, offset) = match memory.read_at(&mut [0], scanout.offset) {
            Ok(_) => (Memory::File(memory), scanout.offset),
            Err(error) => mapped(&memory, scanout.offset, end).map_err(|_| error)?,
        };
        Ok(Self { memory, offset, stride, shape })
    }

    /// Returns size and pixel format.
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

/// Maps a range of a file that cannot be read. Returns the mapping and the offset of the range in
/// it.
fn mapped(file: &File, start: u64, end: u64) -> io::Result<(Memory, u64)> {
    let page = start / PAGE_SIZE * PAGE_SIZE;
    let mapping = Mapping::new(file.as_fd(), page, end.next_multiple_of(PAGE_SIZE) - page, false)?;
    Ok((Memory::Mapped(mapping), start - page))
}

fn invalid(message: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_reads_the_same_bytes() {
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
        assert!(screen.read_row(0, &mut row).is_err(), "the file has shrunk");
        assert!(mapped(&file, u64::MAX - 8 * PAGE_SIZE, u64::MAX - 7 * PAGE_SIZE).is_err());
    }
}
