//! Connection of a process to its vGPU's worker.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::time::Duration;

use cuda_socket::{
    MAX_FDS, MAX_PACKET, Reply, Request, VERSION, Welcome, decode, decode_numbered, encode,
    encode_numbered,
};
use nix::cmsg_space;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::sys::socket::{
    AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
    connect, recvmsg, sendmsg, setsockopt, socket,
    sockopt::{ReceiveTimeout, SendTimeout},
};
use nix::sys::time::{TimeVal, TimeValLike};

use crate::sys::kernel;

/// Time after which a worker counts as gone. Requests take milliseconds.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Attempts to begin with a worker, and the pause between them. A worker that dies may take a new
/// connection with it; another one listens on the same socket.
const MAX_ATTEMPTS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(10);

/// Lowest descriptor of a connection. Programs expect low numbers for their own files.
const FIRST_DESCRIPTOR: RawFd = 400;

/// A connection to a worker.
#[derive(Debug)]
pub struct Connection {
    /// `None` once the connection is of no use.
    socket: Option<OwnedFd>,
    inode: u64,
    /// Number of the last request.
    number: u64,
    buffer: Vec<u8>,
}

/// Why a connection cannot be used.
#[derive(Debug)]
enum Failure {
    /// It has ended without an answer.
    Unanswered,
    /// The worker, or the system, refuses it.
    Refused(Errno),
}

impl From<Errno> for Failure {
    fn from(error: Errno) -> Self {
        Self::Refused(error)
    }
}

impl Connection {
    /// Connects to the socket at `path` and returns what the worker says of its driver.
    pub fn open(path: &[u8]) -> Result<(Self, Welcome), Errno> {
        let mut attempts = 1;
        loop {
            match Self::try_open(path) {
                Err(Failure::Unanswered) if attempts < MAX_ATTEMPTS => attempts += 1,
                Err(Failure::Unanswered) => return Err(Errno::EIO),
                Err(Failure::Refused(error)) => return Err(error),
                Ok(opened) => return Ok(opened),
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn try_open(path: &[u8]) -> Result<(Self, Welcome), Failure> {
        let (family, flags) = (AddressFamily::Unix, SockFlag::SOCK_CLOEXEC);
        let socket = high(socket(family, SockType::SeqPacket, flags, None)?);
        let timeout = TimeVal::seconds(TIMEOUT.as_secs().cast_signed());
        setsockopt(&socket, SendTimeout, &timeout)?;
        setsockopt(&socket, ReceiveTimeout, &timeout)?;
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
        let inode = kernel::status_of(socket.as_raw_fd())?.st_ino;
        let buffer = vec![0; MAX_PACKET];
        let mut connection = Self { socket: Some(socket), inode, number: 0, buffer };
        match connection.hello()? {
            Reply::Welcome(welcome) if welcome.version == VERSION => Ok((connection, welcome)),
            Reply::Failed { errno } => Err(errno_of(errno).into()),
            _ => Err(Errno::EPROTO.into()),
        }
    }

    /// Sends the hello, which has no number, and returns the reply. Neither has a refusal.
    fn hello(&mut self) -> Result<Reply, Failure> {
        let socket = self.socket.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        let hello = encode(&Request::Hello { version: VERSION }).map_err(|_| Errno::EINVAL)?;
        // A worker that refuses the process may have closed the connection, after its reply.
        let _ = send(socket, &hello, &[]);
        let (len, _) = receive(socket, &mut self.buffer).map_err(|error| match error {
            Errno::EAGAIN => Failure::Refused(Errno::EIO),
            _ => Failure::Unanswered,
        })?;
        let bytes = self.buffer.get(..len).unwrap_or_default();
        match decode_numbered(bytes) {
            Ok((0, reply)) => Ok(reply),
            _ => Ok(decode(bytes).map_err(|_| Errno::EPROTO)?),
        }
    }

    /// Returns the socket's descriptor and inode.
    pub fn identity(&self) -> (RawFd, u64) {
        (self.socket.as_ref().map_or(-1, AsRawFd::as_raw_fd), self.inode)
    }

    /// Returns whether the connection can be used. The program may have closed its descriptor, and
    /// opened another file with the same number, which is then left alone.
    pub fn usable(&mut self) -> bool {
        let Some(socket) = &self.socket else { return false };
        let same =
            kernel::status_of(socket.as_raw_fd()).is_ok_and(|status| status.st_ino == self.inode);
        if !same && let Some(socket) = self.socket.take() {
            let _ = socket.into_raw_fd();
        }
        same
    }

    /// Sends a request and returns its reply with the attached descriptors. [`Reply::Failed`] is a
    /// reply. Closes the connection if there is none.
    pub fn call(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), Errno> {
        let number = self.number + 1;
        let bytes = encode_numbered(number, request).map_err(|_| Errno::EINVAL)?;
        if bytes.len() > MAX_PACKET || fds.len() > MAX_FDS {
            return Err(Errno::EINVAL);
        }
        self.number = number;
        let reply = self.exchange(&bytes, fds);
        if reply.is_err() {
            self.socket = None;
        }
        reply
    }

    fn exchange(
        &mut self,
        bytes: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<(Reply, Vec<OwnedFd>), Errno> {
        let socket = self.socket.as_ref().ok_or(Errno::EIO)?.as_raw_fd();
        send(socket, bytes, fds).map_err(|_| Errno::EIO)?;
        loop {
            let (len, fds) = receive(socket, &mut self.buffer).map_err(|_| Errno::EIO)?;
            let bytes = self.buffer.get(..len).unwrap_or_default();
            match decode_numbered(bytes) {
                Ok((number, reply)) if number == self.number => return Ok((reply, fds)),
                // Another worker has sent the reply before once more.
                Ok((number, _)) if number < self.number => {}
                _ => return Err(Errno::EIO),
            }
        }
    }
}

/// Sends a packet.
fn send(socket: RawFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Errno> {
    let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let rights = if raw.is_empty() { &rights[..0] } else { &rights[..] };
    let slices = [IoSlice::new(bytes)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    retry(|| sendmsg::<()>(socket, &slices, rights, flags, None)).map(drop)
}

/// Receives a packet. The end of the connection is an error.
fn receive(socket: RawFd, buffer: &mut [u8]) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut space = cmsg_space!([RawFd; MAX_FDS]);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    loop {
        let mut slices = [IoSliceMut::new(buffer)];
        let message = match recvmsg::<()>(socket, &mut slices, Some(&mut space), flags) {
            // The worker has closed the connection, and left messages. The kernel reports that
            // once, before what the worker has sent.
            Err(Errno::EINTR | Errno::ECONNRESET) => continue,
            other => other?,
        };
        let mut fds = Vec::new();
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(raw) = part {
                // SAFETY: the kernel has just created the descriptors.
                fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        if message.bytes == 0 || message.flags.contains(MsgFlags::MSG_TRUNC) {
            return Err(Errno::EPIPE);
        }
        return Ok((message.bytes, fds));
    }
}

/// Repeats a call that a signal interrupted. Signals that cannot be blocked stop a process.
fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::EINTR) => {}
            other => return other,
        }
    }
}

/// Moves a descriptor to a high number, if the process may have such.
fn high(fd: OwnedFd) -> OwnedFd {
    match fcntl(&fd, FcntlArg::F_DUPFD_CLOEXEC(FIRST_DESCRIPTOR)) {
        // SAFETY: the kernel has just created the descriptor.
        Ok(raw) => unsafe { OwnedFd::from_raw_fd(raw) },
        Err(_) => fd,
    }
}

/// Returns the error that a worker reported.
pub fn errno_of(errno: i32) -> Errno {
    match Errno::from_raw(errno) {
        Errno::UnknownErrno => Errno::EIO,
        known => known,
    }
}
