//! Which pages of guest memory the device writes, for a VM whose memory is copied while it runs.

use std::collections::BTreeSet;

use super::GuestMemory;
use super::map::{Import, Map};
use crate::gpu::{Client, GpuError, WrittenPages};
use crate::ids::GuestPa;
use crate::units::PAGE_SIZE;

/// Record of the device's writes.
#[derive(Debug, Default)]
pub(super) struct WriteLog {
    /// What the GPU writes, with the addresses of the imports. Memory can be imported anew.
    imports: Vec<(u64, Box<dyn WrittenPages>)>,
    /// Numbers of the pages that this process has written.
    own: BTreeSet<u64>,
    /// Why the record is not complete, if so.
    gap: Option<&'static str>,
}

/// Reason why it is not known what the device has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("It is not known which guest memory the vGPU has written: {0}")]
pub struct NotRecorded(&'static str);

impl WriteLog {
    pub(super) fn note_own(&mut self, address: u64, len: u64) {
        let pages = address / PAGE_SIZE..address.saturating_add(len).div_ceil(PAGE_SIZE);
        self.own.extend(pages);
    }

    pub(super) fn note_removal(&mut self, map: &Map) {
        if map.file.is_some() {
            self.gap = Some("the VM has changed its memory meanwhile; try again");
        }
    }

    /// Records the writes of the GPU to an import, before the GPU can make any.
    pub(super) fn note_import(&mut self, client: &mut dyn Client, address: u64, import: Import) {
        let pages =
            client.require_saving().and_then(|saving| saving.log_writes(import.memory, import.len));
        match pages {
            Ok(pages) => self.imports.push((address, pages)),
            Err(error) => {
                log::warn!("The GPU does not record its writes: {error}");
                self.gap = Some("the GPU does not record its writes");
            }
        }
    }
}

impl GuestMemory {
    /// Records from now on which pages the device writes.
    pub fn begin_log(&mut self, client: &mut dyn Client) -> Result<(), GpuError> {
        let mut log = WriteLog::default();
        for (memory, address, len) in self.imports() {
            log.imports.push((address.0, client.require_saving()?.log_writes(memory, len)?));
        }
        self.log = Some(log);
        Ok(())
    }

    /// Ends the record.
    pub fn end_log(&mut self, client: &mut dyn Client) {
        if self.log.take().is_none() {
            return;
        }
        for (memory, ..) in self.imports() {
            let ended = client.require_saving().and_then(|saving| saving.end_log(memory));
            if let Err(error) = ended {
                log::debug!("The GPU still records its writes: {error}");
            }
        }
    }

    /// Returns the ranges that the device has written since the record began, in ascending order
    /// and in whole pages. The client is paused.
    ///
    /// # Errors
    ///
    /// Fails if there is no record, or it is not complete.
    pub fn written(&self) -> Result<Vec<(GuestPa, u64)>, NotRecorded> {
        let none = NotRecorded("nothing records it; the vGPU's worker may have been replaced");
        let log = self.log.as_ref().ok_or(none)?;
        if let Some(gap) = log.gap {
            return Err(NotRecorded(gap));
        }
        let of_gpu = log.imports.iter().flat_map(|(address, pages)| {
            let at = |offset: u64| address.saturating_add(offset);
            pages.ranges().into_iter().map(move |range| at(range.start)..at(range.end))
        });
        let of_own = log.own.iter().map(|page| page * PAGE_SIZE..(page + 1) * PAGE_SIZE);
        let mut all: Vec<_> = of_gpu.chain(of_own).collect();
        all.sort_unstable_by_key(|range| range.start);
        let mut merged: Vec<(GuestPa, u64)> = Vec::new();
        for range in all {
            match merged.last_mut() {
                Some((start, len)) if range.start <= start.0 + *len => {
                    *len = (*len).max(range.end - start.0);
                }
                _ => merged.push((GuestPa(range.start), range.end - range.start)),
            }
        }
        Ok(merged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::DmaAccess;
    use crate::testing::{Recorder, shared_ram};

    const RW: DmaAccess = DmaAccess::READ.union(DmaAccess::WRITE);

    #[test]
    fn writes_of_the_gpu_and_of_this_process_are_known() {
        let (mut client, record) = Recorder::new();
        let mut memory = GuestMemory::default();
        shared_ram(&mut memory, 0x10_0000, 0x10_000);
        shared_ram(&mut memory, 0x20_0000, 0x4000);
        memory.import(&mut *client, GuestPa(0x10_0000), 0x1000, RW).unwrap();
        assert!(memory.written().unwrap_err().to_string().contains("nothing records it"));
        memory.write(GuestPa(0x10_0000), &[1]).unwrap();
        memory.begin_log(&mut *client).unwrap();
        assert_eq!(memory.written().unwrap(), [], "only what is written from now on");

        record.lock().unwrap().writes = vec![0x3000..0x5000, 0x8000..0x9000];
        memory.write(GuestPa(0x10_5ffe), &[1; 4]).unwrap();
        memory.store_u32(GuestPa(0x10_8008), 1).unwrap();
        let first = [(GuestPa(0x10_3000), 0x2000), (GuestPa(0x10_5000), 0x2000)];
        let merged = (GuestPa(first[0].0.0), first[0].1 + first[1].1);
        assert_eq!(memory.written().unwrap(), [merged, (GuestPa(0x10_8000), 0x1000)]);

        // Memory that is imported later, and a mapping that is released and imported anew.
        record.lock().unwrap().writes = std::iter::once(0..0x1000).collect();
        memory.import(&mut *client, GuestPa(0x20_0000), 0x1000, RW).unwrap();
        memory.release_imports(&mut *client);
        memory.import(&mut *client, GuestPa(0x10_0000), 0x1000, RW).unwrap();
        let written = memory.written().unwrap();
        assert!(written.contains(&(GuestPa(0x20_0000), 0x1000)), "{written:x?}");
        assert!(written.contains(&(GuestPa(0x10_0000), 0x1000)), "{written:x?}");

        memory.end_log(&mut *client);
        assert!(memory.written().is_err());
    }

    #[test]
    fn memory_that_is_removed_leaves_a_gap() {
        let (mut client, _record) = Recorder::new();
        let mut memory = GuestMemory::default();
        shared_ram(&mut memory, 0x10_0000, 0x4000);
        memory.begin_log(&mut *client).unwrap();
        memory.unmap(&mut *client, GuestPa(0x10_0000), 0x4000).unwrap();
        assert!(memory.written().unwrap_err().to_string().contains("changed its memory"));
        memory.begin_log(&mut *client).unwrap();
        assert_eq!(memory.written(), Ok(Vec::new()));
    }
}
