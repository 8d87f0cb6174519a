//! Requests of this process to its vGPU's worker: one at a time, from any thread, also after
//! `fork()`.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cuda_socket::{FileId, Reply, Request, Welcome};
use nix::errno::Errno;
use nix::sys::socket::{AddressFamily, SockType, getsockopt, sockopt};
use nix::unistd::getpid;

use crate::connection::{Connection, errno_of};
use crate::environment;
use crate::open_files::{self, OpenFile};
use crate::shared_memory::{self, SharedMemory};
use crate::sys::quiet::Quiet;
use crate::sys::{fork, kernel};

/// What a process has at its worker.
#[derive(Debug)]
struct Process {
    pid: i32,
    session: Mutex<Session>,
}

/// A process's connection, while a request is made.
#[derive(Debug, Default)]
pub struct Session {
    connection: Option<Connection>,
    welcome: Option<Arc<Welcome>>,
    /// Memory of the process that the GPU uses.
    pub shared: SharedMemory,
}

/// The process's entry. That of a parent stays behind in its children: another thread of the parent
/// may have held its lock.
static PROCESS: AtomicPtr<Process> = AtomicPtr::new(null_mut());

/// The connection's descriptor, for a child to close, and its inode.
static CONNECTION: (AtomicI32, AtomicU64) = (AtomicI32::new(-1), AtomicU64::new(0));

/// Runs a request of this thread.
pub fn with<T>(request: impl FnOnce(&mut Session) -> Result<T, Errno>) -> Result<T, Errno> {
    let _quiet = Quiet::begin();
    let process = process();
    let mut session = process.session.lock().unwrap_or_else(PoisonError::into_inner);
    session.connect()?;
    request(&mut session)
}

/// Returns what the worker said of its driver.
pub fn welcome() -> Result<Arc<Welcome>, Errno> {
    with(|session| session.welcome())
}

fn process() -> &'static Process {
    static HANDLERS: AtomicBool = AtomicBool::new(false);
    let pid = getpid().as_raw();
    let current = PROCESS.load(Ordering::Acquire);
    // SAFETY: the pointer is null or from `Box::into_raw` below, and never freed.
    if let Some(process) = unsafe { current.as_ref() }
        && process.pid == pid
    {
        return process;
    }
    if !HANDLERS.swap(true, Ordering::AcqRel) {
        fork::register(in_parent, in_child);
    }
    open_files::own();
    let new = Box::into_raw(Box::new(Process { pid, session: Mutex::default() }));
    match PROCESS.compare_exchange(current, new, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: made by `Box::into_raw` above, and never freed from here on.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            // SAFETY: made above, and shared with no other thread.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: another thread's, not null, and never freed.
            unsafe { &*other }
        }
    }
}

extern "C" fn in_parent() {
    shared_memory::forked();
}

/// Leaves the parent's connection to the parent: its worker notices when the parent ends.
extern "C" fn in_child() {
    PROCESS.store(null_mut(), Ordering::Release);
    open_files::own();
    let (fd, inode) =
        (CONNECTION.0.swap(-1, Ordering::AcqRel), CONNECTION.1.load(Ordering::Acquire));
    if fd >= 0 && kernel::status_of(fd).is_ok_and(|status| status.st_ino == inode) {
        // SAFETY: the descriptor is the inherited connection, which the child has no owner of.
        unsafe { kernel::close(fd) };
    }
    shared_memory::separate();
}

impl Session {
    fn connect(&mut self) -> Result<(), Errno> {
        if self.connection.as_mut().is_some_and(Connection::usable) {
            return Ok(());
        }
        // The driver of a program without a vGPU is absent.
        let path = environment::socket().ok_or(Errno::ENODEV)?;
        let first = self.welcome.is_none();
        self.connection = None;
        match Connection::open(path) {
            Ok((connection, welcome)) => {
                let (fd, inode) = connection.identity();
                CONNECTION.1.store(inode, Ordering::Release);
                CONNECTION.0.store(fd, Ordering::Release);
                self.connection = Some(connection);
                self.welcome = Some(Arc::new(welcome));
                Ok(())
            }
            Err(error) => {
                environment::report(path, error);
                Err(if first { Errno::ENODEV } else { Errno::EIO })
            }
        }
    }

    /// Returns what the worker said of its driver.
    pub fn welcome(&self) -> Result<Arc<Welcome>, Errno> {
        self.welcome.clone().ok_or(Errno::ENODEV)
    }

    /// Sends a request and returns its reply with the attached descriptors.
    pub fn call(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), Errno> {
        let connection = self.connection.as_mut().ok_or(Errno::EIO)?;
        match connection.call(request, fds)? {
            (Reply::Failed { errno }, _) => Err(errno_of(errno)),
            reply => Ok(reply),
        }
    }

    /// Returns the file of a descriptor that an argument names. A descriptor that the process got
    /// from another process is entered into the table.
    pub fn file_of(&mut self, fd: RawFd) -> Option<FileId> {
        if let Some(file) = open_files::get(fd) {
            return Some(file.id);
        }
        let copy = file_socket(fd)?;
        match self.call(&Request::Identify, &[copy.as_fd()]) {
            Ok((Reply::Identified { file: id, node }, _)) => {
                open_files::insert(fd, OpenFile { id, node });
                Some(id)
            }
            _ => None,
        }
    }
}

/// Returns a copy of a descriptor that may be a file's socket.
fn file_socket(fd: RawFd) -> Option<OwnedFd> {
    let copy = kernel::duplicate(fd).ok()?;
    debug_assert!(copy.as_raw_fd() != fd);
    let kind = getsockopt(&copy, sockopt::SockType).ok()?;
    let unix = nix::sys::socket::getsockname::<nix::sys::socket::SockaddrStorage>(copy.as_raw_fd())
        .is_ok_and(|name| {
            use nix::sys::socket::SockaddrLike;
            name.family() == Some(AddressFamily::Unix)
        });
    (kind == SockType::SeqPacket && unix).then_some(copy)
}
