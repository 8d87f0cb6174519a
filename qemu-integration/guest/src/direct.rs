//! Node of the guest's kernel driver: registers, doorbell page and interrupts of its vGPU for a
//! program of root's (`/dev/tessera-vgpu`, see docs/guest.md).

use std::fs::{File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::Duration;

use memmap2::{MmapOptions, MmapRaw};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::GuestError;

/// Name of the kernel driver.
pub const DRIVER: &str = "tessera_guest";
/// The node.
const NODE: &str = "/dev/tessera-vgpu";
/// Offset of a BAR in the node is its number, shifted by this.
const BAR_SHIFT: u32 = 40;

/// The open node. The vGPU belongs to this process until it is dropped.
#[derive(Debug)]
pub struct DirectNode {
    file: File,
    interrupts: bool,
}

impl DirectNode {
    /// Opens the node for the vGPU at the PCI address `address`. Returns `None` if the kernel
    /// driver is of a release without the node.
    pub fn open(address: &str) -> Result<Option<Self>, GuestError> {
        Self::open_at(Path::new(NODE), address)
    }

    fn open_at(node: &Path, address: &str) -> Result<Option<Self>, GuestError> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_NONBLOCK);
        let file = match options.open(node) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                let user = "a CUDA program".to_owned();
                return Err(GuestError::Busy { address: address.to_owned(), user });
            }
            Err(error) => {
                let what = format!("Opening {} (run as root)", node.display());
                return Err(GuestError::os(what)(error));
            }
        };
        // Without MSI the driver has no interrupts.
        let interrupts = match take(&file) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::WouldBlock,
        };
        Ok(Some(Self { file, interrupts }))
    }

    /// Maps the first `len` bytes of BAR `number`, which is 1 or 3.
    pub fn map(&self, number: u32, len: u64) -> io::Result<MmapRaw> {
        let offset = u64::from(number) << BAR_SHIFT;
        MmapOptions::new().offset(offset).len(len as usize).map_raw(&self.file)
    }

    /// Returns whether the vGPU interrupts.
    pub const fn interrupts(&self) -> bool {
        self.interrupts
    }

    /// Waits for an interrupt since the last wait, for at most `limit`.
    pub fn wait(&self, limit: Duration) {
        let limit = PollTimeout::try_from(limit).unwrap_or(PollTimeout::MAX);
        let mut fds = [PollFd::new(self.file.as_fd(), PollFlags::POLLIN)];
        // A waiting job looks at its semaphore in any case.
        if poll(&mut fds, limit).is_ok() {
            let _ = take(&self.file);
        }
    }
}

/// Takes the interrupts that have arrived. Returns their number.
fn take(mut file: &File) -> io::Result<u64> {
    let mut count = [0; 8];
    file.read_exact(&mut count)?;
    Ok(u64::from_ne_bytes(count))
}
