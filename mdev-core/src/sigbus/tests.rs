use std::fs::File;
use std::os::fd::{AsFd, FromRawFd, OwnedFd};

use proptest::prelude::*;
use vm_memory::Bytes;

use super::*;
use crate::memory_file::MemoryFile;
use crate::testing::memory;
use crate::units::MIB;

/// Returns a file of `len` bytes on huge pages. The host need not have any free.
fn huge_memory(len: u64) -> Option<File> {
    let flags = libc::MFD_CLOEXEC | libc::MFD_HUGETLB | libc::MFD_HUGE_2MB;
    // SAFETY: creates a descriptor; the name outlives the call.
    let fd = unsafe { libc::memfd_create(c"huge".as_ptr(), flags) };
    // SAFETY: the descriptor is new and has no other owner.
    let file = (fd >= 0).then(|| File::from(unsafe { OwnedFd::from_raw_fd(fd) }))?;
    file.set_len(len).unwrap();
    Some(file)
}

/// Returns the ranges of the process' memory that lie in `start..end`, from /proc/self/maps.
fn ranges_within(start: usize, end: usize) -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let range = |line: &str| {
        let (from, rest) = line.split_once('-').unwrap();
        let (to, _) = rest.split_once(' ').unwrap();
        let number = |text| usize::from_str_radix(text, 16).unwrap();
        (number(from), number(to))
    };
    maps.lines().map(range).filter(|(from, to)| *from < end && *to > start).count()
}

#[test]
fn a_truncated_file_reads_as_zeros_and_poisons_the_mapping() {
    let file = memory(4 * PAGE_SIZE);
    let map = |pages: u64, protection| {
        GuardedMapping::map(file.as_fd(), 0, (pages * PAGE_SIZE) as usize, protection).unwrap()
    };
    let (mapping, other) = (map(4, Protection::ReadWrite), map(1, Protection::ReadOnly));
    mapping.slice().write_slice(&[7; 16], 3 * PAGE_SIZE as usize).unwrap();
    assert!(!mapping.poisoned());

    file.set_len(PAGE_SIZE).unwrap();
    let mut bytes = [1; 16];
    mapping.slice().read_slice(&mut bytes, 3 * PAGE_SIZE as usize).unwrap();
    assert_eq!(bytes, [0; 16]);
    assert!(mapping.poisoned());
    mapping.slice().write_slice(&[9; 16], 2 * PAGE_SIZE as usize).unwrap();

    other.slice().read_slice(&mut bytes, 0).unwrap();
    assert!(!other.poisoned(), "the remaining page is intact");
}

#[test]
fn a_truncated_file_costs_few_ranges_of_the_address_space() {
    let pages = 2 * PART / PAGE_SIZE as usize;
    let len = pages * PAGE_SIZE as usize;
    let file = memory(len as u64);
    let mapping = GuardedMapping::map(file.as_fd(), 0, len, Protection::ReadWrite).unwrap();
    file.set_len(0).unwrap();
    for page in (0..pages).step_by(16) {
        mapping.slice().write_slice(&[1], page * PAGE_SIZE as usize).unwrap();
    }
    let start = mapping.as_ptr().addr();
    assert!(ranges_within(start, start + len) <= 2);
}

#[test]
fn threads_that_fault_at_once_all_survive() {
    for _ in 0..50 {
        let file = memory(64 * PAGE_SIZE);
        let len = 64 * PAGE_SIZE as usize;
        let mapping = GuardedMapping::map(file.as_fd(), 0, len, Protection::ReadWrite).unwrap();
        file.set_len(0).unwrap();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let mapping = &mapping;
                scope.spawn(move || {
                    for page in 0..64 {
                        let at = page * PAGE_SIZE as usize + 8 * thread;
                        mapping.slice().write_slice(&[1], at).unwrap();
                    }
                });
            }
        });
        assert!(mapping.poisoned());
    }
}

#[test]
fn slots_are_reused() {
    let file = memory(PAGE_SIZE);
    for _ in 0..2 * MAX_MAPPINGS {
        GuardedMapping::map(file.as_fd(), 0, PAGE_SIZE as usize, Protection::ReadOnly).unwrap();
    }
}

#[test]
fn invalid_ranges_are_refused() {
    let file = memory(PAGE_SIZE);
    let map =
        |offset, len| GuardedMapping::map(file.as_fd(), offset, len, Protection::ReadOnly).is_err();
    assert!(map(0, 0));
    assert!(map(u64::MAX, 4096));
    assert!(map(u64::MAX - 4095, 4096));
    assert!(map(1, 4096));
    assert!(map(0, 4095));
    assert!(map(0, usize::MAX));
}

#[test]
fn files_that_are_not_memory_are_refused() {
    let (reader, _writer) = std::io::pipe().unwrap();
    let disk = File::open("/proc/self/exe").unwrap();
    let null = File::open("/dev/null").unwrap();
    for fd in [reader.as_fd(), disk.as_fd(), null.as_fd()] {
        assert!(MemoryFile::new(fd).is_err());
    }
    assert_eq!(MemoryFile::new(memory(PAGE_SIZE).as_fd()).unwrap().page_size(), PAGE_SIZE);
}

#[test]
fn memory_on_huge_pages_survives_truncation_and_is_unmapped() {
    let Some(file) = huge_memory(4 * MIB) else { return };
    let file_of_memory = MemoryFile::new(file.as_fd()).unwrap();
    assert_eq!(file_of_memory.page_size(), 2 * MIB);
    // As QEMU maps the RAM of a PC below the VGA hole.
    for (offset, len) in [(0, 0xa_0000), (0x1000, 0x1000), (0x1f_f000, 0x2000), (0, 4 << 20)] {
        file.set_len(4 * MIB).unwrap();
        let mapping = file_of_memory.map(offset, len, Protection::ReadWrite).unwrap();
        file.set_len(0).unwrap();
        mapping.slice().write_slice(&[1], len - 1).unwrap();
        assert!(mapping.poisoned());
        let start = mapping.as_ptr().addr();
        drop(mapping);
        // Other tests' threads may have mapped the addresses since; a file of huge pages none.
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("/memfd:huge"), "{start:#x}: {maps}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]
    /// Any range of any pages is mapped with exactly its bytes, survives any new length, and leaves
    /// nothing.
    #[test]
    fn any_range_is_mapped_and_survives_any_truncation(
        huge: bool,
        first in 0_u64..1100,
        pages in 1_u64..1100,
        left in 0_u64..5,
        touched in prop::collection::vec(any::<prop::sample::Index>(), 1..8),
    ) {
        let file = if huge { huge_memory(8 * MIB) } else { None };
        let file = file.unwrap_or_else(|| memory(8 * MIB));
        let memory_file = MemoryFile::new(file.as_fd()).unwrap();
        let (offset, len) = (first * PAGE_SIZE, (pages * PAGE_SIZE) as usize);
        let mapping = memory_file.map(offset, len, Protection::ReadWrite).unwrap();
        prop_assert_eq!(mapping.len(), len);
        prop_assert!(is_aligned(mapping.as_ptr().addr() as u64 - offset, PAGE_SIZE));
        prop_assert_eq!(mapping.pages.len as u64 % memory_file.page_size(), 0);
        let end = mapping.as_ptr().addr() + len;
        prop_assert!(mapping.pages.start <= mapping.as_ptr().addr());
        prop_assert!(mapping.pages.start + mapping.pages.len >= end);
        file.set_len(left * 2 * MIB).unwrap();
        for index in touched {
            mapping.slice().write_slice(&[1], index.index(len)).unwrap();
        }
    }
}
