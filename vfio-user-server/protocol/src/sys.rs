//! System calls with `unsafe` code.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use foreign_fds::ForeignFd;

use crate::fds::{Fds, MAX_FDS};

/// Result of [`receive`].
#[derive(Clone, Copy, Debug)]
pub struct Received {
    /// Number of bytes received; 0 if the peer has closed the connection.
    pub bytes: usize,
    /// True if more descriptors arrived than fit. The surplus was closed.
    pub surplus_fds: bool,
}

/// Returns the size of what was sent on a Unix socket and not received by the peer; 0 for nothing
/// (unix(7), `SIOCOUTQ`).
pub fn unreceived(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the request writes an int, for which the pointer is valid.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(usize::try_from(bytes).unwrap_or_default())
}

/// Sets where a peek begins in what a Unix socket holds (socket(7), `SO_PEEK_OFF`), or ends that
/// with `None`. Each peek moves the place on by its length, and each receive call moves it back.
pub fn set_peek_offset(socket: BorrowedFd<'_>, offset: Option<usize>) -> io::Result<()> {
    let offset = offset.map(|offset| libc::c_int::try_from(offset).unwrap_or(libc::c_int::MAX));
    let offset = offset.unwrap_or(-1);
    // SAFETY: the option is an int, for which the pointer and the length are valid.
    let done = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEEK_OFF,
            (&raw const offset).cast(),
            size_of_val(&offset) as libc::socklen_t,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// How [`receive`] receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Waits for bytes.
    Wait,
    /// Does not wait.
    Poll,
    /// Does not wait, and leaves the bytes in the socket.
    Peek,
    /// Waits for bytes, and leaves them in the socket.
    PeekWait,
}

/// Receives bytes and descriptors. Descriptors are added to `fds`, close-on-exec.
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Fds,
    mode: Mode,
) -> io::Result<Received> {
    let flags = match mode {
        Mode::Wait => 0,
        Mode::Poll => libc::MSG_DONTWAIT,
        Mode::Peek => libc::MSG_DONTWAIT | libc::MSG_PEEK,
        Mode::PeekWait => libc::MSG_PEEK,
    };
    let mut has_no_room = false;
    let received = loop {
        let take = |fd: ForeignFd| has_no_room |= fds.push(fd).is_err();
        match foreign_fds::receive(socket, buffer, MAX_FDS, flags, take) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            received => break received?,
        }
    };
    let surplus_fds = has_no_room || received.flags & libc::MSG_CTRUNC != 0;
    Ok(Received { bytes: received.bytes, surplus_fds })
}
