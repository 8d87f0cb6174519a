//! Guest runtime platform that moves from one vGPU to another, as a VM does that is saved and
//! restored.

use std::path::Path;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use vgpu_guest::GuestError;
use vgpu_guest::platform::{GuestPages, Platform, Window};

use crate::ram::Ram;
use crate::vfio_user_guest::VfioUserGuest;

/// Guest whose memory stays while it attaches to one vGPU after the other. It maps no video memory.
#[derive(Clone, Debug)]
pub struct MovedGuest {
    ram: Ram,
    attached: Arc<RwLock<VfioUserGuest>>,
}

impl MovedGuest {
    /// Attaches to a vGPU.
    pub fn attach(socket: &Path, ram: Ram) -> anyhow::Result<Self> {
        let attached = Arc::new(RwLock::new(VfioUserGuest::attach(socket, ram.clone())?));
        Ok(Self { ram, attached })
    }

    /// Leaves the vGPU, and attaches to another one.
    pub fn move_to(&self, socket: &Path) -> anyhow::Result<()> {
        let next = VfioUserGuest::attach(socket, self.ram.clone())?;
        *self.attached.write().unwrap_or_else(PoisonError::into_inner) = next;
        Ok(())
    }

    fn with<T>(&self, act: impl FnOnce(&VfioUserGuest) -> T) -> T {
        act(&self.attached.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Platform for MovedGuest {
    fn location(&self) -> String {
        self.with(Platform::location)
    }

    fn read32(&self, offset: u64) -> u32 {
        self.with(|guest| guest.read32(offset))
    }

    fn write32(&self, offset: u64, value: u32) {
        self.with(|guest| guest.write32(offset, value));
    }

    fn ring(&self, token: u32) {
        self.with(|guest| guest.ring(token));
    }

    fn vram(&self) -> Option<Window<'_>> {
        None
    }

    fn scanout_bytes(&self) -> u64 {
        self.with(Platform::scanout_bytes)
    }

    fn allocate(&self, bytes: u64) -> Result<GuestPages, GuestError> {
        self.ram.allocate(bytes)
    }

    fn wait(&self, limit: Duration) {
        std::thread::sleep(limit);
    }
}
