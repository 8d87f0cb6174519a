//! Results of `stat()` for paths and files of the driver.

use cuda_socket::Node;
use nix::errno::Errno;
use nix::libc::{S_IFCHR, S_IFDIR, S_IFLNK, S_IFREG, makedev};

use crate::node_files;
use crate::paths::DriverPath;
use crate::session;

/// Type, size and device of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStatus {
    /// Type and permissions.
    pub mode: u32,
    /// Major and minor numbers of a device.
    pub device: (u32, u32),
    /// Length in bytes.
    pub len: u64,
}

impl FileStatus {
    /// Returns the status of a path.
    pub fn of_path(path: DriverPath<'_>, follow: bool) -> Result<Self, Errno> {
        let file = |mode, len| Self { mode, device: (0, 0), len };
        match path {
            DriverPath::Node(node) => node_files::exists(node).map(|()| Self::of_node(node)),
            DriverPath::CharacterLink { major, minor } => {
                let node = node_files::node_of(major, minor).ok_or(Errno::ENOENT)?;
                node_files::exists(node)?;
                Ok(if follow { Self::of_node(node) } else { file(S_IFLNK | 0o777, 0) })
            }
            DriverPath::Proc(name) => {
                let welcome = session::welcome()?;
                match welcome.proc_files.iter().find(|(path, _)| path == name) {
                    // As in /proc, the length is not known before the file is read.
                    Some(_) => Ok(file(S_IFREG | 0o444, 0)),
                    None if node_files::is_folder(&welcome, name) => Ok(file(S_IFDIR | 0o555, 0)),
                    None => Err(Errno::ENOENT),
                }
            }
            DriverPath::Devices => Ok(file(S_IFREG | 0o444, 0)),
            DriverPath::ModuleState => Ok(file(S_IFREG | 0o444, 4096)),
            DriverPath::Absent => Err(Errno::ENOENT),
        }
    }

    /// Returns the status of a device node.
    pub fn of_node(node: Node) -> Self {
        Self { mode: S_IFCHR | 0o666, device: node_files::numbers(node), len: 0 }
    }

    /// Returns whether a user may access the file with `mode`, as `access()` has it.
    pub fn allows(self, mode: i32) -> bool {
        let allowed = (self.mode & 7).cast_signed();
        mode & !allowed == 0
    }

    /// Writes the status as `stat()` does.
    pub fn fill(self, status: &mut libc::stat) {
        status.st_mode = self.mode;
        status.st_nlink = 1;
        status.st_ino = self.inode();
        status.st_rdev = makedev(self.device.0, self.device.1);
        status.st_size = self.len.cast_signed();
        status.st_blksize = BLOCK;
    }

    /// Writes the status as `statx()` does.
    pub fn fill_statx(self, status: &mut libc::statx) {
        status.stx_mask = libc::STATX_BASIC_STATS;
        status.stx_blksize = BLOCK as u32;
        status.stx_nlink = 1;
        status.stx_mode = self.mode as u16;
        status.stx_ino = self.inode();
        status.stx_size = self.len;
        status.stx_rdev_major = self.device.0;
        status.stx_rdev_minor = self.device.1;
    }

    /// Returns a number that differs between device nodes.
    fn inode(self) -> u64 {
        u64::from(self.device.0) << 32 | u64::from(self.device.1) << 1 | 1
    }
}

const BLOCK: libc::blksize_t = 4096;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_character_devices_for_all_users() {
        let status = FileStatus::of_node(Node::Control);
        assert_eq!((status.mode, status.device), (S_IFCHR | 0o666, (195, 255)));
        assert!(status.allows(libc::R_OK | libc::W_OK) && status.allows(libc::F_OK));
        assert!(!status.allows(libc::X_OK));
        let devices = FileStatus::of_path(DriverPath::Devices, true).unwrap();
        assert!(devices.allows(libc::R_OK) && !devices.allows(libc::W_OK));
        assert_eq!(FileStatus::of_path(DriverPath::Absent, true), Err(Errno::ENOENT));
    }
}
