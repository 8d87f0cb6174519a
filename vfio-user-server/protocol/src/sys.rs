//! System calls with `unsafe` code.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::fds::{Fds, MAX_FDS};

/// Length of the control buffer in words: a header and [`MAX_FDS`] descriptors. The kernel discards
/// more, without a call of their file systems in this process.
const CONTROL_WORDS: usize = 2 + MAX_FDS * size_of::<RawFd>() / size_of::<u64>();

/// Result of [`receive`].
#[derive(Clone, Copy, Debug)]
pub struct Received {
    /// Number of bytes received; 0 if the peer has closed the connection.
    pub bytes: usize,
    /// True if more descriptors arrived than fit. The surplus was discarded.
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

/// Sets where a peek begins in what a Unix socket holds (socket(7), `SO_PEEK_OFF`), or ends that with
/// `None`. Each peek moves the place on by its length, and each receive call moves it back.
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
    let mut control = [MaybeUninit::<u64>::uninit(); CONTROL_WORDS];
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all-zero is a valid msghdr: null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_CMSG_CLOEXEC
        | match mode {
            Mode::Wait => 0,
            Mode::Poll => libc::MSG_DONTWAIT,
            Mode::Peek => libc::MSG_DONTWAIT | libc::MSG_PEEK,
            Mode::PeekWait => libc::MSG_PEEK,
        };
    let bytes = loop {
        // SAFETY: the message has pointers to a buffer and a control buffer with their lengths.
        // Both are borrowed mutably for the call.
        let result = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
        if let Ok(bytes) = usize::try_from(result) {
            break bytes;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    };
    let mut surplus_fds = message.msg_flags & libc::MSG_CTRUNC != 0;
    // SAFETY: recvmsg set the control buffer and its length, and the buffer is alive.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return null or a header within the control buffer,
    // which is aligned because the buffer consists of 8-byte words.
    while let Some(item) = unsafe { header.as_ref() } {
        if item.cmsg_level == libc::SOL_SOCKET && item.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: the header is valid, as above; CMSG_LEN only computes.
            let (data, overhead) = unsafe { (libc::CMSG_DATA(header), libc::CMSG_LEN(0) as usize) };
            for n in 0..item.cmsg_len.saturating_sub(overhead) / size_of::<RawFd>() {
                let mut raw = [0; size_of::<RawFd>()];
                // SAFETY: the kernel wrote this many descriptors after the header.
                unsafe { data.add(n * raw.len()).copy_to(raw.as_mut_ptr(), raw.len()) };
                let raw = RawFd::from_ne_bytes(raw);
                // SAFETY: the kernel has just created the descriptor, and no other code owns it.
                let fd = unsafe { OwnedFd::from_raw_fd(raw) };
                if let Err(fd) = fds.push(fd) {
                    surplus_fds = true;
                    foreign_fds::close(fd);
                }
            }
        }
        // SAFETY: the kernel wrote the header into the control buffer.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok(Received { bytes, surplus_fds })
}
