//! Copies through staging memory: the same as by one thread, and no damage goes unnoticed.

use std::cell::RefCell;
use std::io::{Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use mdev_core::gpu::StagedCopy;
use mdev_core::stream::{IndexedVgpu, StreamError, StreamWriter};
use mdev_core::testing::{memory, saved_head};
use nix::sys::memfd::{MFdFlags, memfd_create};
use proptest::prelude::*;

use super::*;

const CHUNK: u64 = MAX_CHUNK as u64;
/// Slots of two chunks.
const STAGING: u64 = SLOTS * 2 * CHUNK + 4096;
const BYTES: u64 = 19 * CHUNK + 12_288;

/// Video memory that is copied to and from a file.
struct Gpu {
    staging: File,
    vram: Mutex<Vec<u8>>,
    copies: Mutex<Vec<StagedCopy>>,
}

impl Gpu {
    fn new(vram: Vec<u8>) -> Self {
        Self { staging: memory(STAGING), vram: Mutex::new(vram), copies: Mutex::default() }
    }

    fn staging(&self) -> Staging {
        Staging::new(self.staging.try_clone().unwrap(), STAGING).unwrap()
    }

    fn copy(&self, copy: StagedCopy) -> io::Result<()> {
        let StagedCopy { offset, len, at, fills } = copy;
        assert!(at + len <= STAGING && offset + len <= BYTES && len > 0, "{copy:?}");
        let mut vram = self.vram.lock().unwrap();
        let part = &mut vram[offset as usize..(offset + len) as usize];
        self.copies.lock().unwrap().push(copy);
        if fills {
            self.staging.read_exact_at(part, at)
        } else {
            self.staging.write_all_at(part, at)
        }
    }
}

/// Writes the memory of a GPU into a file with a stream.
fn saved(gpu: &Gpu, threads: usize) -> File {
    let mut stream = StreamWriter::new(memory(0), &saved_head(BYTES)).unwrap();
    stream.state(b"state").unwrap();
    let write = |chunk: &_| stream.memory_chunk(chunk);
    read::read(&gpu.staging(), BYTES, threads, |copy| gpu.copy(copy), write).unwrap();
    stream.finish().unwrap()
}

fn restored(file: &File, threads: usize) -> Result<Gpu, StreamError> {
    let gpu = Gpu::new(vec![0; BYTES as usize]);
    let vgpu = IndexedVgpu::find(file, 0)?;
    fill::fill(file, &vgpu.memory, &gpu.staging(), threads, |copy| gpu.copy(copy))?;
    Ok(gpu)
}

/// Memory of which some parts are zero.
fn contents(parts: &[(u64, usize, u8)]) -> Vec<u8> {
    let mut contents = vec![0; BYTES as usize];
    for (at, len, byte) in parts {
        let part = &mut contents[*at as usize..*at as usize + len];
        part.iter_mut().enumerate().for_each(|(n, to)| *to = (n as u8).wrapping_mul(*byte) | 1);
    }
    contents
}

fn full() -> Vec<u8> {
    contents(&[(0, BYTES as usize, 7)])
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_is_saved_on_several_threads_is_restored(
        parts in prop::collection::vec((0..BYTES - 3_000_000, 1_usize..3_000_000, 1_u8..), 0..6),
        threads in 1_usize..6,
    ) {
        let contents = contents(&parts);
        let gpu = Gpu::new(contents.clone());
        let file = saved(&gpu, threads);
        let one = saved(&gpu, 1);
        let bytes = |mut file: File| {
            let mut bytes = Vec::new();
            file.rewind().unwrap();
            io::Read::read_to_end(&mut file, &mut bytes).unwrap();
            bytes
        };
        prop_assert!(bytes(file.try_clone().unwrap()) == bytes(one), "another file");
        let gpu = restored(&file, threads).unwrap();
        prop_assert!(*gpu.vram.lock().unwrap() == contents);
    }
}

#[test]
fn a_slot_is_copied_by_one_request() {
    let gpu = Gpu::new(full());
    let file = saved(&gpu, 4);
    assert_eq!(gpu.copies.lock().unwrap().len(), 10);
    let gpu = restored(&file, 4).unwrap();
    let copies = gpu.copies.lock().unwrap();
    assert_eq!(copies.len(), 10);
    let places: Vec<_> = copies.iter().map(|copy| copy.at / (2 * CHUNK)).collect();
    assert_eq!(places, [0, 1, 2, 3, 0, 1, 2, 3, 0, 1], "the slots in turn");
}

#[test]
fn damaged_memory_is_refused_by_each_number_of_threads() {
    let file = saved(&Gpu::new(full()), 2);
    let len = file.metadata().unwrap().len();
    for threads in [1, 2, 5] {
        for at in [len / 3, len - 100] {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 8], at).unwrap();
            let refused = restored(&file, threads).err();
            assert!(matches!(refused, Some(StreamError::Damaged(_))), "{refused:?}");
            file.write_all_at(&byte, at).unwrap();
        }
        restored(&file, threads).unwrap();
    }
}

#[test]
fn a_copy_that_fails_ends_the_work() {
    let gpu = Gpu::new(full());
    let file = saved(&gpu, 3);
    let vgpu = IndexedVgpu::find(&file, 0).unwrap();
    for failing in [1, 4, 10] {
        let count = RefCell::new(0);
        let copy = |copy| {
            *count.borrow_mut() += 1;
            if *count.borrow() == failing { Err(io::Error::other("lost")) } else { gpu.copy(copy) }
        };
        let error = fill::fill(&file, &vgpu.memory, &gpu.staging(), 3, copy).unwrap_err();
        assert_eq!(error.to_string(), "lost");
        let count = Mutex::new(0);
        let copy = |copy| {
            *count.lock().unwrap() += 1;
            if *count.lock().unwrap() == failing {
                return Err(io::Error::other("lost"));
            }
            gpu.copy(copy)
        };
        let error = read::read(&gpu.staging(), BYTES, 3, copy, |_| Ok(())).unwrap_err();
        assert_eq!(error.to_string(), "lost");
    }
    let mut written = 0;
    let write = |_: &_| {
        written += 1;
        if written > 5 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(()) }
    };
    let error = read::read(&gpu.staging(), BYTES, 3, |copy| gpu.copy(copy), write).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
}

#[test]
fn staging_memory_that_is_cut_ends_the_work() {
    let gpu = Gpu::new(full());
    let file = saved(&gpu, 3);
    let vgpu = IndexedVgpu::find(&file, 0).unwrap();
    let cut = |copy: StagedCopy| {
        if copy.offset > 0 {
            gpu.staging.set_len(4096).unwrap();
            return Ok(());
        }
        gpu.copy(copy)
    };
    let error = fill::fill(&file, &vgpu.memory, &gpu.staging(), 3, cut).unwrap_err().to_string();
    assert!(error.contains("taken its staging memory away"), "{error}");
    gpu.staging.set_len(STAGING).unwrap();
    let error = read::read(&gpu.staging(), BYTES, 3, cut, |_| Ok(())).unwrap_err().to_string();
    assert!(error.contains("taken its staging memory away"), "{error}");
}

/// A file whose owner makes `mmap` wait must not hold the lock of the manager's address space.
#[test]
fn a_save_maps_nothing() {
    let name = c"not-to-be-mapped";
    let staging = File::from(memfd_create(name, MFdFlags::MFD_CLOEXEC).unwrap());
    staging.set_len(STAGING).unwrap();
    let gpu = Gpu { staging, ..Gpu::new(full()) };
    let is_mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains(name.to_str().unwrap())
    };
    let copy = |copy| if is_mapped() { Err(io::Error::other("mapped")) } else { gpu.copy(copy) };
    let staging = gpu.staging();
    read::read(&staging, BYTES, 2, copy, |_| Ok(())).unwrap();
    let _mapped = staging.map().unwrap();
    assert!(is_mapped());
}

#[test]
fn foreign_files_are_refused_as_staging_memory() {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&[0; 4096]).unwrap();
    assert!(foreign_fds::is_memory(file.as_fd()) || Staging::new(file, STAGING).is_err());
    assert!(Staging::new(memory(STAGING), SLOTS * CHUNK - 1).is_err(), "too short");
}
