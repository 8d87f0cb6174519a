//! `recvmsg` for packets whose descriptors the kernel may have discarded. nix returns no descriptors
//! of such a packet, and those that arrived would leak.

use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use nix::errno::Errno;
use nix::sys::socket::MsgFlags;

use super::MAX_FDS;

/// Length of the control buffer in words: a header and [`MAX_FDS`] descriptors. The kernel discards
/// more, without a call of their file systems in this process.
const CONTROL_WORDS: usize = 2 + MAX_FDS * size_of::<RawFd>() / size_of::<u64>();

/// A received packet: its length, its descriptors (close-on-exec), and the kernel's flags.
pub type Received = (usize, Vec<OwnedFd>, MsgFlags);

/// Receives one packet with up to `max_fds` descriptors, either none or [`MAX_FDS`].
pub fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    max_fds: usize,
    flags: MsgFlags,
) -> Result<Received, Errno> {
    let mut control = [MaybeUninit::<u64>::uninit(); CONTROL_WORDS];
    let mut iov = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: all-zero is a valid msghdr: null pointers and zero lengths.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut iov;
    message.msg_iovlen = 1;
    if max_fds > 0 {
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = size_of_val(&control);
    }
    let flags = (flags | MsgFlags::MSG_CMSG_CLOEXEC).bits();
    // SAFETY: the message has pointers to a buffer and a control buffer with their lengths. Both are
    // borrowed mutably for the call.
    let result = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, flags) };
    let len = usize::try_from(Errno::result(result)?).unwrap_or_default();
    let mut fds = Vec::new();
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
                fds.push(unsafe { OwnedFd::from_raw_fd(RawFd::from_ne_bytes(raw)) });
            }
        }
        // SAFETY: the kernel wrote the header into the control buffer.
        header = unsafe { libc::CMSG_NXTHDR(&raw const message, header) };
    }
    Ok((len, fds, MsgFlags::from_bits_truncate(message.msg_flags)))
}
