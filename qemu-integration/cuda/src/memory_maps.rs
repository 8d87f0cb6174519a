//! Mappings of the process, from `/proc/self/maps`.

use std::fs::File;
use std::io::Read;

use cuda_socket::Range;
use nix::errno::Errno;
use nix::libc::{PROT_EXEC, PROT_READ, PROT_WRITE};

use crate::sys::kernel;

/// Beginning of the name of mappings of an arena.
pub const ARENA_NAME: &str = "/memfd:tessera-cuda";

/// A mapping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemoryMap {
    /// First address.
    pub start: u64,
    /// Address after the last.
    pub end: u64,
    /// Protection, as `mmap` has it.
    pub protection: i32,
    /// Whether writes go to the file.
    pub shared: bool,
    /// Offset in the file.
    pub offset: u64,
    /// Inode of the file, or 0.
    pub inode: u64,
    /// Path of the file, or a name in brackets.
    pub name: String,
}

impl MemoryMap {
    /// Parses a line.
    fn parse(line: &str) -> Option<Self> {
        let mut words = line.splitn(6, ' ');
        let (start, end) = words.next()?.split_once('-')?;
        let hex = |text| u64::from_str_radix(text, 16).ok();
        let access = words.next()?.as_bytes();
        let bit =
            |at: usize, letter, value| if access.get(at) == Some(&letter) { value } else { 0 };
        let offset = hex(words.next()?)?;
        let _device = words.next()?;
        Some(Self {
            start: hex(start)?,
            end: hex(end)?,
            protection: bit(0, b'r', PROT_READ)
                | bit(1, b'w', PROT_WRITE)
                | bit(2, b'x', PROT_EXEC),
            shared: access.get(3) == Some(&b's'),
            offset,
            inode: words.next()?.parse().ok()?,
            name: words.next().unwrap_or_default().trim_start().to_owned(),
        })
    }

    /// Returns whether the mapping is readable and writable memory of the process, without a file,
    /// and can be replaced. Stacks cannot: the kernel grows them. What a child of `fork()` has of
    /// its parent's memory can. Shared memory without a file (`/dev/zero`) can, too: libcuda
    /// allocates its own so, and registers it at once. Children of an earlier `fork()` keep what
    /// they have.
    pub fn is_own_memory(&self) -> bool {
        let name = &self.name;
        let anonymous = name.is_empty() || name == "[heap]" || name.starts_with("[anon:");
        let access = PROT_READ | PROT_WRITE;
        let private = self.inode == 0 && anonymous || name.starts_with(ARENA_NAME);
        let without_file = if self.shared { name == "/dev/zero (deleted)" } else { private };
        self.protection & access == access && without_file
    }

    /// Returns the part of a range that lies in the mapping.
    pub fn part_of(&self, range: Range) -> Option<Range> {
        let start = self.start.max(range.address);
        let end = self.end.min(range.address.checked_add(range.len)?);
        (start < end).then(|| Range { address: start, len: end - start })
    }
}

/// Returns the mappings of this process in the order of their addresses.
pub fn read() -> Result<Vec<MemoryMap>, Errno> {
    let mut text = Vec::new();
    let mut file = File::from(kernel::open_host_file(c"/proc/self/maps")?);
    file.read_to_end(&mut text).map_err(|_| Errno::EIO)?;
    // A path can be any bytes.
    Ok(String::from_utf8_lossy(&text).lines().filter_map(MemoryMap::parse).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_parsed() {
        let heap = "55d0c0a00000-55d0c0a21000 rw-p 00000000 00:00 0                  [heap]";
        let heap = MemoryMap::parse(heap).unwrap();
        assert_eq!((heap.start, heap.end), (0x55d0_c0a0_0000, 0x55d0_c0a2_1000));
        assert!(heap.is_own_memory());
        let shared = "7f0000001000-7f0000003000 rw-s 00000000 00:01 9 /dev/zero (deleted)";
        assert!(MemoryMap::parse(shared).unwrap().is_own_memory());
        let file = "7f0000001000-7f0000003000 rw-s 00002000 00:01 1027 /memfd:a b (deleted)";
        let file = MemoryMap::parse(file).unwrap();
        assert_eq!((file.offset, file.inode, file.shared), (0x2000, 1027, true));
        assert_eq!(file.name, "/memfd:a b (deleted)");
        assert!(!file.is_own_memory());
        for line in [
            "7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0 [stack]",
            "7f0000001000-7f0000003000 r--p 00000000 00:00 0 ",
            "7f0000001000-7f0000003000 rw-p 00000000 08:01 77 /usr/lib/x.so",
        ] {
            assert!(!MemoryMap::parse(line).unwrap().is_own_memory(), "{line}");
        }
        let part = heap.part_of(Range { address: 0, len: heap.start + 0x1000 }).unwrap();
        assert_eq!(part, Range { address: heap.start, len: 0x1000 });
        assert_eq!(heap.part_of(Range { address: heap.end, len: 1 }), None);
        assert_eq!(MemoryMap::parse("nonsense"), None);
    }

    #[test]
    fn this_process_has_mappings() {
        let local = 0_u8;
        let address = std::ptr::from_ref(&local) as u64;
        let maps = read().unwrap();
        assert!(maps.iter().any(|map| map.start <= address && address < map.end));
    }
}
