//! Guest memory of a running VM, for the process that adopts it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use serde::{Deserialize, Serialize};

use super::map::Import;
use super::{DmaAccess, GuestMemory};
use crate::ids::{GuestPa, MemoryId};

/// Mappings and their imports, without the files.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournaledMemory {
    /// Mappings, by address.
    pub maps: Vec<JournaledMap>,
    /// Imports of parts of mappings, by address.
    pub parts: Vec<JournaledPart>,
}

/// A mapping without its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournaledMap {
    /// Guest-physical address.
    pub address: GuestPa,
    /// Length in bytes.
    pub size: u64,
    /// Access of the device.
    pub access: DmaAccess,
    /// Offset in the mapping's file, if it has one.
    pub offset: Option<u64>,
    /// Id of the import of the whole mapping.
    pub import: Option<MemoryId>,
}

/// Import of a part of a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournaledPart {
    /// Guest-physical address.
    pub address: GuestPa,
    /// Length in bytes.
    pub len: u64,
    /// Id of the import.
    pub import: MemoryId,
}

impl GuestMemory {
    /// Returns a number that changes with the mappings and their imports.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the mappings and their imports.
    pub fn journaled(&self) -> JournaledMemory {
        let mut journaled = JournaledMemory::default();
        for (start, map) in &self.maps {
            let whole = map.imports.get(&0).filter(|import| import.len == map.size);
            journaled.maps.push(JournaledMap {
                address: GuestPa(*start),
                size: map.size,
                access: map.access,
                offset: map.file.as_ref().map(|(_, offset)| *offset),
                import: whole.map(|import| import.memory),
            });
            let parts = map.imports.iter().filter(|_| whole.is_none());
            journaled.parts.extend(parts.map(|(offset, import)| JournaledPart {
                address: GuestPa(start + offset),
                len: import.len,
                import: import.memory,
            }));
        }
        journaled
    }

    /// Returns the files of the mappings, with their addresses.
    pub fn files(&self) -> impl Iterator<Item = (GuestPa, BorrowedFd<'_>)> {
        let files = self.maps.iter().map(|(start, map)| (*start, map.file.as_ref()));
        files.filter_map(|(start, file)| Some((GuestPa(start), file?.0.as_fd())))
    }

    /// Adopts the mappings of another process. `take` returns their files. A mapping that
    /// cannot be made is left out, and logged.
    pub fn adopt(
        &mut self,
        memory: &JournaledMemory,
        mut take: impl FnMut(GuestPa) -> Option<OwnedFd>,
    ) {
        for map in &memory.maps {
            let JournaledMap { address, size, access, offset, import } = *map;
            if let Err(error) = self.map(address, size, access, take(address).zip(offset)) {
                log::warn!("Guest memory of the process before is lost: {error}");
            } else if let Some(import) = import {
                self.adopt_import(JournaledPart { address, len: size, import });
            }
        }
        memory.parts.iter().for_each(|part| self.adopt_import(*part));
    }

    /// Takes up an import that is inside a mapping and overlaps no other.
    fn adopt_import(&mut self, JournaledPart { address, len, import }: JournaledPart) {
        let found = self.maps.range_mut(..=address.0).next_back();
        let Some((start, map)) = found else { return };
        let offset = address.0 - start;
        let free = if map.import_at(offset).is_none() { map.gap(offset).end } else { 0 };
        if offset.checked_add(len).is_some_and(|end| offset < end && end <= free) {
            map.imports.insert(offset, Import { memory: import, len });
            self.imported = self.imported.saturating_add(len);
        } else {
            log::warn!(
                "An import of the process before is lost: {len:#x} bytes at {:#x}",
                address.0
            );
        }
    }
}
