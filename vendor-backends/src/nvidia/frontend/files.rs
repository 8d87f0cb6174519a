//! Open device files of programs.

use std::collections::{BTreeMap, BTreeSet};

use cuda_socket::{FileId, Node};
use mdev_core::ids::SpaceId;
use nix::errno::Errno;

use super::call::Stop;
use super::memory::StoreId;

/// Maximum number of open files. A context has some 40.
const MAX_FILES: usize = 4096;

/// State of an open file.
#[derive(Debug)]
pub struct File {
    /// The device node.
    pub node: Node,
    /// Id of the process that opened it.
    pub process: i32,
    /// Control file that a GPU's file is attached to (`NV_ESC_REGISTER_FD`).
    pub control: Option<FileId>,
    /// Memory that `mmap` of the file maps (`NV_ESC_RM_MAP_MEMORY`).
    pub mapped: Option<StoreId>,
    /// State of a file of nvidia-uvm.
    pub uvm: UvmFile,
}

/// State of a file of nvidia-uvm.
#[derive(Debug, Default)]
pub struct UvmFile {
    /// Registered address spaces.
    pub spaces: BTreeSet<SpaceId>,
    /// Number of range groups created.
    pub range_groups: u64,
    /// Ranges that the program has mapped and that have no memory: length by address.
    pub empty: BTreeMap<u64, u64>,
    /// Ranges of external mappings (`UVM_CREATE_EXTERNAL_RANGE`): length by address.
    pub external: BTreeMap<u64, u64>,
}

/// All open files of a vGPU.
#[derive(Debug, Default)]
pub struct Files {
    open: BTreeMap<FileId, File>,
}

impl Files {
    /// Adds an open file.
    pub fn open(&mut self, id: FileId, node: Node, process: i32) -> Result<(), Errno> {
        if self.open.len() >= MAX_FILES {
            return Err(Errno::ENFILE);
        }
        let file = File { node, process, control: None, mapped: None, uvm: UvmFile::default() };
        self.open.insert(id, file);
        Ok(())
    }

    /// Removes a file.
    pub fn close(&mut self, id: FileId) -> Option<File> {
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
