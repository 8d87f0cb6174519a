//! What a device consists of, put together once: its regions and its interrupts.
//!
//! [`Layout::builder`] takes them one by one and checks at the end what a client would stumble over. A device that
//! returns its layout from [`Device::layout`](crate::device::Device::layout) has answered for itself.

use std::os::fd::{AsFd, OwnedFd};

use vfio_bindings::bindings::vfio::{
    VFIO_DEVICE_FLAGS_PCI, VFIO_DEVICE_FLAGS_RESET, VFIO_PCI_NUM_IRQS, VFIO_PCI_NUM_REGIONS,
};

use crate::device::{Area, DeviceInfo, IoEventFd, Mapping, Region, pci};
use crate::fds::MAX_FDS;
use crate::irq::Irq;

/// Regions and interrupt indices that a PCI device has, whether or not there is something behind them.
const REGIONS: usize = VFIO_PCI_NUM_REGIONS as usize;
const IRQS: usize = VFIO_PCI_NUM_IRQS as usize;
/// What is mapped is mapped in pages.
const PAGE: u64 = 4096;

/// The regions and interrupts of a PCI device.
#[derive(Debug)]
pub struct Layout {
    regions: [Option<Part>; REGIONS],
    irqs: [Irq; IRQS],
}

/// A region, and all that belongs to it.
#[derive(Debug)]
struct Part {
    size: u64,
    writable: bool,
    mapping: Option<Mapped>,
    events: Vec<IoEventFd>,
}

#[derive(Debug)]
struct Mapped {
    fd: OwnedFd,
    offset: u64,
    areas: Vec<Area>,
}

/// Why a layout cannot be: a mistake of the device's author.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A PCI device has regions 0 to 8 and interrupt indices 0 to 4.
    #[error("A PCI device has no region or interrupt index {0}")]
    Index(u32),
    /// There are two of it.
    #[error("Region or interrupt index {0} is given twice")]
    Twice(u32),
    /// It has no bytes, or more than an address can name.
    #[error("Region {0} has an impossible size")]
    Size(u32),
    /// Configuration space has 256 or 4096 bytes, and every PCI device has one.
    #[error("Configuration space must be there and have 256 or 4096 bytes")]
    Config,
    /// BARs have powers of two.
    #[error("BAR {0} must have 16 bytes or more, and a power of two")]
    Bar(u32),
    /// It is outside of its region, not of whole pages, or overlaps the one before.
    #[error("An area of region {0} that may be mapped is misplaced")]
    Area(u32),
    /// It is outside of its region, of a length that no instruction has, or there are more than fit in a message.
    #[error("A signal of region {0} is misplaced, or there are too many")]
    Event(u32),
}

/// Takes the parts of a [`Layout`].
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
    /// No regions and no interrupts.
    pub(crate) const NONE: Self =
        Self { regions: [const { None }; REGIONS], irqs: [Irq::NONE; IRQS] };

    /// A PCI device without anything yet.
    pub fn builder() -> LayoutBuilder {
        LayoutBuilder::default()
    }

    /// The device as a whole.
    pub const fn info(&self) -> DeviceInfo {
        DeviceInfo {
            flags: VFIO_DEVICE_FLAGS_PCI | VFIO_DEVICE_FLAGS_RESET,
            regions: VFIO_PCI_NUM_REGIONS,
            irqs: VFIO_PCI_NUM_IRQS,
        }
    }

    fn part(&self, index: u32) -> Option<&Part> {
        self.regions.get(index as usize)?.as_ref()
    }

    /// The region with this index.
    pub fn region(&self, index: u32) -> Option<Region<'_>> {
        let Part { size, writable, mapping, .. } = self.part(index)?;
        let mapping = mapping.as_ref().map(|mapped| Mapping {
            fd: mapped.fd.as_fd(),
            offset: mapped.offset,
            areas: &mapped.areas,
        });
        Some(Region { size: *size, readable: true, writable: *writable, mapping })
    }

    /// The interrupts with this index.
    pub fn irq(&self, index: u32) -> Irq {
        self.irqs.get(index as usize).copied().unwrap_or(Irq::NONE)
    }

    /// The places of a region whose writes may come as signals.
    pub fn io_event_fds(&self, index: u32) -> &[IoEventFd] {
        self.part(index).map_or(&[], |part| &part.events)
    }
}

impl LayoutBuilder {
    /// A region of `size` bytes that is read and written by messages.
    #[must_use]
    pub fn trapped(self, index: u32, size: u64) -> Self {
        self.part(index, size, true, None)
    }

    /// A region of `size` bytes that is read by messages.
    #[must_use]
    pub fn read_only(self, index: u32, size: u64) -> Self {
        self.part(index, size, false, None)
    }

    /// A region that the client may map as a whole: `size` bytes from the beginning of `fd`.
    #[must_use]
    pub fn mapped(self, index: u32, size: u64, fd: OwnedFd) -> Self {
        self.partly_mapped(index, size, fd, 0, Vec::new())
    }

    /// A region that the client may map in parts. It lies in `fd` from `offset` on; the rest of it is trapped.
    #[must_use]
    pub fn partly_mapped(
        self,
        index: u32,
        size: u64,
        fd: OwnedFd,
        offset: u64,
        areas: Vec<Area>,
    ) -> Self {
        self.part(index, size, true, Some(Mapped { fd, offset, areas }))
    }

    /// Writes to a place in a region, which was given before, may come as a signal.
    #[must_use]
    pub fn signal(mut self, index: u32, event: IoEventFd) -> Self {
        match self.layout.regions.get_mut(index as usize).and_then(Option::as_mut) {
            Some(part) => part.events.push(event),
            None => self.fail(LayoutError::Event(index)),
        }
        self
    }

    /// Interrupts of an index.
    #[must_use]
    pub fn irq(mut self, index: u32, irq: Irq) -> Self {
        match self.layout.irqs.get_mut(index as usize) {
            Some(slot) if *slot == Irq::NONE => *slot = irq,
            Some(_) => self.fail(LayoutError::Twice(index)),
            None => self.fail(LayoutError::Index(index)),
        }
        self
    }

    /// The whole, or the first mistake in it.
    pub fn build(self) -> Result<Layout, LayoutError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let config = self.layout.part(pci::CONFIG).map(|part| part.size);
        if !matches!(config, Some(256 | 4096)) {
            return Err(LayoutError::Config);
        }
        for (index, part) in (0..).zip(&self.layout.regions) {
            if let Some(part) = part {
                part.check(index)?;
            }
        }
        Ok(self.layout)
    }

    fn part(mut self, index: u32, size: u64, writable: bool, mapping: Option<Mapped>) -> Self {
        match self.layout.regions.get_mut(index as usize) {
            Some(slot @ None) => *slot = Some(Part { size, writable, mapping, events: Vec::new() }),
            Some(Some(_)) => self.fail(LayoutError::Twice(index)),
            None => self.fail(LayoutError::Index(index)),
        }
        self
    }

    fn fail(&mut self, error: LayoutError) {
        self.error.get_or_insert(error);
    }
}

impl Part {
    fn check(&self, index: u32) -> Result<(), LayoutError> {
        if self.size == 0 || i64::try_from(self.size).is_err() {
            return Err(LayoutError::Size(index));
        }
        if index < pci::ROM && (self.size < 16 || !self.size.is_power_of_two()) {
            return Err(LayoutError::Bar(index));
        }
        if let Some(Mapped { offset, areas, .. }) = &self.mapping {
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
        if self.events.len() > MAX_FDS || !self.events.iter().all(fits) {
            return Err(LayoutError::Event(index));
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
    fn what_was_given_is_there_and_nothing_else() {
        let areas = vec![Area { offset: 0, size: 0x1000 }, Area { offset: 0x2000, size: 0x2000 }];
        let layout = config()
            .trapped(pci::BAR0, 16)
            .partly_mapped(pci::BAR0 + 2, 0x4000, file(), 0x1000, areas.clone())
            .read_only(pci::ROM, 1000)
            .signal(pci::BAR0, event(4, 4))
            .irq(pci::MSI, Irq::messages(4))
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
        assert_eq!(layout.irq(pci::MSI), Irq::messages(4));
        assert_eq!([pci::INTX, 5, u32::MAX].map(|index| layout.irq(index)), [Irq::NONE; 3]);
        assert_eq!(layout.io_event_fds(pci::BAR0).len(), 1);
        assert!(layout.io_event_fds(pci::CONFIG).is_empty());
    }

    #[test]
    fn mistakes_have_names() {
        use LayoutError as E;
        let areas = |areas: &[(u64, u64)]| {
            let areas = areas.iter().map(|&(offset, size)| Area { offset, size }).collect();
            config().partly_mapped(0, 0x4000, file(), 0, areas)
        };
        let many = (0..17).fold(config().trapped(0, 256), |it, n| it.signal(0, event(n * 8, 8)));
        let cases = [
            (Layout::builder(), E::Config),
            (Layout::builder().trapped(pci::CONFIG, 128), E::Config),
            (config().trapped(9, 16), E::Index(9)),
            (config().irq(5, Irq::INTX), E::Index(5)),
            (config().trapped(1, 16).mapped(1, 4096, file()), E::Twice(1)),
            (config().irq(0, Irq::INTX).irq(0, Irq::INTX), E::Twice(0)),
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
            (config().signal(0, event(0, 4)), E::Event(0)),
            (config().trapped(0, 16).signal(0, event(13, 4)), E::Event(0)),
            (config().trapped(0, 16).signal(0, event(0, 3)), E::Event(0)),
            (config().trapped(0, 16).signal(0, event(16, 0)), E::Event(0)),
            (many, E::Event(0)),
        ];
        for (builder, error) in cases {
            assert_eq!(builder.build().unwrap_err(), error);
        }
    }
}
