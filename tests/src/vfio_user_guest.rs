//! Guest runtime platform over a vfio-user socket, with a memfd for guest RAM.

use std::fmt;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use mdev_core::abi::doorbell;
use memmap2::{MmapOptions, MmapRaw};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use vfio_user::Client;
use vgpu_guest::GuestError;
use vgpu_guest::platform::{GuestPages, Platform, Window};

use crate::in_process::{
    COMMAND, CONFIG, CONTROL, DOORBELL, FRAMEBUFFER, MEMORY_AND_MASTER, VRAM, window,
};
use crate::ram::Ram;

/// Device on a vfio-user socket, with this process as the guest.
pub struct VfioUserGuest {
    client: Mutex<Client>,
    ram: Ram,
    doorbell: Option<MmapRaw>,
    vram: Option<MmapRaw>,
    scanout_bytes: u64,
    /// Eventfd of the interrupts that [`Platform::wait`] waits for.
    interrupts: Option<EventFd>,
}

impl VfioUserGuest {
    /// Attaches to the device, maps `ram` and enables the device as firmware does.
    pub fn attach(socket: &Path, ram: Ram) -> anyhow::Result<Self> {
        let mut client = Client::new(socket)?;
        client.dma_map(0, Ram::BASE, ram.len(), ram.fd().as_raw_fd())?;
        client.region_write(CONFIG, COMMAND, &MEMORY_AND_MASTER)?;
        let map = |index| {
            let file = client.region(index).and_then(|region| {
                let offset = region.file_offset.as_ref()?;
                // If only a part can be mapped, the first area is the start of the region.
                let len = region.sparse_areas.first().map_or(region.size, |area| area.size);
                Some((offset.file(), offset.start(), len))
            });
            file.map(|(file, at, len)| {
                MmapOptions::new().offset(at).len(len as usize).map_raw(file)
            })
            .transpose()
        };
        let (doorbell, vram) = (map(DOORBELL)?, map(VRAM)?);
        let scanout_bytes = client.region(FRAMEBUFFER).map_or(0, |region| region.size);
        let client = Mutex::new(client);
        Ok(Self { client, ram, doorbell, vram, scanout_bytes, interrupts: None })
    }

    /// Attaches as [`Self::attach`] does; waits end with the function's interrupt.
    pub fn attach_with_interrupts(socket: &Path, ram: Ram) -> anyhow::Result<Self> {
        let mut guest = Self::attach(socket, ram)?;
        guest.interrupts = Some(guest.interrupt()?);
        Ok(guest)
    }

    /// Maps a file as further guest memory.
    pub fn map(&self, address: u64, len: u64, file: BorrowedFd<'_>) -> anyhow::Result<()> {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(client.dma_map(0, address, len, file.as_raw_fd())?)
    }

    /// Returns an eventfd that the function's first MSI vector signals.
    pub fn interrupt(&self) -> anyhow::Result<EventFd> {
        /// `VFIO_PCI_MSI_IRQ_INDEX`.
        const MSI: u32 = 1;
        /// `VFIO_IRQ_SET_DATA_EVENTFD | VFIO_IRQ_SET_ACTION_TRIGGER`.
        const TRIGGER_BY_EVENTFD: u32 = 0x24;
        let event = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        client.set_irqs(MSI, TRIGGER_BY_EVENTFD, 0, 1, &[event.as_fd().as_raw_fd()])?;
        Ok(event)
    }

    fn read(&self, region: u32, offset: u64) -> u32 {
        let mut bytes = [0xff; 4];
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        let result = client.region_read(region, offset, &mut bytes);
        result.map_or(u32::MAX, |()| u32::from_le_bytes(bytes))
    }

    fn write(&self, region: u32, offset: u64, value: u32) {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        // On a PCI bus, a write that no device accepts is lost.
        let _ = client.region_write(region, offset, &value.to_le_bytes());
    }
}

impl Platform for VfioUserGuest {
    fn location(&self) -> String {
        "over a socket".into()
    }

    fn read32(&self, offset: u64) -> u32 {
        self.read(CONTROL, offset)
    }

    fn write32(&self, offset: u64, value: u32) {
        self.write(CONTROL, offset, value);
    }

    fn ring(&self, token: u32) {
        match &self.doorbell {
            Some(page) => window(page).write32(doorbell::TOKEN, token),
            None => self.write(DOORBELL, doorbell::TOKEN, token),
        }
    }

    fn vram(&self) -> Option<Window<'_>> {
        self.vram.as_ref().map(window)
    }

    fn scanout_bytes(&self) -> u64 {
        self.scanout_bytes
    }

    fn allocate(&self, bytes: u64) -> Result<GuestPages, GuestError> {
        self.ram.allocate(bytes)
    }

    fn interrupts(&self) -> bool {
        self.interrupts.is_some()
    }

    fn wait(&self, limit: Duration) {
        let Some(event) = &self.interrupts else { return thread::sleep(limit) };
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        if poll(&mut [PollFd::new(event.as_fd(), PollFlags::POLLIN)], limit).is_ok() {
            // Nothing to read after the limit.
            let _ = event.read();
        }
    }
}

impl fmt::Debug for VfioUserGuest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("VfioUserGuest")
    }
}
