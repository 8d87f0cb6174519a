//! The regions of a VFIO device, by VFIO's numbers.

use std::os::fd::{AsFd, BorrowedFd};

use super::{DeviceError, FunctionSpec, display};
use crate::abi::{control, doorbell};
use crate::gpu::{Aperture, Client};
use crate::pci::{Bar, BarKind, BarWidth};
use crate::units::PAGE_SIZE;

/// Regions that a PCI device has in VFIO's numbering: BARs 0 to 5, ROM, configuration space, VGA.
pub const REGIONS: u32 = 9;

/// A region by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// A base address register, 0 to 5.
    Bar(u8),
    /// The expansion ROM: there is none.
    Rom,
    /// Configuration space.
    Config,
    /// Legacy VGA ranges: there are none.
    Vga,
}

impl Region {
    /// The region with VFIO's number `index`.
    pub const fn from_index(index: u32) -> Option<Self> {
        Some(match index {
            0..=5 => Self::Bar(index as u8),
            6 => Self::Rom,
            7 => Self::Config,
            8 => Self::Vga,
            _ => return None,
        })
    }
}

/// What a client learns about a region.
#[derive(Clone, Copy, Debug)]
pub struct RegionInfo<'a> {
    /// Length in bytes; 0 where there is no such region.
    pub size: u64,
    /// May be read by messages.
    pub readable: bool,
    /// May be written by messages.
    pub writable: bool,
    /// What may be mapped of it.
    pub mapping: Option<RegionMapping<'a>>,
}

/// The one area of a region that a client may map. It starts at offset 0 of the region.
#[derive(Clone, Copy, Debug)]
pub struct RegionMapping<'a> {
    /// The file.
    pub fd: BorrowedFd<'a>,
    /// Where in the file it starts, in whole pages.
    pub offset: u64,
    /// Length in bytes. Where it is less than the region's, the rest is trapped.
    pub len: u64,
}

impl<'a> From<&'a Aperture> for RegionMapping<'a> {
    fn from(aperture: &'a Aperture) -> Self {
        Self { fd: aperture.fd.as_fd(), offset: aperture.offset, len: aperture.len }
    }
}

/// A register whose writes may come as a signal, with neither a trap nor the device model on the way.
#[derive(Clone, Copy, Debug)]
pub struct RegionEvent<'a> {
    /// Where the register is.
    pub offset: u64,
    /// Its length in bytes.
    pub len: u64,
    /// The eventfd. The value that is written is lost.
    pub fd: BorrowedFd<'a>,
}

/// The BARs of a function: what a grant and a type come down to.
pub(super) fn bars(spec: &FunctionSpec, client: &dyn Client) -> Result<Vec<Bar>, DeviceError> {
    let apertures = client.apertures();
    let mut bars = Vec::new();
    let mut add = |index, kind, len: u64, width, prefetchable| {
        let Some(size) = len.max(PAGE_SIZE).checked_next_power_of_two() else {
            return Err(DeviceError::Invalid("An aperture exceeds 2^63 bytes"));
        };
        if width == BarWidth::Bits32 && size > 1 << 31 {
            return Err(DeviceError::Invalid("An aperture exceeds its 32-bit BAR"));
        }
        bars.push(Bar { index, kind, size, width, prefetchable });
        Ok(())
    };
    if spec.display.is_some() {
        let len = apertures.framebuffer.as_ref().map_or(0, |aperture| aperture.len);
        add(0, BarKind::Framebuffer, len, BarWidth::Bits32, true)?;
        add(2, BarKind::Display, display::BAR_BYTES, BarWidth::Bits32, false)?;
    }
    let page = apertures.doorbell.as_ref().map_or(0, |aperture| aperture.len);
    add(1, BarKind::Doorbell, page.max(doorbell::PAGE_BYTES), BarWidth::Bits32, false)?;
    add(3, BarKind::Control, control::BAR_BYTES, BarWidth::Bits32, false)?;
    if let Some(vram) = &apertures.vram {
        add(4, BarKind::Vram, vram.len, BarWidth::Bits64, true)?;
    }
    Ok(bars)
}
