//! Replies, written directly into the send buffer.

use zerocopy::IntoBytes;

use vfio_bindings::bindings::vfio::{
    VFIO_REGION_INFO_CAP_SPARSE_MMAP, VFIO_REGION_INFO_FLAG_CAPS, VFIO_REGION_INFO_FLAG_MMAP,
    VFIO_REGION_INFO_FLAG_READ, VFIO_REGION_INFO_FLAG_WRITE,
};

use crate::device::{DeviceInfo, IoEventFd, Region};
use crate::errno::Errno;
use crate::irq::Irq;
use crate::proto::header::Header;
use crate::proto::message::Access;
use crate::proto::wire;

/// Writer of a reply into a reused buffer.
#[derive(Debug)]
pub struct Reply<'a> {
    out: &'a mut Vec<u8>,
}

impl<'a> Reply<'a> {
    /// Clears `out` and begins a reply in it.
    pub fn begin(out: &'a mut Vec<u8>) -> Self {
        out.clear();
        out.resize(Header::SIZE, 0);
        Self { out }
    }

    /// Completes the reply to `request`, with the payload written so far or as an error reply.
    pub fn finish(self, request: &Header, result: Result<(), Errno>) {
        let header = match result {
            Ok(()) => request.reply(self.out.len() - Header::SIZE),
            Err(errno) => {
                self.out.truncate(Header::SIZE);
                request.error_reply(errno)
            }
        };
        self.out[..Header::SIZE].copy_from_slice(header.as_bytes());
    }

    /// Returns the buffer, to append payload to.
    pub fn payload(&mut self) -> &mut Vec<u8> {
        self.out
    }

    /// Appends a fixed structure.
    fn put(&mut self, value: &(impl IntoBytes + zerocopy::Immutable)) {
        self.out.extend_from_slice(value.as_bytes());
    }

    /// Writes the reply to VERSION, without capabilities.
    pub fn version(&mut self, major: u16, minor: u16) {
        self.put(&wire::Version { major, minor });
    }

    /// Writes the reply to DEVICE_GET_INFO.
    pub fn device_info(&mut self, info: DeviceInfo) {
        let DeviceInfo { flags, regions, irqs } = info;
        self.put(&wire::DeviceInfo { argsz: wire::DeviceInfo::SIZE as u32, flags, regions, irqs });
    }

    /// Writes the reply to DEVICE_GET_REGION_INFO. Capabilities that do not fit into `room` bytes
    /// are left out; argsz tells the client the room to repeat the request with.
    pub fn region_info(&mut self, index: u32, region: Option<&Region<'_>>, room: u32) {
        let empty = Region { size: 0, readable: false, writable: false, mapping: None };
        let region = region.unwrap_or(&empty);
        let areas = region.mapping.map_or(&[][..], |mapping| mapping.areas);
        let caps = match areas.len() {
            0 => 0,
            n => wire::CapHeader::SIZE + wire::SparseMmap::SIZE + n * wire::SparseArea::SIZE,
        };
        let argsz = (wire::RegionInfo::SIZE + caps) as u32;
        let with_caps = caps > 0 && argsz <= room;
        let flag = |set, flag| if set { flag } else { 0 };
        self.put(&wire::RegionInfo {
            argsz,
            flags: flag(region.readable, VFIO_REGION_INFO_FLAG_READ)
                | flag(region.writable, VFIO_REGION_INFO_FLAG_WRITE)
                | flag(region.mapping.is_some(), VFIO_REGION_INFO_FLAG_MMAP)
                | flag(with_caps, VFIO_REGION_INFO_FLAG_CAPS),
            index,
            cap_offset: flag(with_caps, wire::RegionInfo::SIZE as u32),
            size: region.size,
            offset: region.mapping.map_or(0, |mapping| mapping.offset),
        });
        if with_caps {
            let id = VFIO_REGION_INFO_CAP_SPARSE_MMAP as u16;
            self.put(&wire::CapHeader { id, version: 1, next: 0 });
            self.put(&wire::SparseMmap { areas: areas.len() as u32, reserved: 0 });
            for area in areas {
                self.put(&wire::SparseArea { offset: area.offset, size: area.size });
            }
        }
    }

    /// Writes the reply to DEVICE_GET_REGION_IO_FDS, with a descriptor per entry. Returns false,
    /// without entries, if they do not fit into `room` bytes.
    pub fn region_io_fds(&mut self, index: u32, entries: &[IoEventFd], room: u32) -> bool {
        let argsz = (wire::RegionIoFds::SIZE + entries.len() * wire::IoFd::SIZE) as u32;
        let count = entries.len() as u32;
        self.put(&wire::RegionIoFds { argsz, flags: 0, index, count });
        if argsz > room {
            return false;
        }
        for (fd_index, entry) in (0..).zip(entries) {
            self.put(&wire::IoFd {
                offset: entry.offset,
                size: entry.size,
                fd_index,
                kind: 0,
                flags: entry.flags,
                padding: 0,
                datamatch: entry.datamatch,
            });
        }
        true
    }

    /// Writes the reply to DEVICE_GET_IRQ_INFO.
    pub fn irq_info(&mut self, index: u32, irq: Irq) {
        let Irq { count, flags } = irq;
        self.put(&wire::IrqInfo { argsz: wire::IrqInfo::SIZE as u32, flags, index, count });
    }

    /// Writes the reply to REGION_WRITE.
    pub fn region_access(&mut self, access: Access) {
        self.put(&access.wire());
    }

    /// Writes the reply to REGION_READ and returns its data, zeroed, to be filled.
    pub fn region_data(&mut self, access: Access) -> &mut [u8] {
        self.put(&access.wire());
        let start = self.out.len();
        self.out.resize(start + access.count as usize, 0);
        &mut self.out[start..]
    }

    /// Writes the reply to REGION_WRITE_MULTI: the number of executed writes.
    pub fn writes_done(&mut self, count: usize) {
        self.put(&(count as u64));
    }
}
