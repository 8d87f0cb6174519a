//! File system in user space (FUSE) with one file, whose server stops answering.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tempfile::TempDir;

use crate::bytes;

/// Requests of the kernel (`enum fuse_opcode`).
mod op {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const OPEN: u32 = 14;
    pub const INIT: u32 = 26;
    pub const INTERRUPT: u32 = 36;
    pub const BATCH_FORGET: u32 = 42;
}

/// Node of the folder. The file is the next one.
const ROOT: u64 = 1;

/// Mounted file system. Dropping it ends all requests that wait for an answer.
#[derive(Debug)]
pub struct SilentFs {
    dir: TempDir,
    silent: Arc<AtomicBool>,
    file: Option<OwnedFd>,
}

impl SilentFs {
    /// Mounts the file system and opens its file. Fails without root and `/dev/fuse`.
    pub fn mount() -> io::Result<Self> {
        let device = OpenOptions::new().read(true).write(true).open("/dev/fuse")?;
        let dir = tempfile::tempdir()?;
        let options =
            format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let (target, options) = (path(dir.path())?, CString::new(options)?);
        let (kind, flags) = (c"fuse.silent".as_ptr(), libc::MS_NOSUID | libc::MS_NODEV);
        // SAFETY: all strings end with NUL and outlive the call.
        let mounted =
            unsafe { libc::mount(kind, target.as_ptr(), kind, flags, options.as_ptr().cast()) };
        if mounted != 0 {
            return Err(io::Error::last_os_error());
        }
        let silent = Arc::<AtomicBool>::default();
        let mut fs = Self { dir, silent: Arc::clone(&silent), file: None };
        thread::spawn(move || serve(device, &silent));
        let file = OpenOptions::new().read(true).write(true).open(fs.dir.path().join("file"))?;
        fs.file = Some(file.into());
        Ok(fs)
    }

    /// Returns the open file, of 1 GiB. Closing it waits for the server.
    pub fn file(&self) -> Option<&OwnedFd> {
        self.file.as_ref()
    }

    /// Stops answering: every later request waits until the file system is dropped.
    pub fn fall_silent(&self) {
        self.silent.store(true, Ordering::SeqCst);
    }
}

impl Drop for SilentFs {
    fn drop(&mut self) {
        if let Ok(target) = path(self.dir.path()) {
            // SAFETY: the path ends with NUL and outlives the call. MNT_FORCE ends all requests.
            unsafe { libc::umount2(target.as_ptr(), libc::MNT_FORCE) };
            // SAFETY: as above. The file is still open.
            unsafe { libc::umount2(target.as_ptr(), libc::MNT_DETACH) };
        }
    }
}

fn path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn serve(mut device: File, silent: &AtomicBool) {
    let mut request = vec![0; 1 << 17];
    while let Ok(len) = device.read(&mut request) {
        let number =
            |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap_or_default());
        let (opcode, unique, node) = ((number(0) >> 32) as u32, number(8), number(16));
        if silent.load(Ordering::SeqCst) && opcode != op::INIT {
            continue;
        }
        let reply = match answer(opcode, node, &request[40..len]) {
            Ok(Some(body)) => [bytes![16 + body.len() as u32, 0_i32, unique], body].concat(),
            Ok(None) => continue,
            Err(errno) => bytes![16_u32, -errno, unique],
        };
        let _ = device.write(&reply);
    }
}

/// Returns the answer to a request, if it has one.
fn answer(opcode: u32, node: u64, body: &[u8]) -> Result<Option<Vec<u8>>, i32> {
    let file = ROOT + 1;
    Ok(Some(match opcode {
        op::INIT => {
            let mut init =
                bytes![7_u32, 31_u32, 65536_u32, 0_u32, 12_u16, 10_u16, 65536_u32, 1_u32];
            init.resize(64, 0);
            init
        }
        op::LOOKUP if body.starts_with(b"file\0") => {
            [bytes![file, 0_u64, 0_u64, 0_u64, 0_u64], attributes(file)].concat()
        }
        op::LOOKUP => return Err(libc::ENOENT),
        op::GETATTR => [bytes![0_u64, 0_u64], attributes(node)].concat(),
        op::OPEN => bytes![1_u64, 0_u32, 0_u32],
        op::FORGET | op::BATCH_FORGET | op::INTERRUPT => return Ok(None),
        _ => return Err(libc::ENOSYS),
    }))
}

/// Returns a `struct fuse_attr`.
fn attributes(node: u64) -> Vec<u8> {
    let (mode, size) = if node == ROOT { (0o40755_u32, 0_u64) } else { (0o100_666, 1 << 30) };
    let times = [0; 3 * 8 + 3 * 4];
    let rest = bytes![mode, 1_u32, 0_u32, 0_u32, 0_u32, 4096_u32, 0_u32];
    [bytes![node, size, size / 512], times.to_vec(), rest].concat()
}
