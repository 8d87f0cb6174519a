//! Process that uses the fake driver, and that can end at any of its calls.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::rm::{Node, Request, Rm};

use super::FakeRm;

/// Number of calls that stands for a process that does not end.
const NEVER: u64 = u64::MAX;

/// A process. Its clients of the driver live on when it ends, since the files do.
#[derive(Debug)]
pub struct FakeProcess {
    rm: Arc<FakeRm>,
    number: u32,
    /// Number of calls that the process still makes.
    calls_left: AtomicU64,
    /// The call after those has its effect before the process ends.
    last_has_effect: AtomicBool,
}

impl FakeProcess {
    /// Creates a process with a number of its own.
    pub fn new(rm: &Arc<FakeRm>, number: u32) -> Arc<Self> {
        let (calls_left, last_has_effect) = (AtomicU64::new(NEVER), AtomicBool::new(false));
        Arc::new(Self { rm: rm.clone(), number, calls_left, last_has_effect })
    }

    /// Ends the process after a number of calls: the next one unwinds its thread, and calls after
    /// that have no effect.
    pub fn end_after(&self, calls: u64) {
        self.last_has_effect.store(false, Ordering::SeqCst);
        self.calls_left.store(calls, Ordering::SeqCst);
    }

    /// Ends the process as [`Self::end_after`], but when the call after those has had its effect.
    pub fn end_within(&self, calls: u64) {
        self.last_has_effect.store(true, Ordering::SeqCst);
        self.calls_left.store(calls, Ordering::SeqCst);
    }

    /// Makes a call, or ends the process.
    fn call<T>(&self, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        let next = |left: u64| Some(if left == NEVER { NEVER } else { left.saturating_sub(1) });
        match self.calls_left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next) {
            Ok(0) if std::thread::panicking() => Err(io::ErrorKind::BrokenPipe.into()),
            Ok(0) => {
                if self.last_has_effect.swap(false, Ordering::SeqCst) {
                    drop(call());
                }
                resume_unwind(Box::new("the process has ended"))
            }
            _ => call(),
        }
    }
}

impl Rm for FakeProcess {
    fn version(&self) -> io::Result<String> {
        self.rm.version()
    }

    fn open(&self, node: Node) -> io::Result<OwnedFd> {
        self.call(|| self.rm.open(node))
    }

    fn ioctl(&self, fd: BorrowedFd<'_>, request: &mut Request<'_>) -> io::Result<()> {
        self.call(|| self.rm.ioctl_of(self.number, fd, request))
    }
}
