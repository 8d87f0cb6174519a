//! Buffers that both the CPU and the GPU can access.

use mdev_core::units::PAGE_SIZE;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::GuestError;
use crate::device::Device;
use crate::platform::{GuestPages, Window};

/// Memory mapped into the GPU's address space; unmapped and freed when dropped.
#[derive(Debug)]
pub struct Buffer {
    device: Device,
    va: u64,
    len: u64,
    place: Option<Place>,
}

#[derive(Debug)]
enum Place {
    Guest(GuestPages),
    Vram(u64),
    Scanout(u64),
}

/// Location of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Home {
    /// Guest RAM.
    Guest,
    /// Video memory.
    Vram,
}

impl Buffer {
    /// Allocates zeroed memory, with `len` rounded up to whole pages.
    pub fn new(device: &Device, home: Home, len: u64) -> Result<Self, GuestError> {
        match home {
            Home::Guest => Self::guest(device, len),
            Home::Vram => Self::vram(device, len),
        }
    }

    /// Allocates guest RAM.
    pub fn guest(device: &Device, len: u64) -> Result<Self, GuestError> {
        let len = whole_pages(len)?;
        let pages = device.platform().allocate(len)?;
        let va = device.map_guest(pages.ranges(), len)?;
        Ok(Self { device: device.clone(), va, len, place: Some(Place::Guest(pages)) })
    }

    /// Allocates and clears video memory outside of the display's part.
    pub fn vram(device: &Device, len: u64) -> Result<Self, GuestError> {
        let len = whole_pages(len)?;
        let aperture = device.platform().vram().ok_or(GuestError::Unsupported("VRAM aperture"))?;
        let buffer = Self::video(device, len)?;
        if !matches!(buffer.place, Some(Place::Vram(offset)) if offset + len <= aperture.len()) {
            return Err(GuestError::Exhausted { what: "VRAM aperture", asked: len });
        }
        buffer.window().fill(0);
        Ok(buffer)
    }

    /// Allocates video memory that the CPU need not access, without clearing it.
    pub fn video(device: &Device, len: u64) -> Result<Self, GuestError> {
        let len = whole_pages(len)?;
        let offset = device.take_vram(len)?;
        let va = device.map_vram(offset, len).inspect_err(|_| device.give_vram(offset, len))?;
        Ok(Self { device: device.clone(), va, len, place: Some(Place::Vram(offset)) })
    }

    /// Maps a part of the display's video memory, which the display keeps using.
    pub fn scanout(device: &Device, offset: u64, len: u64) -> Result<Self, GuestError> {
        let len = whole_pages(len)?;
        let aperture = device.platform().vram().ok_or(GuestError::Unsupported("VRAM aperture"))?;
        if !offset.is_multiple_of(PAGE_SIZE) || offset.saturating_add(len) > aperture.len() {
            return Err(GuestError::Invalid(format!(
                "a screen of {len} bytes at {offset:#x} does not lie in video memory"
            )));
        }
        let va = device.map_vram(offset, len)?;
        Ok(Self { device: device.clone(), va, len, place: Some(Place::Scanout(offset)) })
    }

    /// Returns the GPU virtual address.
    pub fn va(&self) -> u64 {
        self.va
    }

    /// Returns the length in bytes, a multiple of the page size.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns false: a buffer is never empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the guest-physical address of a byte of guest RAM.
    pub fn physical(&self, offset: u64) -> Option<u64> {
        match &self.place {
            Some(Place::Guest(pages)) => pages.physical(offset),
            _ => None,
        }
    }

    /// Returns the CPU's window. Memory of [`Self::video`] may lie outside of the CPU's aperture.
    pub fn window(&self) -> Window<'_> {
        let aperture = |offset| {
            self.device.platform().vram().map(|vram: Window<'_>| vram.part(offset, self.len))
        };
        let window = match &self.place {
            Some(Place::Guest(pages)) => Some(pages.window()),
            Some(Place::Vram(offset) | Place::Scanout(offset)) => aperture(*offset),
            None => None,
        };
        match window {
            Some(window) => window,
            None => unreachable!("a buffer has a place, and video memory an aperture"),
        }
    }

    /// Writes values, starting at byte `offset`.
    pub fn store<T: IntoBytes + Immutable>(&self, offset: u64, values: &[T]) {
        self.window().write(offset, values.as_bytes());
    }

    /// Reads `count` values, starting at byte `offset`.
    pub fn load<T: FromBytes + FromZeros + IntoBytes + Immutable + Clone>(
        &self,
        offset: u64,
        count: usize,
    ) -> Vec<T> {
        let mut values = vec![T::new_zeroed(); count];
        self.window().read(offset, values.as_mut_slice().as_mut_bytes());
        values
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let unmapped = self.device.unmap(self.va, self.len).is_ok();
        match self.place.take() {
            Some(Place::Vram(offset)) if unmapped => self.device.give_vram(offset, self.len),
            // The GPU may still write to pages that it failed to unmap, so they are never reused.
            Some(Place::Guest(pages)) if !unmapped => std::mem::forget(pages),
            _ => {}
        }
    }
}

fn whole_pages(len: u64) -> Result<u64, GuestError> {
    match len.checked_next_multiple_of(PAGE_SIZE) {
        Some(len) if len > 0 => Ok(len),
        _ => Err(GuestError::Invalid(format!("a buffer of {len} bytes"))),
    }
}
