//! An open vGPU.

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use mdev_core::abi::control::{Features, reg};
use mdev_core::abi::mailbox::{ChannelCreate, ChannelCreated, ChannelState, Info, Scatter};
use mdev_core::gpu::Pending;
use mdev_core::units::MIB;

use crate::GuestError;
use crate::mailbox::Mailbox;
use crate::platform::Platform;
use crate::programs::{DEFAULT_CUBIN, Programs};
use crate::properties::Properties;
use crate::ranges::Ranges;

/// Handle to an open vGPU; clones refer to the same vGPU.
#[derive(Clone, Debug)]
pub struct Device(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    platform: Box<dyn Platform>,
    info: Info,
    mailbox: Mutex<Mailbox>,
    addresses: Mutex<Ranges>,
    vram: Mutex<Ranges>,
    programs: Programs,
}

impl Device {
    /// Opens a vGPU and resets it, which discards the state of its earlier user.
    pub fn open(platform: Box<dyn Platform>) -> Result<Self, GuestError> {
        Self::open_with(platform, Path::new(DEFAULT_CUBIN))
    }

    /// Opens a vGPU as [`Self::open`] does, with the kernels' machine code in the file `cubin`.
    pub fn open_with(platform: Box<dyn Platform>, cubin: &Path) -> Result<Self, GuestError> {
        let port = &*platform;
        Properties::of(port).check()?;
        let mailbox = Mailbox::new(port)?;
        mailbox.reset(port)?;
        if port.interrupts() {
            let enabled = Pending::NONSTALL | Pending::CHANNEL_ERROR | Pending::DEVICE_LOST;
            port.write32(reg::INTR_ENABLE, enabled.bits());
        }
        let info = mailbox.info(port)?;
        let vram = Ranges::new(port.scanout_bytes().min(info.vram_bytes), info.vram_bytes);
        Ok(Self(Arc::new(Inner {
            info,
            mailbox: Mutex::new(mailbox),
            addresses: Mutex::new(Ranges::new(info.va_start, info.va_end)),
            vram: Mutex::new(vram),
            programs: Programs::new(cubin),
            platform,
        })))
    }

    /// Returns the platform of the vGPU.
    pub fn platform(&self) -> &dyn Platform {
        &*self.0.platform
    }

    /// Returns the vGPU's properties.
    pub fn info(&self) -> &Info {
        &self.0.info
    }

    /// Returns the supported features.
    pub fn features(&self) -> Features {
        Features::from_bits_truncate(self.0.info.features)
    }

    /// Returns the loaded kernel programs.
    pub fn programs(&self) -> &Programs {
        &self.0.programs
    }

    /// Returns the vGPU's properties in its registers.
    pub fn properties(&self) -> Properties<'_> {
        Properties::of(self.platform())
    }

    /// Returns the number of trapped wake and doorbell writes since reset.
    pub fn trapped_doorbells(&self) -> u32 {
        self.platform().read32(reg::TRAPPED_DOORBELLS)
    }

    /// Creates a channel from mapped memory; [`crate::channel::Channel`] performs all steps.
    pub fn create_channel(&self, create: &ChannelCreate) -> Result<ChannelCreated, GuestError> {
        self.mailbox().create_channel(self.platform(), create)
    }

    /// Queries a channel's state.
    pub fn query_channel(&self, channel: u32) -> Result<ChannelState, GuestError> {
        self.mailbox().query_channel(self.platform(), channel)
    }

    /// Destroys a channel.
    pub fn destroy_channel(&self, channel: u32) -> Result<(), GuestError> {
        self.mailbox().destroy_channel(self.platform(), channel)
    }

    /// Maps guest memory at a free address.
    pub fn map_guest(&self, ranges: &[Scatter], len: u64) -> Result<u64, GuestError> {
        self.map(len, |mailbox, va| mailbox.map_guest(self.platform(), va, ranges, true))
    }

    /// Maps video memory at a free address.
    pub fn map_vram(&self, offset: u64, len: u64) -> Result<u64, GuestError> {
        self.map(len, |mailbox, va| mailbox.map_vram(self.platform(), va, offset, len))
    }

    fn map(
        &self,
        len: u64,
        request: impl FnOnce(&Mailbox, u64) -> Result<(), GuestError>,
    ) -> Result<u64, GuestError> {
        // Large buffers are aligned to large pages, so that hardware can use large page entries.
        let align = if len >= 2 * MIB { 2 * MIB } else { 4096 };
        let va = lock(&self.0.addresses)
            .take(len, align)
            .ok_or(GuestError::Exhausted { what: "GPU virtual addresses", asked: len })?;
        request(&self.mailbox(), va).inspect_err(|_| lock(&self.0.addresses).give(va, len))?;
        Ok(va)
    }

    /// Removes a mapping.
    pub fn unmap(&self, va: u64, len: u64) -> Result<(), GuestError> {
        self.mailbox().unmap(self.platform(), va, len)?;
        lock(&self.0.addresses).give(va, len);
        Ok(())
    }

    /// Allocates video memory outside of the display's part.
    pub fn take_vram(&self, len: u64) -> Result<u64, GuestError> {
        let align = if len >= 2 * MIB { 2 * MIB } else { 4096 };
        lock(&self.0.vram)
            .take(len, align)
            .ok_or(GuestError::Exhausted { what: "video memory", asked: len })
    }

    /// Frees video memory.
    pub fn give_vram(&self, offset: u64, len: u64) {
        lock(&self.0.vram).give(offset, len);
    }

    fn mailbox(&self) -> MutexGuard<'_, Mailbox> {
        lock(&self.0.mailbox)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
