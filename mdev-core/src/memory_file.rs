//! Files of guest memory, which other processes pass.
//!
//! A descriptor of another process can belong to a file system in user space (FUSE) whose server
//! never answers: then closing the file, reading its size and reading a mapped page can each wait
//! for ever, in a state that not even SIGKILL ends. Only memory files are therefore used: memfds
//! and files of tmpfs and hugetlbfs. The kernel answers for them itself.

use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::sigbus::{GuardedMapping, Protection};
use crate::units::PAGE_SIZE;

/// File of guest memory: a memfd, or a file of tmpfs or hugetlbfs.
#[derive(Clone, Copy, Debug)]
pub struct MemoryFile<'fd> {
    fd: BorrowedFd<'fd>,
    page_size: u64,
}

impl<'fd> MemoryFile<'fd> {
    /// Checks a descriptor of another process.
    ///
    /// # Errors
    ///
    /// Fails if the descriptor is not a memory file.
    pub fn new(fd: BorrowedFd<'fd>) -> io::Result<Self> {
        if !foreign_fds::is_memory(fd) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "its file is neither a memfd nor in tmpfs or hugetlbfs: give the VM a memory backend \
                 of the kind memory-backend-memfd, or a file in /dev/shm",
            ));
        }
        let mut status = MaybeUninit::<libc::statfs>::zeroed();
        // SAFETY: the kernel writes to a structure of the right type.
        if unsafe { libc::fstatfs(fd.as_raw_fd(), status.as_mut_ptr()) } < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: zeroed, and then filled by the kernel.
        let status = unsafe { status.assume_init() };
        let is_huge = status.f_type == libc::HUGETLBFS_MAGIC;
        let page_size = u64::try_from(status.f_bsize).unwrap_or(0);
        Ok(Self { fd, page_size: if is_huge { page_size } else { PAGE_SIZE } })
    }

    /// Returns the size of the file's pages in bytes. The kernel maps whole pages only.
    pub fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Returns the file's length in bytes, which its owner can change at any time.
    pub fn len(&self) -> io::Result<u64> {
        let file = self.fd.try_clone_to_owned().map(File::from)?;
        file.metadata().map(|metadata| metadata.len())
    }

    /// Returns true if the file has no bytes.
    pub fn is_empty(&self) -> io::Result<bool> {
        self.len().map(|len| len == 0)
    }

    /// Maps `len` bytes from `offset`, both multiples of 4 KiB. The mapping survives any change of
    /// the file's length.
    pub fn map(
        &self,
        offset: u64,
        len: usize,
        protection: Protection,
    ) -> io::Result<GuardedMapping> {
        GuardedMapping::map_whole_pages(self.fd, offset, len, self.page_size, protection)
    }
}
