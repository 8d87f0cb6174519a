//! Disk image that makes QEMU refuse to save a domain by plain means, since QEMU's own state has
//! nothing of a vGPU.
//!
//! QEMU's client for vfio-user neither saves the device nor refuses (11.1): the guest would find a
//! device that was reset. QEMU refuses while it has an image of a format that it cannot migrate, on
//! every way to save: `virsh save`, `managedsave`, snapshots with memory, and migration. Its
//! message names the image, whose name is the command to use instead. The image is empty, no device
//! of the guest uses it, and `vgpuctl vm save` takes it away for the time of the save.

use std::fs::{self, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

/// QEMU's name of the image.
pub const NODE: &str = "use-vgpuctl-vm-save";
/// Name of the image's file in vgpud's run directory.
pub const FILE: &str = "save-guard.vdi";
/// Length of the image in bytes.
const BYTES: usize = 512;
/// Words in the image's header: offsets and values. Signature, version 1.1, length of the header,
/// kind, offsets of the block map and of the data, sector size, block size.
const WORDS: [(usize, u32); 8] = [
    (0x40, 0xbeda_107f),
    (0x44, 0x1_0001),
    (0x48, 0x180),
    (0x4c, 1),
    (0x154, 512),
    (0x158, 512),
    (0x168, 512),
    (0x178, 1 << 20),
];

/// Returns the image's path for a vGPU's socket.
pub fn path(socket: &Path) -> PathBuf {
    let run_dir = socket.ancestors().nth(3).unwrap_or(Path::new("/run/vgpud"));
    run_dir.join(FILE)
}

/// Returns the value of QEMU's `-blockdev`, and of its command `blockdev-add`.
pub fn block_device(path: &Path) -> Value {
    json!({
        "driver": "vdi", "node-name": NODE, "read-only": true,
        "file": { "driver": "file", "filename": path.to_string_lossy(), "locking": "off" },
    })
}

/// Writes the image into vgpud's run directory, if it is not there. Every user can read it.
pub fn write(run_dir: &Path) -> io::Result<()> {
    let path = run_dir.join(FILE);
    if path.exists() {
        return Ok(());
    }
    let mut image = [0; BYTES];
    for (offset, word) in WORDS {
        image[offset..offset + 4].copy_from_slice(&word.to_le_bytes());
    }
    let mut file = tempfile::NamedTempFile::new_in(run_dir)?;
    file.write_all(&image)?;
    fs::set_permissions(file.path(), Permissions::from_mode(0o644))?;
    file.persist(path).map(drop).map_err(|error| error.error)
}

/// Returns whether a value of an option is the guard.
pub(super) fn is_argument(value: &str) -> bool {
    value.contains(NODE)
}
