//! Device for tests and fuzz targets that checks the session's guarantees.
//!
//! [`CheckingDevice`] panics if a session breaks a guarantee of [`Device`] or one of the device's
//! other traits, for any sequence of messages.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs, reason = "panics report failures")]

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use foreign_fds::ForeignFd;
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::device::{Area, Device, IoEventFd, Mapping, Region, pci};
use crate::dma::{DmaMap, DmaUnmap};
use crate::errno::Errno;
use crate::irq::{Irq, IrqCommand};
use crate::migration::{DirtyPages, DmaLogging, DmaRange, Migration, MigrationState};
use crate::proto::message::{Feature, FeatureAccess};
use crate::transfer::{Transfer, TransferKind, Transfers};

/// MSI vectors of the device.
const MSI_COUNT: u32 = 8;
/// Region indices and sizes. The first region is mappable; region 2 is read-only.
const SIZES: [(u32, u64); 3] = [(0, 0x4000), (2, 0x100), (pci::CONFIG, 0x100)];
const AREAS: [Area; 2] = [Area { offset: 0, size: 0x1000 }, Area { offset: 0x2000, size: 0x1000 }];

/// Limit of transfers that the device requests.
const TRANSFERS: u64 = 200;

/// Device that checks all arguments and fails a fraction of the requests.
#[derive(Debug)]
pub struct CheckingDevice {
    fails_every: u32,
    has_transfers: bool,
    calls: u32,
    maps: BTreeMap<u64, DmaMap>,
    eventfds: Vec<OwnedFd>,
    file: OwnedFd,
    io_event_fds: [IoEventFd; 1],
    state: MigrationState,
    /// Ranges of DMA logging.
    logging: Option<Vec<DmaRange>>,
    requested: u64,
    /// Length of each transfer under way by tag; `None` for writes.
    in_flight: BTreeMap<u64, Option<u32>>,
    /// Number of [`Device::detach`] calls.
    pub detached: u32,
}

impl CheckingDevice {
    /// Returns a device that fails every `fails_every`-th request and requests transfers if
    /// `has_transfers` is set.
    pub fn new(fails_every: u32, has_transfers: bool) -> Self {
        let fd = EventFd::new().expect("an eventfd").into();
        let signal = IoEventFd { offset: 8, size: 4, flags: 0, datamatch: 0, fd };
        Self {
            fails_every,
            has_transfers,
            calls: 0,
            maps: BTreeMap::new(),
            eventfds: Vec::new(),
            file: memfd_create("region", MFdFlags::MFD_CLOEXEC).expect("a memfd"),
            io_event_fds: [signal],
            state: MigrationState::Running,
            logging: None,
            requested: 0,
            in_flight: BTreeMap::new(),
            detached: 0,
        }
    }

    /// Counts a call and fails every `fails_every`-th.
    fn fail_sometimes(&mut self) -> Result<(), Errno> {
        assert_eq!(self.detached, 0, "called after detach");
        self.calls += 1;
        if self.calls.is_multiple_of(self.fails_every) { Err(Errno::EIO) } else { Ok(()) }
    }

    fn check_range(index: u32, offset: u64, len: usize) {
        let size = SIZES.iter().find(|(known, _)| *known == index).expect("a known region").1;
        assert!(len > 0 && offset.checked_add(len as u64).expect("no overflow") <= size);
    }
}

impl Device for CheckingDevice {
    fn region(&self, index: u32) -> Option<Region<'_>> {
        let (_, size) = SIZES.iter().find(|(known, _)| *known == index)?;
        let mut region = Region::trapped(*size);
        if index == 0 {
            region.mapping = Some(Mapping { fd: self.file.as_fd(), offset: 0, areas: &AREAS });
        }
        region.writable = index != 2;
        Some(region)
    }

    fn irq(&self, index: u32) -> Irq {
        match index {
            pci::INTX => Irq::INTX,
            pci::MSI => Irq::message_signaled(MSI_COUNT),
            _ => Irq::NONE,
        }
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        Self::check_range(index, offset, data.len());
        assert!(data.iter().all(|&byte| byte == 0), "data must be zeroed");
        data.fill(0xab);
        self.fail_sometimes()
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        Self::check_range(index, offset, data.len());
        assert_ne!(index, 2, "region 2 is read-only");
        self.fail_sometimes()
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        self.fail_sometimes()?;
        assert!(map.size > 0 && (map.address | map.size | map.offset).is_multiple_of(4096));
        let end = map.address.checked_add(map.size - 1).expect("no overflow");
        if let Some((_, before)) = self.maps.range(..=end).next_back() {
            assert!(before.address + (before.size - 1) < map.address, "overlaps");
        }
        self.maps.insert(map.address, map);
        Ok(())
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        self.fail_sometimes()?;
        match unmap {
            DmaUnmap::All => self.maps.clear(),
            DmaUnmap::Range { address, size } => {
                let map = self.maps.remove(&address).expect("mapped");
                assert_eq!(map.size, size);
            }
        }
        Ok(())
    }

    fn set_irqs(&mut self, index: u32, command: IrqCommand<'_>) -> Result<(), Errno> {
        let count = self.irq(index).count;
        assert!(count > 0, "no such interrupts");
        match command {
            IrqCommand::Disable => self.eventfds.clear(),
            IrqCommand::Assign { start, eventfds, .. } => {
                assert!(!eventfds.is_empty() && start as usize + eventfds.len() <= count as usize);
                self.eventfds.extend(eventfds.into_iter().map(ForeignFd::into_trusted));
                self.eventfds.truncate(16);
            }
            IrqCommand::Unassign { start, count: n, .. } => assert!(n > 0 && start + n <= count),
            IrqCommand::Perform { lines, .. } => {
                assert!(lines.count > 0 && lines.iter().all(|line| line < count));
            }
        }
        self.fail_sometimes()
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.fail_sometimes()?;
        self.state = MigrationState::Running;
        Ok(())
    }

    fn io_event_fds(&self, index: u32) -> &[IoEventFd] {
        if index == 0 { &self.io_event_fds } else { &[] }
    }

    fn migration(&mut self) -> Option<&mut dyn Migration> {
        Some(self)
    }

    fn dma_logging(&mut self) -> Option<&mut dyn DmaLogging> {
        Some(self)
    }

    fn transfers(&mut self) -> Option<&mut dyn Transfers> {
        if self.has_transfers { Some(self) } else { None }
    }

    fn feature(&mut self, feature: Feature<'_>, reply: &mut Vec<u8>) -> Result<(), Errno> {
        assert!(
            !matches!(feature.index, 1 | 2 | 6..=8),
            "the session handles migration and logging"
        );
        self.fail_sometimes()?;
        if feature.index == 9 && feature.access == FeatureAccess::Get {
            reply.extend_from_slice(&[7; 12]);
        }
        Ok(())
    }

    fn detach(&mut self) {
        assert!(self.logging.is_none(), "logging must stop before detach");
        self.detached += 1;
        self.maps.clear();
        self.eventfds.clear();
        self.in_flight.clear();
    }
}

impl Migration for CheckingDevice {
    fn pre_copy(&self) -> bool {
        true
    }

    fn step(&mut self, from: MigrationState, to: MigrationState) -> Result<(), Errno> {
        use MigrationState::{PreCopy, Resuming, Running, Stop, StopCopy};
        assert_eq!(from, self.state, "the session's state differs");
        let transitions = [
            (Running, Stop),
            (StopCopy, Stop),
            (Resuming, Stop),
            (PreCopy, Running),
            (Stop, Running),
            (Running, PreCopy),
            (Stop, StopCopy),
            (PreCopy, StopCopy),
            (Stop, Resuming),
        ];
        assert!(transitions.contains(&(from, to)), "{from:?} and {to:?} are not adjacent");
        self.fail_sometimes()?;
        self.state = to;
        Ok(())
    }

    fn read(&mut self, data: &mut [u8]) -> Result<usize, Errno> {
        assert!(self.state.is_saving(), "read in {:?}", self.state);
        self.fail_sometimes()?;
        let count = data.len().min(self.calls as usize % 100);
        data[..count].fill(0xcd);
        Ok(count)
    }

    fn write(&mut self, _: &[u8]) -> Result<(), Errno> {
        assert_eq!(self.state, MigrationState::Resuming, "written");
        self.fail_sometimes()
    }
}

impl DmaLogging for CheckingDevice {
    fn start(&mut self, page_size: u64, ranges: &[DmaRange]) -> Result<u64, Errno> {
        assert!(self.logging.is_none() && page_size.is_power_of_two());
        assert!(
            ranges.iter().all(|it| it.size > 0 && it.address.checked_add(it.size - 1).is_some())
        );
        self.fail_sometimes()?;
        self.logging = Some(ranges.to_vec());
        Ok(page_size.max(4096))
    }

    fn stop(&mut self) {
        self.logging = None;
    }

    fn report(&mut self, range: DmaRange, pages: &mut DirtyPages<'_>) -> Result<(), Errno> {
        assert!(self.logging.is_some() && range.size > 0);
        self.fail_sometimes()?;
        // Pages outside of the range must stay unmarked.
        pages.mark(range.address.saturating_sub(1), 2);
        pages.mark(range.address.saturating_add(range.size - 1), u64::MAX);
        Ok(())
    }
}

impl Transfers for CheckingDevice {
    fn next(&mut self) -> Option<Transfer> {
        if self.requested >= TRANSFERS || self.calls.is_multiple_of(3) {
            return None;
        }
        self.requested += 1;
        let (tag, address) = (self.requested, self.requested % 7 * 0x800);
        let (kind, read) = match self.requested % 5 {
            0 | 1 => (TransferKind::Write(vec![7; self.requested as usize % 40]), None),
            n => (TransferKind::Read(n as u32 * 8), Some(n as u32 * 8)),
        };
        assert!(self.in_flight.insert(tag, read).is_none());
        Some(Transfer { tag, address, kind })
    }

    fn done(&mut self, tag: u64, result: Result<&[u8], Errno>) {
        assert_eq!(self.detached, 0, "called after detach");
        let read = self.in_flight.remove(&tag).expect("a transfer under way");
        if let Ok(data) = result {
            assert_eq!(data.len(), read.unwrap_or(0) as usize);
        }
    }
}
