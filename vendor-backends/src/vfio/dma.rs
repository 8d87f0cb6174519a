//! The memory that a device's DMA can reach.
//!
//! The kernel keeps DMA mappings in a type 1 container, to which the device's group belongs, or in
//! iommufd, to which the device itself is attached. Both pin the mapped memory and program the
//! IOMMU. The kernel removes the mappings when this process ends, however the process ends.

use std::fmt;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use iommufd_bindings::iommufd::{
    iommu_ioas_map, iommufd_ioas_map_flags_IOMMU_IOAS_MAP_FIXED_IOVA as FIXED_IOVA,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_READABLE as READABLE,
    iommufd_ioas_map_flags_IOMMU_IOAS_MAP_WRITEABLE as WRITEABLE,
};
use iommufd_ioctls::IommufdError;
use ipc::mem::Mapping;
use nix::errno::Errno;
use vfio_bindings::bindings::vfio::{
    VFIO_DMA_MAP_FLAG_READ, VFIO_DMA_MAP_FLAG_WRITE, vfio_iommu_type1_dma_map,
};
use vfio_ioctls::{VfioContainer, VfioError, VfioIommufd, VfioOps};

use super::ranges;
use super::window::Window;

/// `VFIO_IOMMU_MAP_DMA`, `_IO(';', 113)`. The crate's own functions always map writable memory.
const MAP_DMA: libc::Ioctl = 0x3b71;

/// IOMMU address space (IOAS) of a device, through either kernel interface.
pub(super) enum AddressSpace {
    /// The address space of a container.
    Container(Arc<VfioContainer>),
    /// An address space of iommufd.
    Iommufd(Arc<VfioIommufd>),
}

impl AddressSpace {
    /// Returns the operations that [`vfio_ioctls::VfioDevice::new`] needs.
    pub fn ops(&self) -> Arc<dyn VfioOps> {
        match self {
            Self::Container(container) => Arc::clone(container) as _,
            Self::Iommufd(iommufd) => Arc::clone(iommufd) as _,
        }
    }

    /// Maps all of `memory` for the device at `iova`. The device may write where this process may.
    pub fn attach(self: &Arc<Self>, iova: u64, memory: Arc<Mapping>) -> Result<Attached, Errno> {
        let window = Window { iova, len: memory.len() };
        // `Attached` owns the memory and unmaps it from the IOMMU before freeing it.
        match &**self {
            Self::Container(container) => map_in_container(container, iova, &memory)?,
            Self::Iommufd(iommufd) => map_in_iommufd(iommufd, iova, &memory)?,
        }
        Ok(Attached { memory, window, space: Arc::clone(self) })
    }

    /// Returns the IOVA ranges that can be mapped, in ascending order.
    pub fn ranges(&self) -> io::Result<Vec<RangeInclusive<u64>>> {
        match self {
            Self::Container(container) => ranges::of_container(container),
            Self::Iommufd(iommufd) => ranges::of_iommufd(iommufd),
        }
    }

    fn unmap(&self, window: Window) -> Result<(), VfioError> {
        let len = usize::try_from(window.len).unwrap_or(usize::MAX);
        self.ops().vfio_dma_unmap(window.iova, len)
    }
}

fn map_in_container(container: &VfioContainer, iova: u64, memory: &Mapping) -> Result<(), Errno> {
    let write = if memory.writable() { VFIO_DMA_MAP_FLAG_WRITE } else { 0 };
    let map = vfio_iommu_type1_dma_map {
        argsz: size_of::<vfio_iommu_type1_dma_map>() as u32,
        flags: VFIO_DMA_MAP_FLAG_READ | write,
        vaddr: memory.address(),
        iova,
        size: memory.len(),
    };
    // SAFETY: the kernel reads the structure and keeps no pointer to it. The structure names a
    // mapping into which no reference points, and which `Attached` keeps alive.
    let done = unsafe { libc::ioctl(container.as_raw_fd(), MAP_DMA, &raw const map) };
    Errno::result(done).map(drop)
}

fn map_in_iommufd(iommufd: &VfioIommufd, iova: u64, memory: &Mapping) -> Result<(), Errno> {
    let write = if memory.writable() { WRITEABLE } else { 0 };
    let map = iommu_ioas_map {
        size: size_of::<iommu_ioas_map>() as u32,
        flags: FIXED_IOVA | READABLE | write,
        ioas_id: iommufd.ioas().id(),
        __reserved: 0,
        user_va: memory.address(),
        length: memory.len(),
        iova,
    };
    iommufd.iommufd().map_iommu_ioas(&map).map_err(|error| match error {
        IommufdError::IommuIoasMap(error) => Errno::from_raw(error.errno()),
        _ => Errno::EINVAL,
    })
}

/// Memory that is mapped for the device until this value is dropped.
pub struct Attached {
    /// The memory.
    pub memory: Arc<Mapping>,
    /// IOVA range of the memory.
    pub window: Window,
    space: Arc<AddressSpace>,
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("window", &self.window).finish_non_exhaustive()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        if let Err(error) = self.space.unmap(self.window) {
            // The device may still write to this memory, so the memory must never be freed.
            log::error!("Cannot unmap a DMA window from the IOMMU: {error}");
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}
