//! The virtual function: one vGPU as a PCI device, over a [`Client`] of its GPU.

mod region;

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use crate::gpu::{Client, GpuError, Usage};
use crate::ids::{GuestPa, VgpuId};
use crate::irq::{IrqError, IrqIndex, IrqInfo};
use crate::mem::{DmaAccess, MemError};
pub use region::{REGIONS, Region, RegionInfo, RegionMapping};

/// What a virtual function is made as, besides what its [`Client`] was granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionSpec {
    /// The vGPU, whose UUID the guest can read.
    pub vgpu: VgpuId,
    /// The type's name, which the guest can read (at most 64 bytes are kept).
    pub type_name: String,
    /// The display head, for types that have one.
    pub display: Option<DisplayLimits>,
    /// Whether the doorbell page is mapped where the GPU allows it, or trapped.
    pub doorbell_mapped: bool,
}

/// A display head's limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DisplayLimits {
    /// Largest mode, pixels. The EDID block prefers it.
    pub max_width: u32,
    /// Largest mode, pixels.
    pub max_height: u32,
}

/// Counters of trapped accesses since the function was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traps {
    /// Config space accesses.
    pub config: u64,
    /// Accesses to the display registers.
    pub display: u64,
    /// Accesses to the control registers, mailbox requests included.
    pub control: u64,
    /// Mailbox requests.
    pub mailbox: u64,
    /// Trapped doorbell and wake writes.
    pub doorbell: u64,
    /// Trapped accesses to BARs that are normally mapped (video memory, framebuffer).
    pub memory: u64,
}

/// The picture on a display head, in video memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scanout {
    /// False while the guest has not set a mode, or has blanked the screen; the rest is zero then.
    pub enabled: bool,
    /// Pixels.
    pub width: u32,
    /// Pixels.
    pub height: u32,
    /// Bytes from one row to the next.
    pub stride: u32,
    /// Bits per pixel: 8, 15, 16, 24 or 32 (XRGB8888).
    pub bits_per_pixel: u32,
    /// Byte offset of the first pixel in video memory.
    pub offset: u64,
    /// True where the bytes of a pixel are in big-endian order.
    pub big_endian: bool,
}

/// An access to a region that could not be carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AccessError {
    /// The device does not have the region.
    #[error("The device has no region {0}")]
    NoRegion(u32),
    /// The access leaves the region.
    #[error("Access of {len} bytes at {offset:#x} leaves region {region}")]
    OutOfRange {
        /// VFIO's number of the region.
        region: u32,
        /// Where it starts.
        offset: u64,
        /// How long it is.
        len: usize,
    },
}

/// Why a virtual function could not be made.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The grant and the type do not fit together.
    #[error("Cannot make a virtual function: {0}")]
    Invalid(&'static str),
    /// An aperture could not be mapped.
    #[error("Cannot map an aperture of the GPU: {0}")]
    Map(io::Error),
}

/// One vGPU as a PCI device.
///
/// It owns its [`Client`] and speaks no protocol: a vfio-user session calls it, one call at a time, and each call
/// returns quickly and without waiting for anybody.
#[derive(Debug)]
pub struct VirtualFunction {
    client: Box<dyn Client>,
}

impl VirtualFunction {
    /// Makes the device that `spec` describes out of what `client` was granted.
    pub fn new(spec: &FunctionSpec, client: Box<dyn Client>) -> Result<Self, DeviceError> {
        let _ = spec;
        Ok(Self { client })
    }

    /// What a client learns about a region; `None` beyond [`REGIONS`].
    pub fn region(&self, index: u32) -> Option<RegionInfo<'_>> {
        let _ = index;
        todo!()
    }

    /// Reads `data.len()` bytes of a region. Unaligned and long accesses are fine.
    pub fn region_read(
        &mut self,
        index: u32,
        offset: u64,
        data: &mut [u8],
    ) -> Result<(), AccessError> {
        let _ = (index, offset, data);
        todo!()
    }

    /// Writes `data` to a region. A guest's mistakes are not errors of the access: registers have their own ways.
    pub fn region_write(
        &mut self,
        index: u32,
        offset: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        let _ = (index, offset, data);
        todo!()
    }

    /// Makes guest memory known. Without a file it is recorded only, and the device cannot reach it.
    pub fn dma_map(
        &mut self,
        iova: GuestPa,
        size: u64,
        access: DmaAccess,
        file: Option<(OwnedFd, u64)>,
    ) -> Result<(), MemError> {
        let _ = (iova, size, access, file);
        todo!()
    }

    /// Takes one map away, named by the exact range it was made with. When it returns, neither the device nor the GPU
    /// will touch the range again.
    pub fn dma_unmap(&mut self, iova: GuestPa, size: u64) -> Result<(), MemError> {
        let _ = (iova, size);
        todo!()
    }

    /// Takes all maps away and says how many bytes they were.
    pub fn dma_unmap_all(&mut self) -> u64 {
        todo!()
    }

    /// What a client learns about an interrupt index; `None` beyond VFIO's five.
    pub fn irq_info(&self, index: u32) -> Option<IrqInfo> {
        let _ = index;
        todo!()
    }

    /// Sets the eventfds that interrupts `start..` of an index signal; `None` leaves one without.
    pub fn irq_set_triggers(
        &mut self,
        index: IrqIndex,
        start: u32,
        events: Vec<Option<OwnedFd>>,
    ) -> Result<(), IrqError> {
        let _ = (index, start, events);
        todo!()
    }

    /// Turns an index off: all its eventfds are dropped (a trigger with no data and count 0).
    pub fn irq_disable(&mut self, index: IrqIndex) -> Result<(), IrqError> {
        let _ = index;
        todo!()
    }

    /// Fires interrupts `start..` of an index whose flag is set, as if the device had raised them.
    pub fn irq_fire(&mut self, index: IrqIndex, start: u32, fire: &[bool]) -> Result<(), IrqError> {
        let _ = (index, start, fire);
        todo!()
    }

    /// Masks (or unmasks) interrupts `start..` of an index whose flag is set.
    pub fn irq_mask(
        &mut self,
        index: IrqIndex,
        start: u32,
        which: &[bool],
        masked: bool,
    ) -> Result<(), IrqError> {
        let _ = (index, start, which, masked);
        todo!()
    }

    /// Sets the eventfd through which the client unmasks INTx. The session watches [`Self::intx_unmask_event`].
    pub fn irq_set_unmask_event(
        &mut self,
        index: IrqIndex,
        event: Option<OwnedFd>,
    ) -> Result<(), IrqError> {
        let _ = (index, event);
        todo!()
    }

    /// The eventfd to watch for INTx unmasking; it changes with [`Self::irq_set_unmask_event`] only.
    pub fn intx_unmask_event(&self) -> Option<BorrowedFd<'_>> {
        todo!()
    }

    /// The client has signalled [`Self::intx_unmask_event`].
    pub fn on_intx_unmask(&mut self) {
        todo!()
    }

    /// Resets the function, as DEVICE_RESET and a function-level reset ask for: registers, channels, GPU mappings.
    /// Guest memory and the client's eventfds stay.
    pub fn reset(&mut self) {
        todo!()
    }

    /// The eventfd to watch for [`Self::on_gpu_event`].
    pub fn gpu_event(&self) -> BorrowedFd<'_> {
        self.client.event()
    }

    /// The GPU has signalled [`Self::gpu_event`]: takes what is pending and interrupts the guest.
    pub fn on_gpu_event(&mut self) {
        todo!()
    }

    /// A VM begins to use the device.
    pub fn attach(&mut self) {
        todo!()
    }

    /// The VM is gone: everything of it is dropped, video memory included, and the device is as new.
    pub fn detach(&mut self) {
        todo!()
    }

    /// What is on the screen.
    pub fn scanout(&self) -> Scanout {
        todo!()
    }

    /// Video memory's file and length, where it can be mapped: what [`Scanout::offset`] counts in.
    pub fn vram(&self) -> Option<(BorrowedFd<'_>, u64)> {
        todo!()
    }

    /// Trapped accesses so far.
    pub fn traps(&self) -> Traps {
        todo!()
    }

    /// What an operator should know about the attached VM, one line each.
    pub fn warnings(&self) -> Vec<String> {
        todo!()
    }

    /// False once the GPU is lost.
    pub fn gpu_ok(&self) -> bool {
        todo!()
    }

    /// What the vGPU has used.
    pub fn usage(&mut self) -> Result<Usage, GpuError> {
        self.client.usage()
    }
}
