//! Test helpers: descriptors whose close waits, and calls that must not wait for it.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "test helpers panic on violations")]

mod held_page;

use std::io::{IoSlice, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use nix::sys::socket::{
    ControlMessage, MsgFlags, getsockopt, sendmsg, setsockopt, sockopt::Linger,
};

pub use held_page::{HeldEpoll, held_eventfd};

/// Returns a socket whose close waits as long as its peer does not read, and the peer.
pub fn lingering() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let socket = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (peer, _) = listener.accept().unwrap();
    setsockopt(&socket, Linger, &libc::linger { l_onoff: 1, l_linger: 3600 }).unwrap();
    assert_eq!(getsockopt(&socket, Linger).unwrap().l_linger, 3600);
    socket.set_nonblocking(true).unwrap();
    while (&socket).write(&[0; 1 << 12]).is_ok() {}
    (socket, peer)
}

/// Sends bytes with descriptors.
///
/// # Errors
///
/// Fails as sendmsg(2) does.
pub fn send(socket: &impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> nix::Result<()> {
    let raw: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    let rights = [ControlMessage::ScmRights(&raw)];
    let (socket, flags) = (socket.as_fd().as_raw_fd(), MsgFlags::MSG_NOSIGNAL);
    sendmsg::<()>(socket, &[IoSlice::new(bytes)], &rights, flags, None).map(drop)
}

/// Sends bytes with a descriptor, of which no copy stays here.
///
/// # Errors
///
/// Fails as sendmsg(2) does.
pub fn pass(socket: &impl AsFd, bytes: &[u8], fd: TcpStream) -> nix::Result<()> {
    let sent = send(socket, bytes, &[fd.as_fd()]);
    // It is the last one if the receiver was quicker, or the kernel has refused it.
    thread::spawn(|| drop(fd));
    sent
}

/// Makes a call, and fails if it waits for the descriptors that it closes.
pub fn without_waiting<T: Send + 'static>(call: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = mpsc::channel();
    thread::spawn(move || done.send(call()));
    is_done.recv_timeout(Duration::from_secs(30)).expect("the call waits")
}
