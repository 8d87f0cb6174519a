//! Guest memory of a running VM, for a process that continues with it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::{DmaAccess, GuestMemory};
use crate::ids::{GuestPa, MemoryId};

/// A mapping without its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningMap {
    /// Guest-physical address.
    pub address: GuestPa,
    /// Length in bytes.
    pub size: u64,
    /// Access of the device.
    pub access: DmaAccess,
    /// Offset in the mapping's file, if it has one.
    pub offset: Option<u64>,
    /// Id of the import.
    pub import: Option<MemoryId>,
}

impl GuestMemory {
    /// Returns a number that changes with the mappings and their imports.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the mappings.
    pub fn running(&self) -> Vec<RunningMap> {
        let maps = self.maps.iter().map(|(start, map)| RunningMap {
            address: GuestPa(*start),
            size: map.size,
            access: map.access,
            offset: map.file.as_ref().map(|(_, offset)| *offset),
            import: map.import,
        });
        maps.collect()
    }

    /// Returns the files of the mappings, with their addresses.
    pub fn files(&self) -> impl Iterator<Item = (GuestPa, BorrowedFd<'_>)> {
        let files = self.maps.iter().map(|(start, map)| (*start, map.file.as_ref()));
        files.filter_map(|(start, file)| Some((GuestPa(start), file?.0.as_fd())))
    }

    /// Continues with the mappings of another process and their files. A mapping that cannot be made
    /// is left out, and logged.
    pub fn resume(&mut self, maps: impl IntoIterator<Item = (RunningMap, Option<OwnedFd>)>) {
        for (map, file) in maps {
            let RunningMap { address, size, access, offset, import } = map;
            if let Err(error) = self.map(address, size, access, file.zip(offset)) {
                log::warn!("Guest memory of the process before is lost: {error}");
            } else if let Some(map) = self.maps.get_mut(&address.0) {
                map.import = import;
                let imported = if import.is_some() { size } else { 0 };
                self.imported = self.imported.saturating_add(imported);
            }
        }
    }
}
