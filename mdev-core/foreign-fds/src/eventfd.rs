//! Eventfds of other processes.
//!
//! The process that passes an eventfd keeps it, with its counter and its flags. It can make the
//! eventfd blocking and fill it at any moment, and then a write to it waits for ever. Therefore a
//! thread of a [`Signaller`] writes, and is interrupted if a write does not end.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Once, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::ForeignFd;

/// Maximum number of lines of a [`Signaller`].
pub const MAX_LINES: usize = 63;
/// Bit that ends the thread.
const STOP: u64 = 1 << MAX_LINES;

/// Time after which a write to an eventfd counts as blocked.
const WRITE_LIMIT: Duration = Duration::from_millis(20);
/// Interval at which a blocked write is interrupted until it ends.
const RETRY: Duration = Duration::from_millis(1);

/// Returns true if a descriptor is an eventfd. The kernel answers this itself: a question to the
/// file, such as `fstat`, could ask a file system that never answers.
pub fn is_eventfd(fd: BorrowedFd<'_>) -> bool {
    let link = fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    link.is_ok_and(|name| name.as_os_str() == "anon_inode:[eventfd]")
}

/// Consumes an eventfd's count without waiting, whatever its owner does. Returns false if the count
/// is 0.
///
/// # Errors
///
/// Fails if the descriptor is not an eventfd.
pub fn take(event: BorrowedFd<'_>) -> io::Result<bool> {
    let mut count = [0_u8; 8];
    let buffer = libc::iovec { iov_base: count.as_mut_ptr().cast(), iov_len: count.len() };
    // SAFETY: one buffer with its length. RWF_NOWAIT holds for this call whatever the file's flags.
    let read =
        unsafe { libc::preadv2(event.as_raw_fd(), &raw const buffer, 1, -1, libc::RWF_NOWAIT) };
    if read == count.len().cast_signed() {
        return Ok(true);
    }
    let error =
        if read < 0 { io::Error::last_os_error() } else { io::ErrorKind::InvalidData.into() };
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(false),
        _ => Err(error),
    }
}

/// Returns true if a write to an eventfd would block. Owners that use it properly never fill it.
fn is_full(event: BorrowedFd<'_>) -> bool {
    let mut poll = libc::pollfd { fd: event.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
    // SAFETY: one structure, which the kernel fills in.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 0 }
}

/// Thread that signals up to [`MAX_LINES`] eventfds.
#[derive(Debug)]
pub struct Signaller {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    /// Lines to signal, and [`STOP`]. Atomic, so that [`Signaller::post`] never waits.
    raised: AtomicU64,
    lines: Mutex<Lines>,
    /// Notified after a write that a thread waits for.
    written: Condvar,
}

#[derive(Debug, Default)]
struct Lines {
    all: Vec<Line>,
    /// Line that is being signalled.
    writing: Option<usize>,
    /// Number of threads that wait for a write.
    waiting: usize,
}

#[derive(Debug, Default)]
struct Line {
    event: Option<Arc<ForeignFd>>,
    /// Number of signals so far, also of those without an eventfd.
    writes: u64,
}

impl Lines {
    fn line(&mut self, line: usize) -> &mut Line {
        if self.all.len() <= line {
            self.all.resize_with(line + 1, Line::default);
        }
        &mut self.all[line]
    }
}

impl Shared {
    fn lines(&self) -> MutexGuard<'_, Lines> {
        self.lines.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the end of a write, or for `limit`.
    fn wait<'a>(&self, mut lines: MutexGuard<'a, Lines>, limit: Duration) -> MutexGuard<'a, Lines> {
        lines.waiting += 1;
        let waited = self.written.wait_timeout(lines, limit);
        let (mut lines, _) = waited.unwrap_or_else(PoisonError::into_inner);
        lines.waiting -= 1;
        lines
    }

    /// Signals a line.
    fn write(&self, line: usize) {
        let mut lines = self.lines();
        if let Some(event) = lines.line(line).event.clone() {
            lines.writing = Some(line);
            drop(lines);
            let one = 1_u64.to_ne_bytes();
            // SAFETY: eight bytes from a buffer of eight. A full eventfd is signalled already, and
            // an interrupted write was to an eventfd that is no longer wanted.
            unsafe { libc::write(event.as_fd().as_raw_fd(), one.as_ptr().cast(), one.len()) };
            lines = self.lines();
            lines.writing = None;
        }
        lines.line(line).writes += 1;
        if lines.waiting > 0 {
            self.written.notify_all();
        }
    }

    fn run(&self) {
        loop {
            let raised = self.raised.swap(0, Ordering::AcqRel);
            if raised & STOP != 0 {
                return;
            }
            (0..MAX_LINES).filter(|line| raised & 1 << line != 0).for_each(|line| self.write(line));
            if raised == 0 {
                thread::park();
            }
        }
    }
}

impl Signaller {
    /// Starts the thread. A sandbox that is entered later does not hold for it.
    pub fn new(name: &str) -> io::Result<Self> {
        install_handler();
        let shared = Arc::<Shared>::default();
        let for_thread = Arc::clone(&shared);
        let builder = thread::Builder::new().name(name.into()).stack_size(64 << 10);
        let thread = builder.spawn(move || for_thread.run())?;
        Ok(Self { shared, thread })
    }

    /// Sets or clears the eventfd of a line below [`MAX_LINES`]. A write to the previous eventfd
    /// does not outlast the call.
    pub fn set(&self, line: usize, event: Option<Arc<ForeignFd>>) {
        let mut lines = self.shared.lines();
        lines.line(line).event = event;
        while lines.writing == Some(line) {
            self.interrupt();
            lines = self.shared.wait(lines, RETRY);
        }
    }

    /// Signals the lines whose bits are set, soon. Never waits.
    pub fn post(&self, lines: u64) {
        if lines != 0 && self.shared.raised.fetch_or(lines, Ordering::AcqRel) & lines != lines {
            self.thread.thread().unpark();
        }
    }

    /// Signals a line and waits until that is done. An eventfd to which a write blocks is dropped.
    pub fn signal(&self, line: usize) {
        let mut lines = self.shared.lines();
        // A write that is under way may have had its effect before.
        let under_way = u64::from(lines.writing == Some(line));
        let last = lines.line(line).writes + under_way;
        self.post(1 << line);
        while lines.line(line).writes <= last {
            lines = self.shared.wait(lines, WRITE_LIMIT);
            let writing = lines.writing;
            let event = writing.and_then(|line| lines.line(line).event.clone());
            // The thread may only be late.
            if let (Some(blocked), Some(event)) = (writing, event)
                && lines.line(line).writes <= last
                && is_full(event.as_fd())
            {
                drop(lines);
                self.set(blocked, None);
                lines = self.shared.lines();
            }
        }
    }

    /// Interrupts a write of the thread that blocks.
    fn interrupt(&self) {
        // SAFETY: the thread is neither joined nor detached while `self` lives.
        unsafe { libc::pthread_kill(self.thread.as_pthread_t(), signal_number()) };
    }
}

impl Drop for Signaller {
    fn drop(&mut self) {
        self.post(STOP);
        let mut lines = self.shared.lines();
        lines.all.clear();
        while lines.writing.is_some() {
            self.interrupt();
            lines = self.shared.wait(lines, RETRY);
        }
    }
}

/// Returns the signal that interrupts a write.
fn signal_number() -> libc::c_int {
    libc::SIGRTMAX()
}

/// Installs a handler that does nothing: only a signal with a handler interrupts a system call.
fn install_handler() {
    extern "C" fn nothing(_: libc::c_int) {}
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // SAFETY: an all-zero sigaction is valid. Without SA_RESTART, writes are not resumed.
        let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
        let handler: extern "C" fn(libc::c_int) = nothing;
        action.sa_sigaction = handler as libc::sighandler_t;
        // SAFETY: the action is initialized, and its handler is async-signal-safe.
        unsafe { libc::sigaction(signal_number(), &raw const action, ptr::null_mut()) };
    });
}

#[cfg(test)]
mod tests {
    use std::os::fd::{FromRawFd, OwnedFd};
    use std::time::Instant;

    use super::*;

    fn event(count: u64) -> Arc<ForeignFd> {
        // SAFETY: creates a descriptor, which has no other owner.
        let fd = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) };
        let bytes = count.to_ne_bytes();
        // SAFETY: eight bytes from a buffer of eight.
        unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), 8) };
        Arc::new(fd.into())
    }

    #[test]
    fn only_eventfds_are_recognized() {
        let (reader, _writer) = io::pipe().unwrap();
        let null = fs::File::open("/dev/null").unwrap();
        assert!(is_eventfd(event(0).as_fd()));
        assert!(!is_eventfd(reader.as_fd()) && !is_eventfd(null.as_fd()));
        assert!(take(null.as_fd()).is_err());
    }

    #[test]
    fn taking_a_count_never_waits() {
        let event = event(3);
        assert!(take(event.as_fd()).unwrap());
        assert!(!take(event.as_fd()).unwrap(), "a blocking eventfd without a count");
    }

    #[test]
    fn a_full_eventfd_that_blocks_stops_neither_the_caller_nor_the_other_lines() {
        let signaller = Signaller::new("test").unwrap();
        let (full, free) = (event(u64::MAX - 1), event(0));
        signaller.set(0, Some(Arc::clone(&full)));
        signaller.set(1, Some(Arc::clone(&free)));
        let start = Instant::now();
        signaller.signal(0);
        signaller.signal(1);
        assert!(take(free.as_fd()).unwrap(), "the other line was signalled");
        // Posted signals block the thread until the eventfd is replaced.
        signaller.set(0, Some(Arc::clone(&full)));
        signaller.post(1);
        signaller.set(0, None);
        signaller.signal(1);
        assert!(take(free.as_fd()).unwrap());
        signaller.set(0, Some(Arc::clone(&full)));
        signaller.post(1);
        thread::sleep(Duration::from_millis(5));
        drop(signaller);
        assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        assert_eq!(Arc::strong_count(&full), 1, "the thread has dropped it");
    }

    #[test]
    fn the_signals_of_other_lines_end_no_wait() {
        let signaller = Signaller::new("test").unwrap();
        let event = event(0);
        signaller.set(5, Some(Arc::clone(&event)));
        for _ in 0..2000 {
            signaller.post(!(1 << 5 | STOP));
            signaller.signal(5);
            assert!(take(event.as_fd()).unwrap());
        }
    }

    #[test]
    fn each_signal_arrives_before_the_call_returns() {
        let signaller = Signaller::new("test").unwrap();
        let event = event(0);
        signaller.set(5, Some(Arc::clone(&event)));
        for _ in 0..1000 {
            signaller.signal(5);
            assert!(take(event.as_fd()).unwrap());
        }
    }
}
