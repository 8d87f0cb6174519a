//! Regions of a VFIO PCI device.

use std::os::fd::{AsFd, BorrowedFd};

use pci_registers::{Bar, BarWidth};

use super::{DeviceError, FunctionSpec, display};
use crate::abi::{control, doorbell};
use crate::gpu::{Aperture, Client};
use crate::units::PAGE_SIZE;

/// Number of VFIO region indexes of a PCI device: BARs 0 to 5, ROM, configuration space, VGA.
pub const REGIONS: u32 = 9;

/// Region of a PCI device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Region {
    /// Base address register, 0 to 5.
    Bar(u8),
    /// Expansion ROM. The device has none.
    Rom,
    /// Configuration space.
    Config,
    /// Legacy VGA ranges. The device has none.
    Vga,
}

impl Region {
    /// Returns the region with a VFIO index.
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

/// Description of a region.
#[derive(Clone, Copy, Debug)]
pub struct RegionInfo<'a> {
    /// Length in bytes; 0 for an absent region.
    pub size: u64,
    /// True if the client may read the region by messages.
    pub readable: bool,
    /// True if the client may write the region by messages.
    pub writable: bool,
    /// Part of the region that the client may map.
    pub mapping: Option<RegionMapping<'a>>,
}

/// Part of a region that a client may map, from offset 0 of the region.
#[derive(Clone, Copy, Debug)]
pub struct RegionMapping<'a> {
    /// The file.
    pub fd: BorrowedFd<'a>,
    /// Page-aligned offset in the file.
    pub offset: u64,
    /// Length in bytes. The rest of the region is trapped.
    pub len: u64,
}

impl<'a> From<&'a Aperture> for RegionMapping<'a> {
    fn from(aperture: &'a Aperture) -> Self {
        Self { fd: aperture.fd.as_fd(), offset: aperture.offset, len: aperture.len }
    }
}

/// Register whose writes a hypervisor can deliver by an eventfd instead of a trap.
#[derive(Clone, Copy, Debug)]
pub struct RegionEvent<'a> {
    /// Offset of the register.
    pub offset: u64,
    /// Length of the register in bytes.
    pub len: u64,
    /// The eventfd. It does not carry the written value.
    pub fd: BorrowedFd<'a>,
}

/// Contents of a vGPU's BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BarKind {
    /// Display framebuffer: the start of video memory.
    Framebuffer,
    /// Doorbell page.
    Doorbell,
    /// Display registers.
    Display,
    /// Control registers.
    Control,
    /// All of video memory.
    Vram,
}

impl BarKind {
    /// Returns the number of the BAR.
    pub const fn index(self) -> u8 {
        match self {
            Self::Framebuffer => 0,
            Self::Doorbell => 1,
            Self::Display => 2,
            Self::Control => 3,
            Self::Vram => 4,
        }
    }

    /// Returns the contents of the BAR with this number.
    pub const fn from_index(index: u8) -> Option<Self> {
        Some(match index {
            0 => Self::Framebuffer,
            1 => Self::Doorbell,
            2 => Self::Display,
            3 => Self::Control,
            4 => Self::Vram,
            _ => return None,
        })
    }

    /// Returns the description in register tables.
    const fn doc(self) -> &'static str {
        match self {
            Self::Framebuffer => "Framebuffer",
            Self::Doorbell => "Doorbell page",
            Self::Display => "Display registers",
            Self::Control => "Control registers",
            Self::Vram => "Video memory",
        }
    }
}

/// Returns the BARs for a specification and the granted resources.
pub(super) fn bars(spec: &FunctionSpec, client: &dyn Client) -> Result<Vec<Bar>, DeviceError> {
    let apertures = client.apertures();
    let mut bars = Vec::new();
    let mut add = |kind: BarKind, len: u64, width, prefetchable| {
        let Some(size) = len.max(PAGE_SIZE).checked_next_power_of_two() else {
            return Err(DeviceError::Invalid("An aperture exceeds 2^63 bytes"));
        };
        if width == BarWidth::Bits32 && size > 1 << 31 {
            return Err(DeviceError::Invalid("An aperture exceeds its 32-bit BAR"));
        }
        bars.push(Bar { index: kind.index(), doc: kind.doc(), size, width, prefetchable });
        Ok(())
    };
    if spec.display.is_some() {
        let len = apertures.framebuffer.as_ref().map_or(0, |aperture| aperture.len);
        add(BarKind::Framebuffer, len, BarWidth::Bits32, true)?;
        add(BarKind::Display, display::BAR_BYTES, BarWidth::Bits32, false)?;
    }
    let page = apertures.doorbell.as_ref().map_or(0, |aperture| aperture.len);
    add(BarKind::Doorbell, page.max(doorbell::PAGE_BYTES), BarWidth::Bits32, false)?;
    add(BarKind::Control, control::BAR_BYTES, BarWidth::Bits32, false)?;
    if let Some(vram) = &apertures.vram {
        add(BarKind::Vram, vram.len, BarWidth::Bits64, true)?;
    }
    Ok(bars)
}
