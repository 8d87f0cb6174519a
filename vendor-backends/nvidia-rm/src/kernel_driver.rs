//! NVIDIA's driver in the kernel.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;

use mdev_core::untrusted::{VALUE, read_text};
use nix::errno::Errno;

use crate::rm::{Node, Request, Rm};

/// File that contains the driver's version.
pub const VERSION: &str = "/sys/module/nvidia/version";

/// `NV_IOCTL_MAGIC`.
const MAGIC: u64 = b'F' as u64;

/// Maximum size of an argument in the number of an ioctl.
const MAX_ARGUMENT: usize = (1 << 14) - 1;

/// NVIDIA's driver of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct KernelDriver;

impl Rm for KernelDriver {
    fn version(&self) -> io::Result<String> {
        Ok(read_text(Path::new(VERSION), VALUE)?.trim().to_owned())
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        let path = match node {
            Node::Control | Node::Event => "/dev/nvidiactl".to_owned(),
            Node::Gpu(minor) => format!("/dev/nvidia{minor}"),
        };
        let file = fs::File::options().read(true).write(true).open(&path);
        file.map(OwnedFd::from)
            .map_err(|error| io::Error::new(error.kind(), format!("Cannot open {path}: {error}")))
    }

    fn ioctl(&self, fd: BorrowedFd<'_>, request: &mut Request<'_>) -> io::Result<()> {
        let invalid = || io::Error::from(io::ErrorKind::InvalidInput);
        if let Some((at, params)) = &mut request.params {
            let pointer = request.argument.get_mut(*at..*at + 8).ok_or_else(invalid)?;
            let address =
                if params.is_empty() { 0 } else { params.as_mut_ptr().expose_provenance() as u64 };
            pointer.copy_from_slice(&address.to_ne_bytes());
        }
        if request.argument.len() > MAX_ARGUMENT {
            return Err(invalid());
        }
        let number = 3 << 30
            | (request.argument.len() as u64) << 16
            | MAGIC << 8
            | u64::from(request.number);
        loop {
            // SAFETY: the argument has the size in the number. The argument and the parameters that
            // it points to are borrowed mutably for the call, and the argument has the parameters'
            // size. Other addresses in arguments are of shared mappings, to which no Rust reference
            // exists.
            let done = unsafe {
                libc::ioctl(fd.as_raw_fd(), number as libc::Ioctl, request.argument.as_mut_ptr())
            };
            match Errno::result(done) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR | Errno::EAGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}
