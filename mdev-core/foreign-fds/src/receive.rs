//! `recvmsg` for packets with descriptors. nix returns no descriptors of a packet some of whose
//! descriptors the kernel has discarded, and those that arrived would leak.
//!
//! The kernel closes descriptors that a receiver has no room for within the system call, which may
//! wait. Therefore each call has room for all descriptors that a packet can have, and closes those
//! that are not due as [`close`](crate::close) does.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::{ForeignFd, close_all};

/// Largest number of descriptors of a packet (`SCM_MAX_FD` in the kernel's include/net/scm.h).
const MAX_OF_PACKET: usize = 253;

/// Length of the control buffer's header in words of 8 bytes.
const HEADER_WORDS: usize = 2;

/// Number of descriptors in such a word.
const FDS_PER_WORD: usize = size_of::<u64>() / size_of::<RawFd>();

/// Length of the control buffer in words of 8 bytes.
const CONTROL_WORDS: usize = HEADER_WORDS + MAX_OF_PACKET.div_ceil(FDS_PER_WORD);

/// Result of [`receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Number of bytes received. 0 if the peer has closed the connection.
    pub bytes: usize,
    /// The kernel's flags: `MSG_TRUNC` for a packet that is longer than the buffer, `MSG_CTRUNC` if
    /// more descriptors came than were due, or than this process has room for.
    pub flags: i32,
}

/// Receives bytes and up to `max_fds` descriptors. `take` gets each descriptor, close-on-exec, in
/// order. Surplus descriptors are closed on one thread.
///
/// The kernel discards descriptors, and may wait for what they belong to, only if this process may
/// open no more. `flags` are those of recvmsg(2).
///
/// # Errors
///
/// Fails as recvmsg(2) does, also with `EINTR`.
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    max_fds: usize,
    flags: i32,
    take: impl FnMut(ForeignFd),
) -> io::Result<Received> {
    // SAFETY: the buffer is borrowed mutably for the call.
    unsafe { receive_at(socket, buffer.as_mut_ptr(), buffer.len(), max_fds, flags, take) }
}

/// Receives as [`receive`], into memory that other processes may access.
///
/// # Errors
///
/// Fails as [`receive`] does.
///
/// # Safety
///
/// `buffer` is valid for writes of `len` bytes during the call.
pub unsafe fn receive_at(
    socket: BorrowedFd<'_>,
    buffer: *mut u8,
    len: usize,
    max_fds: usize,
    flags: i32,
    mut take: impl FnMut(ForeignFd),
) -> io::Result<Received> {
    let mut control = [MaybeUninit::<u64>::uninit(); CONTROL_WORDS];
    let mut iov = libc::iovec { iov_base: buffer.cast(), iov_len: len };
    // SAFETY: all-zero is a valid msghdr: null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the message has pointers to a buffer and a control buffer, with their lengths. Both
    // are valid for writes during the call.
    let result = unsafe {
        libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC)
    };
    let bytes = usize::try_from(result).map_err(|_| io::Error::last_os_error())?;
    let (mut due, mut surplus) = (0, Vec::new());
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
                // SAFETY: the kernel has just created the descriptor, and no other code owns it.
                let fd = unsafe { OwnedFd::from_raw_fd(RawFd::from_ne_bytes(raw)) };
                let fd = ForeignFd::from(fd);
                if due < max_fds {
                    due += 1;
                    take(fd);
                } else {
                    surplus.push(fd);
                }
            }
        }
        // SAFETY: the kernel wrote the header into the control buffer.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    let mut flags = message.msg_flags;
    if !surplus.is_empty() {
        flags |= libc::MSG_CTRUNC;
        close_all(surplus);
    }
    Ok(Received { bytes, flags })
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::testing::send;

    #[test]
    fn as_many_descriptors_as_are_due_arrive() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        let cases = [(1, 0, 0), (1, 8, 1), (9, 8, 8), (16, 16, 16), (253, 16, 16), (253, 300, 253)];
        for (sent, max, arrived) in cases {
            send(&ours, b"x", &vec![theirs.as_fd(); sent]).unwrap();
            let mut fds = Vec::new();
            let mut buffer = [0; 4];
            let received = receive(theirs.as_fd(), &mut buffer, max, 0, |fd| fds.push(fd)).unwrap();
            assert_eq!((received.bytes, fds.len()), (1, arrived), "{sent} of {max}");
            assert_eq!(received.flags & libc::MSG_CTRUNC != 0, sent > arrived, "{sent} of {max}");
        }
        ours.write_all(b"ab").unwrap();
        let none = |_: ForeignFd| unreachable!("no descriptor was sent");
        assert_eq!(receive(theirs.as_fd(), &mut [0; 4], 8, 0, none).unwrap().bytes, 2);
    }
}
