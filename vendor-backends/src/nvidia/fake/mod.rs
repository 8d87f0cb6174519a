//! A resource manager without a GPU: objects, rules and failures of the real one, and no engines.
//!
//! It is as strict as the driver where the driver is strict, and stricter where the driver would let us make a mistake:
//! what must not be freed while something uses it is noted in [`Fake::violations`].

mod calls;
mod objects;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nix::fcntl::OFlag;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::pipe2;

use super::rm::{Node, Request, Rm};
use super::sys::abi::{Call, Free};
use super::version::Layout;
use objects::Objects;

/// What the fake card calls itself.
pub const ADDRESS: &str = "0000:3b:00.0";

/// Its video memory.
pub const VIDEO_MEMORY: u64 = 80 << 30;

/// A file of the fake's, by the number of its inode: a descriptor that was passed on or copied is still the same file.
type FileId = u64;

#[derive(Debug)]
struct Opened {
    file: FileId,
    node: Node,
    /// The control file that it was registered with.
    registered: bool,
    mapped: bool,
}

#[derive(Debug, Default)]
struct State {
    files: Vec<Opened>,
    objects: Objects,
    calls: u64,
    fail_at: Option<u64>,
    log: Vec<String>,
    /// What keeps events quiet: a pipe whose writer is gone polls as ended.
    writers: Vec<OwnedFd>,
}

/// A driver that is not there.
#[derive(Debug)]
pub struct Fake {
    version: String,
    layout: Option<Layout>,
    state: Mutex<State>,
}

impl Fake {
    /// A driver that calls itself `version`.
    pub fn new(version: &str) -> Arc<Self> {
        let layout = Layout::of(version).ok();
        Arc::new(Self { version: version.into(), layout, state: Mutex::default() })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Objects that exist.
    pub fn objects(&self) -> usize {
        self.state().objects.count()
    }

    /// Calls so far.
    pub fn calls(&self) -> u64 {
        self.state().calls
    }

    /// Makes one call fail: the `number`th from the start, as [`Self::calls`] counts.
    pub fn fail_at(&self, number: Option<u64>) {
        self.state().fail_at = number;
    }

    /// What was done that the hardware would have suffered from.
    pub fn violations(&self) -> Vec<String> {
        self.state().objects.violations.clone()
    }

    /// What was asked, a line for each call, since the last time.
    pub fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.state().log)
    }

    /// Reports an error of the channel with that token, as the hardware's robust-channel recovery does.
    pub fn fault(&self, token: u32, code: u32) {
        self.state().objects.fault(token, code);
    }

    /// Whether the channel with that token may run: nobody has disabled it.
    pub fn may_run(&self, token: u32) -> bool {
        self.state().objects.may_run(token)
    }

    /// The slice of the group that the channel with that token is in, in microseconds.
    pub fn slice_us(&self, token: u32) -> Option<u64> {
        self.state().objects.slice_us(token)
    }

    /// The token that was last written to the doorbell.
    pub fn last_bell(&self) -> Option<u32> {
        self.state().objects.last_bell()
    }

    /// Lets the GPU's clock say `now_ns`.
    pub fn set_clock(&self, now_ns: u64) {
        self.state().objects.set_clock(now_ns);
    }

    /// Logs that a context of `process` has got the engine, or that it has given it up.
    pub fn log_turn(&self, begins: bool, process: u64, at_ns: u64) {
        let tag = if begins { super::trace::START } else { super::trace::END };
        self.state().objects.log_switch(tag, process, at_ns);
    }
}

impl Rm for Fake {
    fn version(&self) -> io::Result<String> {
        Ok(self.version.clone())
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        let mut state = self.state();
        state.count()?;
        let fd = match node {
            Node::Control | Node::Gpu(0) => memfd_create("fake-rm", MFdFlags::MFD_CLOEXEC)?,
            Node::Event => {
                let (quiet, writer) = pipe2(OFlag::O_CLOEXEC)?;
                state.writers.push(writer);
                quiet
            }
            Node::Gpu(_) => return Err(io::ErrorKind::NotFound.into()),
        };
        let file = file_id(&fd)?;
        state.files.push(Opened { file, node, registered: false, mapped: false });
        Ok(fd)
    }

    fn ioctl(&self, fd: BorrowedFd<'_>, request: &mut Request<'_>) -> io::Result<()> {
        let layout = self.layout.ok_or(io::ErrorKind::InvalidInput)?;
        let file = file_id(&fd)?;
        let mut state = self.state();
        // Freeing never fails for want of anything.
        if request.number != <Free as Call>::NUMBER {
            state.count()?;
        }
        let line = format!("{} {}", request.name, calls::describe(request));
        state.log.push(line);
        calls::carry_out(&mut state, &layout, file, request)
    }
}

impl State {
    /// Counts a call, and fails it if it is the one.
    fn count(&mut self) -> io::Result<()> {
        self.calls += 1;
        if self.fail_at == Some(self.calls) {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        Ok(())
    }

    fn opened(&mut self, file: FileId) -> io::Result<&mut Opened> {
        let found = self.files.iter_mut().find(|opened| opened.file == file);
        found.ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }
}

fn file_id(fd: &impl AsFd) -> io::Result<FileId> {
    let fd = fd.as_fd().try_clone_to_owned()?;
    Ok(File::from(fd).metadata()?.ino())
}

/// The file behind a descriptor's number, as the driver finds it.
fn id_of_number(number: i32) -> io::Result<FileId> {
    Ok(std::fs::metadata(format!("/proc/self/fd/{number}"))?.ino())
}

/// The same, to be given a length.
fn file_of_number(number: i32) -> io::Result<File> {
    File::options().read(true).write(true).open(format!("/proc/self/fd/{number}"))
}
