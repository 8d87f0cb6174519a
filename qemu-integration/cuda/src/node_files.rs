//! Opening of device nodes and of files in `/proc`.

use std::ffi::c_int;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_socket::{Node, Reply, Request, Welcome};
use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::open_files::{self, OpenFile};
use crate::paths::DriverPath;
use crate::session;
use crate::sys::kernel;

/// Major number of `/dev/nvidiactl` and `/dev/nvidiaN`.
pub const MAJOR: u32 = 195;
/// Minor number of `/dev/nvidiactl`.
pub const CONTROL_MINOR: u32 = 255;
/// Major number of `/dev/nvidia-uvm`, unless the host's driver has another.
const UVM_MAJOR: u32 = 510;

/// Opens a path of the driver and returns a descriptor.
pub fn open(path: DriverPath<'_>, flags: c_int) -> Result<c_int, Errno> {
    match path {
        DriverPath::Node(node) => open_node(node, flags),
        DriverPath::CharacterLink { major, minor } => {
            open_node(node_of(major, minor).ok_or(Errno::ENOENT)?, flags)
        }
        _ if flags & libc::O_ACCMODE != libc::O_RDONLY => Err(Errno::EACCES),
        _ => {
            let fd = memory_file(&content(path)?)?;
            kernel::set_close_on_exec(fd.as_raw_fd(), flags & libc::O_CLOEXEC != 0)?;
            Ok(fd.into_raw_fd())
        }
    }
}

/// Returns the content of a file in `/proc` or `/sys`.
pub fn content(path: DriverPath<'_>) -> Result<String, Errno> {
    match path {
        DriverPath::Proc(name) => {
            let welcome = session::welcome()?;
            let file = welcome.proc_files.iter().find(|(path, _)| path == name);
            if file.is_none() && is_folder(&welcome, name) {
                return Err(Errno::EISDIR);
            }
            file.map(|(_, content)| content.clone()).ok_or(Errno::ENOENT)
        }
        DriverPath::Devices => Ok(with_driver(&host_devices()?)),
        DriverPath::ModuleState => Ok("live\n".to_owned()),
        _ => Err(Errno::ENOENT),
    }
}

/// Returns whether a path below `/proc/driver/nvidia` is a folder.
pub fn is_folder(welcome: &Welcome, name: &str) -> bool {
    let inside = |path: &str| path.strip_prefix(name).is_some_and(|rest| rest.starts_with('/'));
    name.is_empty() || welcome.proc_files.iter().any(|(path, _)| inside(path))
}

/// Returns whether the vGPU has a device node.
pub fn exists(node: Node) -> Result<(), Errno> {
    match node {
        Node::Gpu(minor) if !session::welcome()?.minors.contains(&minor) => Err(Errno::ENOENT),
        _ => Ok(()),
    }
}

/// Returns the major and minor numbers of a device node.
pub fn numbers(node: Node) -> (u32, u32) {
    match node {
        Node::Control => (MAJOR, CONTROL_MINOR),
        Node::Gpu(minor) => (MAJOR, minor),
        Node::Uvm => (uvm_major(), 0),
    }
}

/// Returns the device node with these numbers.
pub fn node_of(major: u32, minor: u32) -> Option<Node> {
    match (major, minor) {
        (MAJOR, CONTROL_MINOR) => Some(Node::Control),
        (MAJOR, minor) => Some(Node::Gpu(minor)),
        (major, 0) if major == uvm_major() => Some(Node::Uvm),
        _ => None,
    }
}

fn open_node(node: Node, flags: c_int) -> Result<c_int, Errno> {
    exists(node)?;
    let (reply, fds) = session::with(|session| session.call(&Request::Open(node), &[]))?;
    let (Reply::Opened(id), Some(fd)) = (reply, fds.into_iter().next()) else {
        return Err(Errno::EIO);
    };
    kernel::set_close_on_exec(fd.as_raw_fd(), flags & libc::O_CLOEXEC != 0)?;
    if !open_files::insert(fd.as_raw_fd(), OpenFile { id, node }) {
        return Err(Errno::EMFILE);
    }
    Ok(fd.into_raw_fd())
}

/// Returns a file with this content, at its beginning, close-on-exec.
pub fn memory_file(content: &str) -> Result<OwnedFd, Errno> {
    let mut file = File::from(memfd_create(c"nvidia", MFdFlags::MFD_CLOEXEC)?);
    let written = file.write_all(content.as_bytes()).and_then(|()| file.rewind());
    written.map_err(|_| Errno::ENOMEM)?;
    Ok(file.into())
}

/// Returns the host's list of devices.
fn host_devices() -> Result<String, Errno> {
    let mut text = String::new();
    let mut file = File::from(kernel::open_host_file(c"/proc/devices")?);
    file.read_to_string(&mut text).map_err(|_| Errno::EIO)?;
    Ok(text)
}

/// Adds the driver's entries to a list of devices, if the host has no such driver.
fn with_driver(devices: &str) -> String {
    const CHARACTER: &str = "Character devices:\n";
    let mut added = String::from(CHARACTER);
    if major_in(devices, "nvidia").or_else(|| major_in(devices, "nvidia-frontend")).is_none() {
        // Writing to a String does not fail.
        let _ = write!(added, "{MAJOR:3} nvidia\n{MAJOR:3} nvidiactl\n");
    }
    if major_in(devices, "nvidia-uvm").is_none() {
        let _ = writeln!(added, "{UVM_MAJOR:3} nvidia-uvm");
    }
    devices.replacen(CHARACTER, &added, 1)
}

fn major_in(devices: &str, name: &str) -> Option<u32> {
    devices.lines().find_map(|line| {
        let (major, device) = line.trim_start().split_once(' ')?;
        (device == name).then(|| major.parse().ok()).flatten()
    })
}

/// Returns the major number of nvidia-uvm.
fn uvm_major() -> u32 {
    static KNOWN: AtomicU32 = AtomicU32::new(0);
    match KNOWN.load(Ordering::Relaxed) {
        0 => {
            let host = host_devices().ok().and_then(|text| major_in(&text, "nvidia-uvm"));
            let major = host.unwrap_or(UVM_MAJOR);
            KNOWN.store(major, Ordering::Relaxed);
            major
        }
        known => known,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_devices_has_the_drivers() {
        let host = "Character devices:\n  1 mem\n511 x\n\nBlock devices:\n254 virtblk\n";
        let with = with_driver(host);
        assert_eq!(major_in(&with, "nvidia"), Some(MAJOR));
        assert_eq!(major_in(&with, "nvidia-uvm"), Some(UVM_MAJOR));
        assert!(with.ends_with("  1 mem\n511 x\n\nBlock devices:\n254 virtblk\n"));
        let driver = "Character devices:\n195 nvidia-frontend\n234 nvidia-uvm\n";
        assert_eq!(with_driver(driver), driver);
    }

    #[test]
    fn folders_hold_files() {
        let welcome = Welcome {
            version: 0,
            minors: vec![],
            proc_files: vec![("gpus/0000:01:00.0/information".into(), String::new())],
            calls: vec![],
        };
        for (name, folder) in
            [("", true), ("gpus", true), ("gpus/0000:01:00.0", true), ("gpu", false), ("x", false)]
        {
            assert_eq!(is_folder(&welcome, name), folder, "{name}");
        }
    }

    #[test]
    fn nodes_have_numbers() {
        for node in [Node::Control, Node::Gpu(0), Node::Gpu(254), Node::Uvm] {
            let (major, minor) = numbers(node);
            assert_eq!(node_of(major, minor), Some(node));
        }
        assert_eq!(node_of(1, 3), None);
    }
}
