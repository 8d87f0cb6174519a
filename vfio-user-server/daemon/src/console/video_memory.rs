//! Video memory that a worker passes with the description of its screen.
//!
//! A worker that was compromised can pass any file. Reading one of a file system in user space
//! waits for its server, so the file must be shared memory, or a BAR in sysfs, by the kernel's own
//! account.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use foreign_fds::ForeignFd;
use mdev_core::device::Scanout;
use mdev_core::untrusted::{TABLE, any_line, read_text};

use crate::worker_client::{self, passed_files};

/// Requests a worker's scanout and the video memory that holds it.
pub fn locate(control: &Path) -> io::Result<(Scanout, Option<OwnedFd>)> {
    let (scanout, fds) = worker_client::scanout(control)?;
    if fds.iter().all(|fd| is_video_memory(fd.as_fd())) {
        return Ok((scanout?, fds.into_iter().next().map(ForeignFd::into_trusted)));
    }
    passed_files::refuse(control, fds);
    scanout.and_then(|_| Err(io::Error::other("The worker passes a file that is not video memory")))
}

fn is_video_memory(fd: BorrowedFd<'_>) -> bool {
    foreign_fds::is_memory(fd) || is_in_sysfs(fd).unwrap_or(false)
}

/// Returns whether a descriptor is a file of sysfs, where the memory of physical adapters is. Asks
/// for the mount that it was opened through, and not the file.
fn is_in_sysfs(fd: BorrowedFd<'_>) -> io::Result<bool> {
    let info = read_text(Path::new(&format!("/proc/self/fdinfo/{}", fd.as_raw_fd())), TABLE)?;
    let mount = info.lines().find_map(|line| line.strip_prefix("mnt_id:")).map(str::trim);
    let Some(mount) = mount else { return Ok(false) };
    if is_sysfs_mount(Path::new("/proc/self"), mount) {
        return Ok(true);
    }
    // A GPU process of an earlier manager can be in another mount namespace.
    let processes = fs::read_dir("/proc")?.flatten();
    Ok(processes.into_iter().any(|process| is_sysfs_mount(&process.path(), mount)))
}

/// Returns whether a process has a mount of this id, and whether that is sysfs. Ids are unique
/// among all namespaces.
fn is_sysfs_mount(process: &Path, mount: &str) -> bool {
    // A user can mount any number of file systems in a namespace of their own.
    let is_it = any_line(&process.join("mountinfo"), |line| {
        let id = line.split(' ').next();
        let kind = line.split_once(" - ").and_then(|(_, rest)| rest.split(' ').next());
        id == Some(mount) && kind == Some("sysfs")
    });
    is_it.unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn memory_and_files_of_sysfs_are_video_memory() {
        let memory = ipc::mem::sealed_memfd(c"vram", 4096).unwrap();
        assert!(is_video_memory(memory.as_fd()));
        if let Ok(adapter) = File::open("/sys/kernel/mm/transparent_hugepage/enabled") {
            assert!(is_video_memory(adapter.as_fd()));
        }
        let (reader, _writer) = nix::unistd::pipe().unwrap();
        let other = File::open("/proc/self/maps").unwrap();
        assert!(!is_video_memory(reader.as_fd()));
        assert!(!is_video_memory(other.as_fd()));
    }
}
