//! Descriptors of the host's programs at the anchor, and new memory among them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipc::mem::sealed_memfd;
use nix::sys::stat::fstat;
use programs::front_end::{MemoryFileId, NewFiles};

use super::descriptors::{Anchor, Key, MAX_OF_PROGRAMS};

/// Descriptors of programs that the anchor keeps, or of memory that it has kept for a worker
/// before.
#[derive(Debug)]
pub(super) struct MemoryFiles {
    pub anchor: Anchor,
    pub keys: BTreeSet<Key>,
    /// Keys for which there was no room.
    pub missing: BTreeSet<Key>,
    /// Memory that an earlier worker has made for a request that it has not finished.
    pub unfinished: BTreeMap<u32, OwnedFd>,
}

impl MemoryFiles {
    pub fn new(anchor: Anchor) -> Self {
        let (keys, missing) = (BTreeSet::new(), BTreeSet::new());
        Self { anchor, keys, missing, unfinished: BTreeMap::new() }
    }

    pub fn keep(&mut self, key: Key, fd: BorrowedFd<'_>) {
        if self.keys.contains(&key) {
            return;
        }
        if self.keys.len() >= MAX_OF_PROGRAMS {
            self.missing.insert(key);
            return;
        }
        self.anchor.cancel_drop(key);
        self.anchor.keep(key, fd);
        self.keys.insert(key);
    }

    pub fn drop_now(&mut self, key: Key) {
        if self.keys.remove(&key) {
            self.anchor.drop_now(key..=key);
        }
    }

    pub fn drop_later(&mut self, key: Key) {
        self.missing.remove(&key);
        if self.keys.remove(&key) {
            self.anchor.drop_later(key..=key);
        }
    }
}

/// Maker of the memory of programs. The anchor keeps a file before the GPU gets to know it: a
/// worker that repeats the request uses the same.
#[derive(Clone, Debug)]
pub struct ProgramMemory(Arc<Mutex<MemoryFiles>>);

impl ProgramMemory {
    pub(super) fn new(kept: MemoryFiles) -> Self {
        Self(Arc::new(Mutex::new(kept)))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, MemoryFiles> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NewFiles for ProgramMemory {
    fn create(&mut self, id: MemoryFileId, len: u64) -> io::Result<OwnedFd> {
        let mut kept = self.lock();
        let has_len = |fd: &OwnedFd| fstat(fd).is_ok_and(|it| it.st_size.cast_unsigned() == len);
        let key = Key::program_memory(id.0);
        if let Some(file) = kept.unfinished.remove(&id.0).filter(has_len) {
            return Ok(file);
        }
        let file = sealed_memfd(c"cuda", len)?;
        kept.keys.remove(&key);
        kept.keep(key, file.as_fd());
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use ipc::seqpacket::SeqPacket;

    use super::super::descriptors::{Descriptors, Message};
    use super::*;

    #[test]
    fn a_request_that_is_repeated_gets_the_same_memory() {
        let inode = |fd: &OwnedFd| fstat(fd).unwrap().st_ino;
        let (anchor, worker) = SeqPacket::pair().unwrap();
        let mut first = ProgramMemory::new(MemoryFiles::new(Anchor::new(worker)));
        let made = first.create(MemoryFileId(7), 8192).unwrap();
        let other = first.create(MemoryFileId(8), 8192).unwrap();
        let mut kept = Descriptors::default();
        let keep_next = |anchor: &SeqPacket, kept: &mut Descriptors| {
            let mut buffer = [0; Message::BYTES];
            let packet = anchor.recv_with_fds(&mut buffer).unwrap().unwrap();
            let message = Message::decode(&buffer[..packet.len]).unwrap();
            assert!(kept.apply(message, packet.fds.into_iter().next()));
        };
        (0..2).for_each(|_| keep_next(&anchor, &mut kept));
        let programs = kept.take_programs();
        let (anchor, worker) = SeqPacket::pair().unwrap();
        let mut next = MemoryFiles::new(Anchor::new(worker));
        next.keys.extend(programs.keys());
        next.unfinished = programs.memory;
        let mut next = ProgramMemory::new(next);
        assert_eq!(inode(&next.create(MemoryFileId(7), 8192).unwrap()), inode(&made));
        let shorter = next.create(MemoryFileId(8), 4096).unwrap();
        assert_ne!(inode(&shorter), inode(&other), "it has another length");
        // Only what is new goes to the anchor.
        let mut kept = Descriptors::default();
        keep_next(&anchor, &mut kept);
        assert_eq!(kept.keys().collect::<Vec<_>>(), [Key::program_memory(8)]);
        assert!(anchor.try_recv(&mut [0; Message::BYTES]).is_err());
    }
}
