//! Table of the process's descriptors that are files of the driver.
//!
//! Other descriptors cost one atomic load. The table may be out of date: a process can close
//! descriptors in ways that the library does not see, and their numbers are used again. An entry
//! counts only if the descriptor is still the same socket, by its inode.
//!
//! A child of `vfork()` has descriptors of its own and its parent's memory. It closes descriptors
//! before it runs a program, and must not change the table. Only the table's owner does.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use cuda_socket::{FileId, Node};
use nix::unistd::getpid;

use crate::sys::kernel;

/// Number of descriptors that can be files of the driver.
pub const MAX_DESCRIPTORS: usize = 1 << 16;

/// A file of the driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpenFile {
    /// Number at the worker.
    pub id: FileId,
    /// Device node.
    pub node: Node,
}

/// Entry of a descriptor. `node` is written last and read first.
#[derive(Debug)]
struct Slot {
    /// 0 if the descriptor is no file of the driver, see [`encode`].
    node: AtomicU64,
    id: AtomicU64,
    inode: AtomicU64,
}

/// All zero and therefore without memory until a page of it is written.
static TABLE: [Slot; MAX_DESCRIPTORS] =
    [const { Slot { node: AtomicU64::new(0), id: AtomicU64::new(0), inode: AtomicU64::new(0) } };
        MAX_DESCRIPTORS];

/// The process that the table belongs to.
static OWNER: AtomicI32 = AtomicI32::new(0);

/// Makes this process the table's owner: before its first file, and in a child of `fork()`.
pub fn own() {
    OWNER.store(getpid().as_raw(), Ordering::Release);
}

fn is_owner() -> bool {
    OWNER.load(Ordering::Acquire) == getpid().as_raw()
}

fn encode(node: Node) -> u64 {
    match node {
        Node::Control => 1,
        Node::Uvm => 2,
        Node::Gpu(minor) => 3 + u64::from(minor),
    }
}

fn decode(code: u64) -> Option<Node> {
    match code {
        0 => None,
        1 => Some(Node::Control),
        2 => Some(Node::Uvm),
        _ => u32::try_from(code - 3).ok().map(Node::Gpu),
    }
}

fn slot(fd: RawFd) -> Option<&'static Slot> {
    TABLE.get(usize::try_from(fd).ok()?)
}

/// Returns whether the descriptor may be a file of the driver. Costs one load.
pub fn possible(fd: RawFd) -> bool {
    slot(fd).is_some_and(|slot| slot.node.load(Ordering::Acquire) != 0)
}

/// Returns the file of a descriptor, if it is a file of the driver.
pub fn get(fd: RawFd) -> Option<OpenFile> {
    let slot = slot(fd)?;
    let node = decode(slot.node.load(Ordering::Acquire))?;
    let id = FileId(slot.id.load(Ordering::Relaxed));
    if kernel::status_of(fd).is_ok_and(|now| now.st_ino == slot.inode.load(Ordering::Relaxed)) {
        return Some(OpenFile { id, node });
    }
    remove(fd);
    None
}

/// Enters a descriptor. Returns false if the number is too large for the table.
pub fn insert(fd: RawFd, file: OpenFile) -> bool {
    if !is_owner() {
        return false;
    }
    let (Some(slot), Ok(status)) = (slot(fd), kernel::status_of(fd)) else { return false };
    slot.id.store(file.id.0, Ordering::Relaxed);
    slot.inode.store(status.st_ino, Ordering::Relaxed);
    slot.node.store(encode(file.node), Ordering::Release);
    true
}

/// Removes a descriptor.
pub fn remove(fd: RawFd) {
    if let Some(slot) = slot(fd)
        && slot.node.load(Ordering::Relaxed) != 0
        && is_owner()
    {
        slot.node.store(0, Ordering::Release);
    }
}

/// Enters a copy of a descriptor. The copy's number may have been another file.
pub fn copy(from: RawFd, to: RawFd) {
    match get(from) {
        Some(file) => drop(insert(to, file)),
        None => remove(to),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_number_that_is_another_file_now_is_no_file_of_the_driver() {
        own();
        let (ours, theirs) = UnixStream::pair().unwrap();
        let file = OpenFile { id: FileId(7), node: Node::Gpu(3) };
        let fd = ours.as_raw_fd();
        assert_eq!(get(fd), None);
        assert!(insert(fd, file));
        assert_eq!(get(fd), Some(file));
        let copy_of_it = ours.try_clone().unwrap();
        copy(fd, copy_of_it.as_raw_fd());
        assert_eq!(get(copy_of_it.as_raw_fd()), Some(file));
        // SAFETY: replaces a descriptor of this test.
        assert_eq!(unsafe { libc::dup2(theirs.as_raw_fd(), fd) }, fd);
        assert!(possible(fd));
        assert_eq!(get(fd), None, "another file has its number");
        assert!(!possible(fd));
        copy(fd, copy_of_it.as_raw_fd());
        assert_eq!(get(copy_of_it.as_raw_fd()), None);
    }

    #[test]
    fn nodes_have_codes() {
        for node in [Node::Control, Node::Uvm, Node::Gpu(0), Node::Gpu(u32::MAX)] {
            assert_eq!(decode(encode(node)), Some(node));
        }
        assert_eq!((decode(0), get(-1), get(i32::MAX)), (None, None, None));
    }
}
