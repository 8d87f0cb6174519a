//! Processes that have the vGPU's device files open.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

use mdev_core::untrusted::{TABLE, VALUE, escaped, read_text};
use nix::sys::stat::major;

/// Major number of `/dev/nvidiactl` and `/dev/nvidiaN`.
const RM: u64 = 195;
/// Name of `/dev/nvidia-uvm` in `/proc/devices`.
const UVM: &str = "nvidia-uvm";

/// Longest name of a program, in characters.
const MAX_NAME: usize = 64;

/// A process of the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Process {
    /// Process id.
    pub pid: u32,
    /// Name of the program, as `ps` shows it.
    pub name: String,
}

impl Process {
    /// Returns a process with its name, which the process chooses, escaped.
    pub fn named(pid: u32) -> io::Result<Self> {
        let name = read_text(Path::new(&format!("/proc/{pid}/comm")), VALUE)?;
        Ok(Self { pid, name: escaped(name.trim_end(), MAX_NAME) })
    }
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} (\"{}\")", self.pid, self.name)
    }
}

/// Returns the major numbers of the device files.
pub fn majors() -> io::Result<Vec<u64>> {
    let devices = read_text(Path::new("/proc/devices"), TABLE)?;
    let uvm = devices.lines().filter_map(|line| {
        let (number, name) = line.trim().split_once(' ')?;
        if name == UVM { number.parse().ok() } else { None }
    });
    Ok(std::iter::once(RM).chain(uvm).collect())
}

/// Returns the processes that have a character device of these major numbers open. Needs root.
pub fn find(majors: &[u64]) -> io::Result<Vec<Process>> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // A process that ends meanwhile uses nothing.
        if uses(&entry.path(), majors).unwrap_or(false) {
            found.push(Process::named(pid).unwrap_or(Process { pid, name: String::new() }));
        }
    }
    found.sort_by_key(|process| process.pid);
    Ok(found)
}

fn uses(process: &Path, majors: &[u64]) -> io::Result<bool> {
    for entry in fs::read_dir(process.join("fd"))? {
        // Follows the link to the open file.
        let Ok(file) = fs::metadata(entry?.path()) else { continue };
        if file.file_type().is_char_device() && majors.contains(&major(file.rdev())) {
            return Ok(true);
        }
    }
    Ok(false)
}
