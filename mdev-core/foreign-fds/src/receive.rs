//! `recvmsg` for packets with descriptors, some of which the kernel may have discarded. nix returns
//! no descriptors of such a packet, and those that arrived would leak.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

/// Largest number of descriptors that [`receive`] accepts.
pub const MAX_RECEIVED: usize = 16;

/// Length of the control buffer's header in words of 8 bytes.
const HEADER_WORDS: usize = 2;

/// Number of descriptors in such a word.
const FDS_PER_WORD: usize = size_of::<u64>() / size_of::<RawFd>();

/// Result of [`receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Number of bytes received. 0 if the peer has closed the connection.
    pub bytes: usize,
    /// The kernel's flags: `MSG_TRUNC` for a packet that is longer than the buffer, `MSG_CTRUNC` if
    /// descriptors were discarded, without a call of their file systems in this process.
    pub flags: i32,
}

/// Receives bytes and up to `max_fds` descriptors. `take` gets each descriptor, close-on-exec, in
/// order.
///
/// `max_fds` is rounded up to an even number, and is at most [`MAX_RECEIVED`]. `flags` are those of
/// recvmsg(2).
///
/// # Errors
///
/// Fails as recvmsg(2) does, also with `EINTR`.
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    max_fds: usize,
    flags: i32,
    mut take: impl FnMut(OwnedFd),
) -> io::Result<Received> {
    let mut control = [MaybeUninit::<u64>::uninit(); HEADER_WORDS + MAX_RECEIVED / FDS_PER_WORD];
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all-zero is a valid msghdr: null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    if max_fds > 0 {
        let words = HEADER_WORDS + max_fds.min(MAX_RECEIVED).div_ceil(FDS_PER_WORD);
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = words * size_of::<u64>();
    }
    // SAFETY: the message has pointers to a buffer and a control buffer, with lengths within them.
    // Both are borrowed mutably for the call.
    let result = unsafe {
        libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags | libc::MSG_CMSG_CLOEXEC)
    };
    let bytes = usize::try_from(result).map_err(|_| io::Error::last_os_error())?;
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
                take(unsafe { OwnedFd::from_raw_fd(RawFd::from_ne_bytes(raw)) });
            }
        }
        // SAFETY: the kernel wrote the header into the control buffer.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok(Received { bytes, flags: message.msg_flags })
}

#[cfg(test)]
mod tests {
    use std::io::{IoSlice, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// Sends a byte with copies of a descriptor.
    fn send(socket: &UnixStream, fd: BorrowedFd<'_>, count: usize) {
        let mut control = [0_u64; 64];
        let bytes = (count * size_of::<RawFd>()) as u32;
        let byte = IoSlice::new(b"x");
        // SAFETY: the message's pointers are to the byte and to the control buffer, which has room
        // for a header and 100 descriptors.
        let sent = unsafe {
            let mut message: libc::msghdr = std::mem::zeroed();
            message.msg_iov = (&raw const byte).cast_mut().cast();
            message.msg_iovlen = 1;
            message.msg_control = control.as_mut_ptr().cast();
            message.msg_controllen = libc::CMSG_SPACE(bytes) as usize;
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(bytes) as usize;
            for n in 0..count {
                let raw = fd.as_raw_fd().to_ne_bytes();
                let at = libc::CMSG_DATA(header).add(n * raw.len());
                at.copy_from_nonoverlapping(raw.as_ptr(), raw.len());
            }
            libc::sendmsg(socket.as_raw_fd(), &raw const message, 0)
        };
        assert_eq!(sent, 1);
    }

    #[test]
    fn as_many_descriptors_as_are_due_arrive() {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        for (sent, max, arrived) in [(1, 0, 0), (1, 8, 1), (9, 8, 8), (16, 16, 16), (20, 99, 16)] {
            send(&ours, theirs.as_fd(), sent);
            let mut fds = Vec::new();
            let mut buffer = [0; 4];
            let received = receive(theirs.as_fd(), &mut buffer, max, 0, |fd| fds.push(fd)).unwrap();
            assert_eq!((received.bytes, fds.len()), (1, arrived), "{sent} of {max}");
            assert_eq!(received.flags & libc::MSG_CTRUNC != 0, sent > arrived, "{sent} of {max}");
        }
        ours.write_all(b"ab").unwrap();
        let none = |_| unreachable!("no descriptor was sent");
        assert_eq!(receive(theirs.as_fd(), &mut [0; 4], 8, 0, none).unwrap().bytes, 2);
    }
}
