//! A device that trusts nobody: what a session hands over must be as the [`Device`] trait promises.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};

use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use vfio_user_server::device::{Area, Device, IoEventFd, Mapping, Region, pci};
use vfio_user_server::dma::{DmaMap, DmaUnmap};
use vfio_user_server::errno::Errno;
use vfio_user_server::irq::{Irq, IrqCommand};
use vfio_user_server::proto::message::Feature;

/// Messages that the device can send.
const MSI_COUNT: u32 = 8;
/// Regions, and how long they are. The first is mapped too.
const SIZES: [(u32, u64); 3] = [(0, 0x4000), (2, 0x100), (pci::CONFIG, 0x100)];
const AREAS: [Area; 2] = [Area { offset: 0, size: 0x1000 }, Area { offset: 0x2000, size: 0x1000 }];

/// Checks what it is handed, and fails every fifth request.
#[derive(Debug)]
pub struct Suspicious {
    calls: u32,
    maps: BTreeMap<u64, DmaMap>,
    eventfds: Vec<OwnedFd>,
    file: OwnedFd,
    io_event_fds: [IoEventFd; 1],
    /// How often a session ended.
    pub detached: u32,
}

impl Default for Suspicious {
    fn default() -> Self {
        let fd = EventFd::new().expect("an eventfd").into();
        let signal = IoEventFd { offset: 8, size: 4, flags: 0, datamatch: 0, fd };
        Self {
            calls: 0,
            maps: BTreeMap::new(),
            eventfds: Vec::new(),
            file: memfd_create("region", MFdFlags::MFD_CLOEXEC).expect("a memfd"),
            io_event_fds: [signal],
            detached: 0,
        }
    }
}

impl Suspicious {
    fn mood(&mut self) -> Result<(), Errno> {
        assert_eq!(self.detached, 0, "called after the end");
        self.calls += 1;
        if self.calls.is_multiple_of(5) { Err(Errno::EIO) } else { Ok(()) }
    }

    fn check_range(index: u32, offset: u64, len: usize) {
        let size = SIZES.iter().find(|(known, _)| *known == index).expect("a known region").1;
        assert!(len > 0 && offset.checked_add(len as u64).expect("no overflow") <= size);
    }
}

impl Device for Suspicious {
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
            pci::MSI => Irq::messages(MSI_COUNT),
            _ => Irq::NONE,
        }
    }

    fn region_read(&mut self, index: u32, offset: u64, data: &mut [u8]) -> Result<(), Errno> {
        Self::check_range(index, offset, data.len());
        assert!(data.iter().all(|&byte| byte == 0), "what the last reply left");
        data.fill(0xab);
        self.mood()
    }

    fn region_write(&mut self, index: u32, offset: u64, data: &[u8]) -> Result<(), Errno> {
        Self::check_range(index, offset, data.len());
        assert_ne!(index, 2, "it cannot be written");
        self.mood()
    }

    fn dma_map(&mut self, map: DmaMap) -> Result<(), Errno> {
        self.mood()?;
        assert!(map.size > 0 && (map.address | map.size | map.offset).is_multiple_of(4096));
        let end = map.address.checked_add(map.size - 1).expect("no overflow");
        if let Some((_, before)) = self.maps.range(..=end).next_back() {
            assert!(before.address + (before.size - 1) < map.address, "overlaps");
        }
        self.maps.insert(map.address, map);
        Ok(())
    }

    fn dma_unmap(&mut self, unmap: DmaUnmap) -> Result<(), Errno> {
        self.mood()?;
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
                self.eventfds.extend(eventfds);
                self.eventfds.truncate(16);
            }
            IrqCommand::Unassign { start, count: n, .. } => assert!(n > 0 && start + n <= count),
            IrqCommand::Perform { lines, .. } => {
                assert!(lines.count > 0 && lines.iter().all(|line| line < count));
            }
        }
        self.mood()
    }

    fn reset(&mut self) -> Result<(), Errno> {
        self.mood()
    }

    fn io_event_fds(&self, index: u32) -> &[IoEventFd] {
        if index == 0 { &self.io_event_fds } else { &[] }
    }

    fn feature(&mut self, feature: Feature<'_>, reply: &mut Vec<u8>) -> Result<(), Errno> {
        self.mood()?;
        if feature.index == 1 {
            reply.extend_from_slice(&[7; 12]);
        }
        Ok(())
    }

    fn detach(&mut self) {
        self.detached += 1;
        self.maps.clear();
        self.eventfds.clear();
    }
}
