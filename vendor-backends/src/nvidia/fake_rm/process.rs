//! Process that uses the fake driver, and that can end at any of its calls.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::FakeRm;
use crate::nvidia::rm::{Node, Request, Rm};

/// Number of calls that stands for a process that does not end.
const NEVER: u64 = u64::MAX;

/// A process. Its clients of the driver live on when it ends, since the files do.
#[derive(Debug)]
pub struct FakeProcess {
    rm: Arc<FakeRm>,
    number: u32,
    /// Number of calls that the process still makes.
    calls_left: AtomicU64,
}

impl FakeProcess {
    /// Creates a process with a number of its own.
    pub fn new(rm: &Arc<FakeRm>, number: u32) -> Arc<Self> {
        Arc::new(Self { rm: rm.clone(), number, calls_left: AtomicU64::new(NEVER) })
    }

    /// Ends the process after a number of calls: the next one unwinds its thread, and calls after
    /// that have no effect.
    pub fn end_after(&self, calls: u64) {
        self.calls_left.store(calls, Ordering::SeqCst);
    }

    fn count(&self) -> io::Result<()> {
        let next = |left: u64| Some(if left == NEVER { NEVER } else { left.saturating_sub(1) });
        match self.calls_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) {
            Ok(0) if std::thread::panicking() => Err(io::ErrorKind::BrokenPipe.into()),
            Ok(0) => resume_unwind(Box::new("the process has ended")),
            _ => Ok(()),
        }
    }
}

impl Rm for FakeProcess {
    fn version(&self) -> io::Result<String> {
        self.rm.version()
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        self.count()?;
        self.rm.open(node)
    }

    fn ioctl(&self, fd: BorrowedFd<'_>, request: &mut Request<'_>) -> io::Result<()> {
        self.count()?;
        self.rm.ioctl_of(self.number, fd, request)
    }
}
