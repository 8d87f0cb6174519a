//! Memory of the program that lies in a file already.
//!
//! libcuda keeps events that processes share in files of `/dev/shm`, and registers their memory.

use std::ffi::CString;
use std::os::fd::{AsRawFd, OwnedFd};

use cuda_socket::{Range, SharedRange};
use nix::errno::Errno;
use nix::libc::{PROT_READ, PROT_WRITE};

use crate::memory_maps::{self, MemoryMap};
use crate::sys::kernel;

/// Folder of POSIX shared memory (`shm_open`).
const SHARED_MEMORY: &str = "/dev/shm/";

/// Returns the file of a range that lies in one writable mapping of a file in [`SHARED_MEMORY`],
/// and the range's place there.
pub fn find(range: Range) -> Result<Option<(OwnedFd, SharedRange)>, Errno> {
    let maps = memory_maps::read()?;
    let Some(map) = maps.iter().find(|map| map.part_of(range) == Some(range)) else {
        return Ok(None);
    };
    let access = PROT_READ | PROT_WRITE;
    if !map.shared || map.protection & access != access || !map.name.starts_with(SHARED_MEMORY) {
        return Ok(None);
    }
    let Some(file) = open(map) else { return Ok(None) };
    let offset = map.offset + (range.address - map.start);
    Ok(Some((file, SharedRange { range, offset })))
}

/// Opens the file of a mapping, if its name still is this file's.
fn open(map: &MemoryMap) -> Option<OwnedFd> {
    let path = CString::new(map.name.as_str()).ok()?;
    let file = kernel::open_shared_memory(&path).ok()?;
    let status = kernel::status_of(file.as_raw_fd()).ok()?;
    (status.st_ino == map.inode).then_some(file)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::io::Write;
    use std::ptr::null_mut;

    use super::*;

    #[test]
    fn a_mapping_of_posix_shared_memory_has_a_file() {
        let path = format!("{SHARED_MEMORY}tessera-test-{}", std::process::id());
        let Ok(mut file) = File::options().read(true).write(true).create_new(true).open(&path)
        else {
            eprintln!("skipped: no {SHARED_MEMORY}");
            return;
        };
        file.write_all(&[7; 8192]).unwrap();
        let (access, shared) = (PROT_READ | PROT_WRITE, nix::libc::MAP_SHARED);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let address =
            unsafe { kernel::mmap(null_mut(), 8192, access, shared, file.as_raw_fd(), 0) };
        let page = Range { address: address as u64 + 4096, len: 4096 };
        let (found, place) = find(page).unwrap().expect("a file");
        assert_eq!((place.range, place.offset), (page, 4096));
        let inode = |fd: i32| kernel::status_of(fd).unwrap().st_ino;
        assert_eq!(inode(found.as_raw_fd()), inode(file.as_raw_fd()));
        assert!(find(Range { len: 8192, ..page }).unwrap().is_none(), "beyond the mapping");
        // Another file takes the name.
        fs::remove_file(&path).unwrap();
        File::create(&path).unwrap();
        assert!(find(page).unwrap().is_none());
        fs::remove_file(&path).unwrap();
    }
}
