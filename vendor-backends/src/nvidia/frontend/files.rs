//! Open device files of programs.

use std::collections::BTreeSet;

use cuda_socket::{FileId, Node};
use mdev_core::ids::SpaceId;
use nix::errno::Errno;
use programs::change_map::ChangeMap;
use programs::front_end::Opener;
use serde::{Deserialize, Serialize};

use super::call::Stop;
use super::memory::StoreId;

/// Maximum number of open files. A context has some 40.
pub const MAX_FILES: usize = 4096;

/// State of an open file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct File {
    /// The device node.
    pub node: Node,
    /// Process that opened it.
    pub opener: Opener,
    /// Control file that a GPU's file is attached to (`NV_ESC_REGISTER_FD`).
    pub control: Option<FileId>,
    /// Memory that `mmap` of the file maps (`NV_ESC_RM_MAP_MEMORY`).
    pub mapped: Option<StoreId>,
    /// State of a file of nvidia-uvm.
    pub uvm: UvmFile,
}

/// State of a file of nvidia-uvm.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UvmFile {
    /// Registered address spaces.
    pub spaces: BTreeSet<SpaceId>,
    /// Number of range groups created.
    pub range_groups: u64,
}

/// Ranges of files of nvidia-uvm: length by file and address.
pub type Ranges = ChangeMap<(FileId, u64), u64>;

/// Maximum number of ranges of each kind.
pub const MAX_RANGES: usize = 65_536;

/// All open files of a vGPU.
#[derive(Debug, Default)]
pub struct Files {
    pub(super) open: ChangeMap<FileId, File>,
    /// Ranges that programs have mapped and that have no memory.
    pub empty: Ranges,
    /// Ranges of external mappings (`UVM_CREATE_EXTERNAL_RANGE`).
    pub external: Ranges,
    /// Files through which programs have managed memory. Not recorded: an adopting worker does
    /// not refuse to save these programs, and libcuda does.
    pub managed: BTreeSet<FileId>,
}

impl Files {
    /// Adds an open file.
    pub fn open(&mut self, id: FileId, node: Node, opener: Opener) -> Result<(), Errno> {
        if self.open.len() >= MAX_FILES {
            return Err(Errno::ENFILE);
        }
        let file = File { node, opener, control: None, mapped: None, uvm: UvmFile::default() };
        self.open.insert(id, file);
        Ok(())
    }

    /// Removes a file.
    pub fn close(&mut self, id: FileId) -> Option<File> {
        for ranges in [&mut self.empty, &mut self.external] {
            let of_file = ranges.range((id, 0)..=(id, u64::MAX));
            for key in of_file.map(|(key, _)| *key).collect::<Vec<_>>() {
                ranges.remove(&key);
            }
        }
        self.managed.remove(&id);
        self.open.remove(&id)
    }

    /// Returns a file.
    pub fn get(&self, id: FileId) -> Result<&File, Stop> {
        self.open.get(&id).ok_or(Stop::Errno(Errno::EBADF))
    }

    /// Returns a file for a change.
    pub fn get_mut(&mut self, id: FileId) -> Result<&mut File, Stop> {
        self.open.get_mut(&id).ok_or(Stop::Errno(Errno::EBADF))
    }

    /// Returns the control file whose clients a file may use: itself, or the one that it is
    /// attached to.
    pub fn control_of(&self, id: FileId) -> Result<FileId, Stop> {
        Ok(self.get(id)?.control.unwrap_or(id))
    }
}
