//! Process that holds a lock on a file, from `/proc/locks`.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use mdev_core::untrusted::any_line;
use nix::sys::stat::{major, minor};

use crate::checkpoint::Process;

/// Returns the process that has locked a file with `flock`, if the kernel tells.
pub fn of(file: &File) -> Option<Process> {
    let about = file.metadata().ok()?;
    let mut owner = None;
    // Users can have any number of locks.
    any_line(Path::new("/proc/locks"), |line| {
        owner = find(line, about.dev(), about.ino());
        owner.is_some()
    })
    .ok()?;
    Process::named(owner?).ok()
}

/// Returns the process with a lock on a file. A line is
/// `1: FLOCK  ADVISORY  WRITE 708 00:17:5 0 EOF`; the device is hexadecimal. Lines of waiting
/// processes have an arrow before the kind.
fn find(locks: &str, dev: u64, inode: u64) -> Option<u32> {
    let wanted = format!("{:02x}:{:02x}:{inode}", major(dev), minor(dev));
    locks.lines().find_map(|line| {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            [_, "FLOCK", _, _, pid, file, ..] if file == wanted => pid.parse().ok(),
            _ => None,
        }
    })
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::makedev;

    use super::*;

    #[test]
    fn waiting_processes_and_other_files_are_skipped() {
        let locks = "1: POSIX  ADVISORY  WRITE 10 00:1a:7 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 11 00:1a:70 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 12 00:1a:7 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 13 00:1a:7 0 EOF\n";
        assert_eq!(find(locks, makedev(0, 0x1a), 7), Some(12));
        assert_eq!(find(locks, makedev(8, 0x1a), 7), None);
    }

    #[test]
    fn a_locked_file_names_this_process() {
        let file = tempfile::tempfile().unwrap();
        assert_eq!(of(&file), None);
        file.lock().unwrap();
        assert_eq!(of(&file).unwrap().pid, std::process::id());
    }
}
