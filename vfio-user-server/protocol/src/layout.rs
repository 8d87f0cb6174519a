//! The regions and interrupts of a PCI device.
//!
//! [`Layout::builder`] collects them and checks them for mistakes that clients would reject. A
//! device returns the layout from [`Device::layout`](crate::device::Device::layout).

use std::os::fd::{AsFd, OwnedFd};

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_NUM_IRQS, VFIO_PCI_NUM_REGIONS,
};

use crate::device::{Area, DeviceInfo, IoEventFd, Mapping, Region, pci};
use crate::fds::MAX_FDS;
use crate::irq::Irq;

/// Region indices of a PCI device.
const REGIONS: usize = VFIO_PCI_NUM_REGIONS as usize;
/// Interrupt indices of a PCI device.
const IRQS: usize = VFIO_PCI_NUM_IRQS as usize;
/// Granularity of mappings in bytes.
const PAGE: u64 = 4096;

/// Regions and interrupts of a PCI device.
#[derive(Debug)]
pub struct Layout {
    regions: [Option<RegionLayout>; REGIONS],
    irqs: [Irq; IRQS],
}

/// Region of a layout.
#[derive(Debug)]
struct RegionLayout {
    size: u64,
    writable: bool,
    mapping: Option<OwnedMapping>,
    io_event_fds: Vec<IoEventFd>,
}

/// File mapping of a region, with its file.
#[derive(Debug)]
struct OwnedMapping {
    fd: OwnedFd,
    offset: u64,
    areas: Vec<Area>,
}

/// A mistake in a device's layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// An index beyond regions 0 to 8 or interrupt indices 0 to 4.
    #[error(
        "A PCI device has no region or interrupt index {0}; use regions 0 to 8, interrupts 0 to 4"
    )]
    Index(u32),
    /// A region or interrupt index is used twice.
    #[error("Region or interrupt index {0} is used twice; remove one of the declarations")]
    Duplicate(u32),
    /// A region is empty or has 2^63 bytes or more.
    #[error("Region {0} must have 1 to 2^63 - 1 bytes")]
    Size(u32),
    /// Configuration space is missing or does not have 256 or 4096 bytes.
    #[error("A PCI device must have a configuration space of 256 or 4096 bytes")]
    Config,
    /// The size of a BAR is not a power of two of at least 16.
    #[error("The size of BAR {0} must be a power of two of at least 16 bytes")]
    Bar(u32),
    /// A mappable area leaves its region, is not page-aligned, or overlaps the area before.
    #[error("Mappable areas of region {0} must be ascending, page-aligned and within the region")]
    Area(u32),
    /// The number of MSI vectors is not a power of two up to 32.
    #[error("MSI cannot have {0} vectors; use a power of two up to 32")]
    Vectors(u32),
    /// An ioeventfd leaves its region or has an impossible length, or a region has more than a
    /// message can carry.
    #[error(
        "Region {0} may have up to {max} ioeventfds, of 0, 1, 2, 4 or 8 bytes and within the region",
        max = MAX_FDS
    )]
    IoEventFd(u32),
}

/// Builder of a [`Layout`].
#[derive(Debug, Default)]
pub struct LayoutBuilder {
    layout: Layout,
    error: Option<LayoutError>,
}

impl Default for Layout {
    fn default() -> Self {
        Self::NONE
    }
}

impl Layout {
    /// Layout without regions and interrupts.
    pub(crate) const NONE: Self =
        Self { regions: [const { None }; REGIONS], irqs: [Irq::NONE; IRQS] };

    /// Returns a builder without regions and interrupts.
    pub fn builder() -> LayoutBuilder {
        LayoutBuilder::default()
    }

    /// Returns the flags and the numbers of regions and interrupt indices.
    pub const fn info(&self) -> DeviceInfo {
        DeviceInfo {
            flags: VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET,
            regions: VFIO_PCI_NUM_REGIONS,
            irqs: VFIO_PCI_NUM_IRQS,
        }
    }

    fn entry(&self, index: u32) -> Option<&RegionLayout> {
        self.regions.get(index as usize)?.as_ref()
    }

    /// Returns the region with an index.
    pub fn region(&self, index: u32) -> Option<Region<'_>> {
        let RegionLayout { size, writable, mapping, .. } = self.entry(index)?;
        let mapping = mapping.as_ref().map(|mapped| Mapping {
            fd: mapped.fd.as_fd(),
            offset: mapped.offset,
            areas: &mapped.areas,
        });
        Some(Region { size: *size, readable: true, writable: *writable, mapping })
    }

    /// Returns the interrupts of an index.
    pub fn irq(&self, index: u32) -> Irq {
        self.irqs.get(index as usize).copied().unwrap_or(Irq::NONE)
    }

    /// Returns the ioeventfds of a region.
    pub fn io_event_fds(&self, index: u32) -> &[IoEventFd] {
        self.entry(index).map_or(&[], |region| &region.io_event_fds)
    }
}

impl LayoutBuilder {
    /// Adds a region of `size` bytes whose accesses are trapped.
    #[must_use]
    pub fn trapped(self, index: u32, size: u64) -> Self {
        self.region(index, size, true, None)
    }

    /// Adds a read-only region of `size` bytes whose reads are trapped.
    #[must_use]
    pub fn read_only(self, index: u32, size: u64) -> Self {
        self.region(index, size, false, None)
    }

    /// Adds a region that the client may map as a whole: the first `size` bytes of `fd`.
    #[must_use]
    pub fn mapped(self, index: u32, size: u64, fd: OwnedFd) -> Self {
        self.partly_mapped(index, size, fd, 0, Vec::new())
    }

    /// Adds a region that lies in `fd` from `offset` on. The client may map the areas; accesses to
    /// the rest are trapped.
    #[must_use]
    pub fn partly_mapped(
        self,
        index: u32,
        size: u64,
        fd: OwnedFd,
        offset: u64,
        areas: Vec<Area>,
    ) -> Self {
        self.region(index, size, true, Some(OwnedMapping { fd, offset, areas }))
    }

    /// Adds an ioeventfd to a region of the layout.
    #[must_use]
    pub fn io_event_fd(mut self, index: u32, event: IoEventFd) -> Self {
        match self.layout.regions.get_mut(index as usize).and_then(Option::as_mut) {
            Some(region) => region.io_event_fds.push(event),
            None => self.fail(LayoutError::IoEventFd(index)),
        }
        self
    }

    /// Adds the interrupts of an index.
    #[must_use]
    pub fn irq(mut self, index: u32, irq: Irq) -> Self {
        match self.layout.irqs.get_mut(index as usize) {
            Some(slot) if *slot == Irq::NONE => *slot = irq,
            Some(_) => self.fail(LayoutError::Duplicate(index)),
            None => self.fail(LayoutError::Index(index)),
        }
        self
    }

    /// Returns the layout.
    ///
    /// # Errors
    ///
    /// Fails with the first mistake in the layout.
    pub fn build(self) -> Result<Layout, LayoutError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let config = self.layout.entry(pci::CONFIG).map(|region| region.size);
        if !matches!(config, Some(256 | 4096)) {
            return Err(LayoutError::Config);
        }
        for (index, region) in (0..).zip(&self.layout.regions) {
            if let Some(region) = region {
                region.check(index)?;
            }
        }
        Ok(self.layout)
    }

    fn region(
        mut self,
        index: u32,
        size: u64,
        writable: bool,
        mapping: Option<OwnedMapping>,
    ) -> Self {
        match self.layout.regions.get_mut(index as usize) {
            Some(slot @ None) => {
                let io_event_fds = Vec::new();
                *slot = Some(RegionLayout { size, writable, mapping, io_event_fds });
            }
            Some(Some(_)) => self.fail(LayoutError::Duplicate(index)),
            None => self.fail(LayoutError::Index(index)),
        }
        self
    }

    /// Records a mistake; `build` returns the first.
    fn fail(&mut self, error: LayoutError) {
        self.error.get_or_insert(error);
    }
}

impl RegionLayout {
    fn check(&self, index: u32) -> Result<(), LayoutError> {
        if self.size == 0 || i64::try_from(self.size).is_err() {
            return Err(LayoutError::Size(index));
        }
        if index < pci::ROM && (self.size < 16 || !self.size.is_power_of_two()) {
            return Err(LayoutError::Bar(index));
        }
        if let Some(OwnedMapping { offset, areas, .. }) = &self.mapping {
            let whole = [Area { offset: 0, size: self.size }];
            let mut end = 0;
            for area in if areas.is_empty() { &whole } else { &areas[..] } {
                let pages = [area.offset, area.size, *offset];
                let is_paged = area.size > 0 && pages.iter().all(|at| at.is_multiple_of(PAGE));
                let next = area.offset.checked_add(area.size).filter(|next| *next <= self.size);
                match next {
                    Some(next) if is_paged && area.offset >= end => end = next,
                    _ => return Err(LayoutError::Area(index)),
                }
            }
        }
        let fits = |event: &IoEventFd| {
            let end = event.offset.checked_add(event.size.max(1));
            matches!(event.size, 0 | 1 | 2 | 4 | 8) && end.is_some_and(|end| end <= self.size)
        };
        if self.io_event_fds.len() > MAX_FDS || !self.io_event_fds.iter().all(fits) {
            return Err(LayoutError::IoEventFd(index));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn file() -> OwnedFd {
        File::open("/dev/null").unwrap().into()
    }

    fn config() -> LayoutBuilder {
        Layout::builder().trapped(pci::CONFIG, 256)
    }

    fn event(offset: u64, size: u64) -> IoEventFd {
        IoEventFd { offset, size, flags: 0, datamatch: 0, fd: file() }
    }

    #[test]
    fn layout_has_the_declared_parts_only() {
        let areas = vec![Area { offset: 0, size: 0x1000 }, Area { offset: 0x2000, size: 0x2000 }];
        let layout = config()
            .trapped(pci::BAR0, 16)
            .partly_mapped(pci::BAR0 + 2, 0x4000, file(), 0x1000, areas.clone())
            .read_only(pci::ROM, 1000)
            .io_event_fd(pci::BAR0, event(4, 4))
            .irq(pci::MSI, Irq::message_signaled(4))
            .build()
            .unwrap();
        assert_eq!((layout.info().regions, layout.info().irqs), (9, 5));
        let bar = layout.region(pci::BAR0).unwrap();
        assert_eq!((bar.size, bar.readable, bar.writable), (16, true, true));
        assert!(bar.mapping.is_none());
        let mapping = layout.region(pci::BAR0 + 2).unwrap().mapping.unwrap();
        assert_eq!((mapping.offset, mapping.areas), (0x1000, &areas[..]));
        assert!(!layout.region(pci::ROM).unwrap().writable);
        assert!(layout.region(pci::BAR0 + 1).is_none() && layout.region(9).is_none());
        assert_eq!(layout.irq(pci::MSI), Irq::message_signaled(4));
        assert_eq!([pci::INTX, 5, u32::MAX].map(|index| layout.irq(index)), [Irq::NONE; 3]);
        assert_eq!(layout.io_event_fds(pci::BAR0).len(), 1);
        assert!(layout.io_event_fds(pci::CONFIG).is_empty());
    }

    #[test]
    fn mistakes_are_named() {
        use LayoutError as E;
        let areas = |areas: &[(u64, u64)]| {
            let areas = areas.iter().map(|&(offset, size)| Area { offset, size }).collect();
            config().partly_mapped(0, 0x4000, file(), 0, areas)
        };
        let many =
            (0..17).fold(config().trapped(0, 256), |it, n| it.io_event_fd(0, event(n * 8, 8)));
        let cases = [
            (Layout::builder(), E::Config),
            (Layout::builder().trapped(pci::CONFIG, 128), E::Config),
            (config().trapped(9, 16), E::Index(9)),
            (config().irq(5, Irq::INTX), E::Index(5)),
            (config().trapped(1, 16).mapped(1, 4096, file()), E::Duplicate(1)),
            (config().irq(0, Irq::INTX).irq(0, Irq::INTX), E::Duplicate(0)),
            (config().trapped(pci::ROM, 0), E::Size(pci::ROM)),
            (config().trapped(pci::VGA, 1 << 63), E::Size(pci::VGA)),
            (config().trapped(3, 8), E::Bar(3)),
            (config().trapped(3, 48), E::Bar(3)),
            (config().mapped(0, 2048, file()), E::Area(0)),
            (areas(&[(0, 0x5000)]), E::Area(0)),
            (areas(&[(0, 0)]), E::Area(0)),
            (areas(&[(0x800, 0x1000)]), E::Area(0)),
            (areas(&[(0, 0x2000), (0x1000, 0x1000)]), E::Area(0)),
            (areas(&[(!0xfff, 0x2000)]), E::Area(0)),
            (config().io_event_fd(0, event(0, 4)), E::IoEventFd(0)),
            (config().trapped(0, 16).io_event_fd(0, event(13, 4)), E::IoEventFd(0)),
            (config().trapped(0, 16).io_event_fd(0, event(0, 3)), E::IoEventFd(0)),
            (config().trapped(0, 16).io_event_fd(0, event(16, 0)), E::IoEventFd(0)),
            (many, E::IoEventFd(0)),
        ];
        for (builder, error) in cases {
            assert_eq!(builder.build().unwrap_err(), error);
        }
    }
}
