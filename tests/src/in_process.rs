//! Guest runtime platform on the device model, in one process.

use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::Context;
use mdev_core::abi::doorbell;
use mdev_core::device::{FunctionSpec, VirtualFunction};
use mdev_core::gpu::Client;
use mdev_core::ids::GuestPa;
use mdev_core::mem::DmaAccess;
use memmap2::{MmapOptions, MmapRaw};
use vgpu_guest::GuestError;
use vgpu_guest::platform::{GuestPages, Platform, Window};

use crate::ram::Ram;

/// VFIO region index of the display's framebuffer.
pub const FRAMEBUFFER: u32 = 0;
/// VFIO region index of the doorbell page.
pub const DOORBELL: u32 = 1;
pub(crate) const CONTROL: u32 = 3;
/// VFIO region index of video memory.
pub const VRAM: u32 = 4;
pub(crate) const CONFIG: u32 = 7;
/// Command register, and its value with memory space and bus mastering enabled.
pub(crate) const COMMAND: u64 = 4;
pub(crate) const MEMORY_AND_MASTER: [u8; 2] = [6, 0];

/// Virtual function with this process as the guest.
#[derive(Clone, Debug)]
pub struct InProcess(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    function: Mutex<VirtualFunction>,
    ram: Ram,
    doorbell: Option<MmapRaw>,
    vram: Option<MmapRaw>,
    scanout_bytes: u64,
}

impl InProcess {
    /// Creates the function, maps `ram` and enables the function as firmware does.
    pub fn new(spec: &FunctionSpec, client: Box<dyn Client>, ram: Ram) -> anyhow::Result<Self> {
        let mut function = VirtualFunction::new(spec, client)?;
        function.attach();
        let access = DmaAccess::READ | DmaAccess::WRITE;
        let file = (ram.fd().try_clone_to_owned()?, 0);
        function.dma_map(GuestPa(Ram::BASE), ram.len(), access, Some(file))?;
        function.region_write(CONFIG, COMMAND, &MEMORY_AND_MASTER)?;
        let map = |index| {
            let info = function.region(index).context("No such region")?;
            let map = |mapping: mdev_core::device::RegionMapping<'_>| {
                let len = mapping.len as usize;
                MmapOptions::new().offset(mapping.offset).len(len).map_raw(&mapping.fd)
            };
            anyhow::Ok(info.mapping.map(map).transpose()?)
        };
        let (doorbell, vram) = (map(DOORBELL)?, map(VRAM)?);
        let scanout_bytes = function.region(FRAMEBUFFER).map_or(0, |info| info.size);
        let function = Mutex::new(function);
        Ok(Self(Arc::new(Inner { function, ram, doorbell, vram, scanout_bytes })))
    }

    /// Locks the device between two accesses of the guest.
    pub fn function(&self) -> MutexGuard<'_, VirtualFunction> {
        self.0.function.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Platform for InProcess {
    fn location(&self) -> String {
        "in this process".into()
    }

    fn read32(&self, offset: u64) -> u32 {
        let mut bytes = [0xff; 4];
        let result = self.function().region_read(CONTROL, offset, &mut bytes);
        result.map_or(u32::MAX, |()| u32::from_le_bytes(bytes))
    }

    fn write32(&self, offset: u64, value: u32) {
        // On a PCI bus, a write that no device accepts is lost.
        let _ = self.function().region_write(CONTROL, offset, &value.to_le_bytes());
    }

    fn ring(&self, token: u32) {
        if let Some(page) = &self.0.doorbell {
            window(page).write32(doorbell::TOKEN, token);
        } else {
            let bytes = token.to_le_bytes();
            let _ = self.function().region_write(DOORBELL, doorbell::TOKEN, &bytes);
        }
    }

    fn vram(&self) -> Option<Window<'_>> {
        self.0.vram.as_ref().map(window)
    }

    fn scanout_bytes(&self) -> u64 {
        self.0.scanout_bytes
    }

    fn allocate(&self, bytes: u64) -> Result<GuestPages, GuestError> {
        self.0.ram.allocate(bytes)
    }
}

/// Returns a mapped aperture as a window.
pub fn window(mapping: &MmapRaw) -> Window<'_> {
    let base = NonNull::new(mapping.as_mut_ptr()).unwrap_or(NonNull::dangling());
    // SAFETY: the mapping outlives the borrow, is never at address 0, and is accessed through
    // windows only.
    unsafe { Window::new(base, mapping.len()) }
}
