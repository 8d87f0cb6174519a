//! The file descriptors of one message.

use std::array;
use std::os::fd::OwnedFd;

/// Most descriptors of one message. (QEMU refuses a server that asks for more.)
pub const MAX_FDS: usize = 16;

/// Up to [`MAX_FDS`] descriptors, in the order they came, without an allocation. Dropping it closes them.
#[derive(Debug, Default)]
pub struct Fds {
    fds: [Option<OwnedFd>; MAX_FDS],
    len: usize,
}

impl Fds {
    /// None.
    pub const fn new() -> Self {
        Self { fds: [const { None }; MAX_FDS], len: 0 }
    }

    /// Adds one, or gives it back where there is no room.
    pub fn push(&mut self, fd: OwnedFd) -> Result<(), OwnedFd> {
        let Some(slot) = self.fds.get_mut(self.len) else { return Err(fd) };
        *slot = Some(fd);
        self.len += 1;
        Ok(())
    }

    /// How many.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// They are handed over; none are left here.
    #[must_use]
    pub fn take(&mut self) -> Self {
        std::mem::take(self)
    }

    /// The descriptors, still owned by the list.
    pub fn iter(&self) -> impl Iterator<Item = &OwnedFd> {
        self.fds.iter().flatten()
    }
}

impl IntoIterator for Fds {
    type Item = OwnedFd;
    type IntoIter = std::iter::Flatten<array::IntoIter<Option<OwnedFd>, MAX_FDS>>;

    fn into_iter(self) -> Self::IntoIter {
        self.fds.into_iter().flatten()
    }
}
