//! Imports of guest memory into a client of the GPU.

use std::os::fd::AsFd;

use super::map::Import;
use super::{DmaAccess, GuestMemory, Segment};
use crate::gpu::{Backing, Client, GpuCapabilities, GpuError, GuestRam};
use crate::ids::{GuestPa, MemoryId};

/// Number of imports from which on mappings have no more parts: each import is recorded.
const MANY_IMPORTS: usize = 1024;

impl GuestMemory {
    /// Returns the imports: their ids, addresses and lengths in bytes.
    pub fn imports(&self) -> impl Iterator<Item = (MemoryId, GuestPa, u64)> {
        self.maps.iter().flat_map(|(start, map)| {
            let at = move |offset: &u64| GuestPa(start + offset);
            map.imports.iter().map(move |(offset, import)| (import.memory, at(offset), import.len))
        })
    }

    /// Returns a range as parts of imports, in ascending order. Imports memory on its first use.
    pub fn import(
        &mut self,
        client: &mut dyn Client,
        address: GuestPa,
        len: u64,
        access: DmaAccess,
    ) -> Result<Vec<(Backing, u64)>, GpuError> {
        let segments = self
            .segments(address, len, access)
            .map_err(|_| GpuError::OutOfRange("not in guest memory that the device can access"))?;
        let mut found = Vec::with_capacity(segments.len());
        for Segment { map, mut offset, len } in segments {
            let end = offset + len;
            while offset < end {
                let (start, Import { memory, len }) = self.import_part(client, map, offset)?;
                let part = (start + len).min(end) - offset;
                found.push((Backing::Guest { memory, offset: offset - start }, part));
                offset += part;
            }
        }
        Ok(found)
    }

    /// Returns the import of what a mapping has at an offset, and the offset at which it begins.
    fn import_part(
        &mut self,
        client: &mut dyn Client,
        iova: u64,
        offset: u64,
    ) -> Result<(u64, Import), GpuError> {
        const GONE: GpuError = GpuError::OutOfRange("not in guest memory");
        if let Some(found) = self.maps.get(&iova).ok_or(GONE)?.import_at(offset) {
            return Ok(found);
        }
        let in_parts = client.gpu().capabilities.contains(GpuCapabilities::PINS)
            && self.imports().count() < MANY_IMPORTS;
        let map = self.maps.get_mut(&iova).ok_or(GONE)?;
        let part = if in_parts { map.part(offset) } else { map.gap(offset) };
        let (fd, file_offset) = map.file.as_ref().ok_or(GONE)?;
        let len = part.end - part.start;
        if len > client.spec().max_import_bytes.saturating_sub(self.imported) {
            return Err(GpuError::Limit("imported guest memory"));
        }
        let memory = client.import(GuestRam {
            fd: fd.as_fd(),
            offset: file_offset + part.start,
            len,
            writable: map.access.contains(DmaAccess::WRITE),
        })?;
        let import = Import { memory, len };
        map.imports.insert(part.start, import);
        if let Some(log) = &mut self.log {
            log.note_import(client, iova + part.start, import);
        }
        self.generation += 1;
        self.imported += len;
        Ok((part.start, import))
    }

    /// Releases all imports. They are made again on their next use.
    pub fn release_imports(&mut self, client: &mut dyn Client) {
        for (iova, map) in &mut self.maps {
            map.release(client, *iova);
        }
        self.imported = 0;
        self.generation += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::JournaledPart;
    use crate::testing::{Recorder, guest_ram, shared_ram};
    use crate::units::MIB;

    const RW: DmaAccess = DmaAccess::READ.union(DmaAccess::WRITE);

    #[test]
    fn imports_are_limited() {
        let (mut client, _) = Recorder::new();
        let mut memory = GuestMemory::default();
        shared_ram(&mut memory, 0, 48 * MIB);
        shared_ram(&mut memory, 64 * MIB, 48 * MIB);
        memory.import(&mut *client, GuestPa(0), 0x1000, RW).unwrap();
        let second = memory.import(&mut *client, GuestPa(64 * MIB), 0x1000, RW);
        assert!(matches!(second, Err(GpuError::Limit(_))));
    }

    /// A driver that pins memory makes others wait meanwhile, so it pins little at a time, and only
    /// what is used.
    #[test]
    fn large_mappings_are_pinned_in_parts() {
        let (mut client, record) = Recorder::new();
        client.spec.max_import_bytes = 192 * MIB;
        let mut memory = GuestMemory::default();
        shared_ram(&mut memory, 0, 200 * MIB);
        memory.import(&mut *client, GuestPa(193 * MIB), 0x1000, RW).unwrap();
        let found = memory.import(&mut *client, GuestPa(60 * MIB), 8 * MIB, RW).unwrap();
        let [
            (Backing::Guest { offset: low, .. }, 0x40_0000),
            (Backing::Guest { offset: 0, .. }, _),
        ] = found[..]
        else {
            panic!("{found:?}");
        };
        assert_eq!(low, 60 * MIB);
        let imports = ["import 0x800000 true", "import 0x4000000 true", "import 0x4000000 true"];
        assert_eq!(record.lock().unwrap().calls, imports);
        let third = memory.import(&mut *client, GuestPa(130 * MIB), 0x1000, RW);
        assert!(matches!(third, Err(GpuError::Limit(_))), "{third:?}");

        // Another process continues with the same imports.
        let journaled = memory.journaled();
        assert_eq!((journaled.maps[0].import, journaled.parts.len()), (None, 3));
        let mut next = GuestMemory::default();
        let file = |_| Some(guest_ram(200 * MIB).1);
        next.adopt(&journaled, file);
        assert_eq!(next.journaled(), journaled);
        assert_eq!(next.import(&mut *client, GuestPa(60 * MIB), 8 * MIB, RW).unwrap(), found);
        assert_eq!(record.lock().unwrap().calls.len(), 3);
        let overlapping =
            JournaledPart { address: GuestPa(3 * MIB), len: MIB, import: MemoryId(77) };
        let mut damaged = journaled.clone();
        damaged.parts.insert(1, overlapping);
        damaged.parts.push(JournaledPart { address: GuestPa(300 * MIB), ..overlapping });
        let mut next = GuestMemory::default();
        next.adopt(&damaged, file);
        assert_eq!(next.journaled(), journaled, "parts that no worker makes are left out");
        assert!(next.unmap(&mut *client, GuestPa(0), 200 * MIB).is_ok());
        assert!(record.lock().unwrap().imports.is_empty());
    }
}
