//! System calls that need `unsafe`.

use std::io;
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use crate::fds::Fds;

/// Room for as many descriptors as the kernel passes at once (`SCM_MAX_FD`, 253), so that none are cut off.
const CONTROL_WORDS: usize = 160;

/// What one [`receive`] brought.
#[derive(Clone, Copy, Debug)]
pub struct Received {
    /// Bytes; 0 where the peer has closed.
    pub bytes: usize,
    /// More descriptors came than there was room for; the surplus was closed.
    pub surplus_fds: bool,
}

/// Receives bytes and descriptors; where told to, it waits for them. Descriptors are added to `fds`, close-on-exec.
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    fds: &mut Fds,
    wait: bool,
) -> io::Result<Received> {
    let mut control = [MaybeUninit::<u64>::uninit(); CONTROL_WORDS];
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all-zero is a valid msghdr: null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = libc::MSG_CMSG_CLOEXEC | if wait { 0 } else { libc::MSG_DONTWAIT };
    let bytes = loop {
        // SAFETY: the message points at a buffer and a control buffer that we borrow mutably for the call, with their
        // lengths.
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
    // SAFETY: recvmsg filled in the control buffer and its length, and it is still there.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
    // SAFETY: CMSG_FIRSTHDR and CMSG_NXTHDR return null or a header within the control buffer, aligned as the buffer
    // is made of 8-byte words.
    while let Some(item) = unsafe { header.as_ref() } {
        if item.cmsg_level == libc::SOL_SOCKET && item.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: as above; CMSG_LEN only computes.
            let (data, overhead) = unsafe { (libc::CMSG_DATA(header), libc::CMSG_LEN(0) as usize) };
            for n in 0..item.cmsg_len.saturating_sub(overhead) / size_of::<RawFd>() {
                let mut raw = [0; size_of::<RawFd>()];
                // SAFETY: the kernel wrote this many descriptors behind the header.
                unsafe { data.add(n * raw.len()).copy_to(raw.as_mut_ptr(), raw.len()) };
                let raw = RawFd::from_ne_bytes(raw);
                // SAFETY: the kernel has just made the descriptor for us, and nobody else knows it.
                let fd = unsafe { OwnedFd::from_raw_fd(raw) };
                surplus_fds |= fds.push(fd).is_err();
            }
        }
        // SAFETY: header is one that the kernel wrote into the control buffer.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok(Received { bytes, surplus_fds })
}

/// The supplementary groups that a UNIX socket's peer had when it connected.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<u32>> {
    let mut groups = vec![0_u32; 64];
    loop {
        let mut len = size_of_val(groups.as_slice()) as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes into `groups`, which is that long, and the length into `len`.
        let done = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        let count = len as usize / size_of::<u32>();
        if done == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // The kernel has said how many there are, which is more than there was room for.
        if error.raw_os_error() != Some(libc::ERANGE) || count <= groups.len() {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}
