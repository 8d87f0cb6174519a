//! File descriptors of a message.

use std::array;

use foreign_fds::ForeignFd;

/// Limit of descriptors per message. QEMU refuses servers with a higher limit.
pub const MAX_FDS: usize = 16;

/// List of up to [`MAX_FDS`] descriptors, in the order of arrival, without allocations. Dropping it
/// closes the descriptors without waiting for what they belong to.
#[derive(Debug, Default)]
pub struct Fds {
    fds: [Option<ForeignFd>; MAX_FDS],
    len: usize,
}

impl Fds {
    /// Returns an empty list.
    pub const fn new() -> Self {
        Self { fds: [const { None }; MAX_FDS], len: 0 }
    }

    /// Adds a descriptor, or returns it if there is no room.
    pub fn push(&mut self, fd: impl Into<ForeignFd>) -> Result<(), ForeignFd> {
        let fd = fd.into();
        let Some(slot) = self.fds.get_mut(self.len) else { return Err(fd) };
        *slot = Some(fd);
        self.len += 1;
        Ok(())
    }

    /// Returns the number of descriptors.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns true if the list is empty.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the descriptors and leaves an empty list.
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// Iterates over the descriptors.
    pub fn iter(&self) -> impl Iterator<Item = &ForeignFd> {
        self.fds.iter().flatten()
    }
}

impl IntoIterator for Fds {
    type Item = ForeignFd;
    type IntoIter = std::iter::Flatten<array::IntoIter<Option<ForeignFd>, MAX_FDS>>;

    fn into_iter(self) -> Self::IntoIter {
        self.fds.into_iter().flatten()
    }
}
