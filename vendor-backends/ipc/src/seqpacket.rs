//! Packets with file descriptors between Tessera's processes, over SOCK_SEQPACKET UNIX sockets.
//!
//! A peer may be less trusted than this process. Neither a receive call nor the end of a connection
//! waits for a descriptor that the peer has sent (crate `foreign_fds`).

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use foreign_fds::{ForeignFd, ForeignSocket};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, accept4, bind,
    connect, listen, sendmsg, setsockopt, socket, socketpair,
    sockopt::{ReceiveTimeout, SendTimeout},
};
use nix::sys::time::{TimeVal, TimeValLike};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum length of a packet in bytes.
pub const MAX_PACKET: usize = 64 * 1024;
/// Maximum number of file descriptors of a packet.
pub const MAX_FDS: usize = 8;

/// One end of a connection.
#[derive(Debug)]
pub struct SeqPacket(ForeignSocket);

/// A received packet.
#[derive(Debug)]
pub struct Packet {
    /// Length of the packet in the caller's buffer.
    pub len: usize,
    /// Received file descriptors, close-on-exec.
    pub fds: Vec<ForeignFd>,
    /// True if the kernel discarded descriptors of the packet, because this process or its user has
    /// no room for them.
    pub fds_lost: bool,
}

impl SeqPacket {
    /// Creates two connected ends, close-on-exec.
    pub fn pair() -> io::Result<(Self, Self)> {
        let (a, b) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        Ok((Self(a.into()), Self(b.into())))
    }

    /// Uses a socket to whose other end only trusted processes write: its close is not left to a
    /// thread ([`ForeignSocket::trusting`]).
    pub fn trusting(fd: OwnedFd) -> Self {
        Self(ForeignSocket::trusting(fd))
    }

    /// Connects to a listener at `path`.
    pub fn connect(path: &Path) -> io::Result<Self> {
        let fd = new_socket()?;
        connect(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(Self(fd.into()))
    }

    /// Connects to a listener at `path`, with a timeout for the connection and for all later sends
    /// and receives.
    pub fn connect_with_timeout(path: &Path, timeout: Duration) -> io::Result<Self> {
        Self(new_socket()?.into()).connected(path, timeout)
    }

    /// Connects as [`Self::connect_with_timeout`]. The peer cannot send file descriptors
    /// ([`foreign_fds::refuse`]).
    pub fn connect_without_fds(path: &Path, timeout: Duration) -> io::Result<Self> {
        Self(ForeignSocket::refusing(new_socket()?)).connected(path, timeout)
    }

    /// Connects as [`Self::connect_without_fds`], for calls that do not wait. Fails with
    /// `WouldBlock` if the listener has no room for a connection.
    pub fn try_connect_without_fds(path: &Path) -> io::Result<Self> {
        let socket = ForeignSocket::refusing(new_socket()?);
        fcntl(&socket, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        connect(socket.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(Self(socket))
    }

    fn connected(self, path: &Path, timeout: Duration) -> io::Result<Self> {
        let timeout = TimeVal::microseconds(timeout.as_micros() as i64);
        setsockopt(&self.0, SendTimeout, &timeout)?;
        setsockopt(&self.0, ReceiveTimeout, &timeout)?;
        connect(self.0.as_raw_fd(), &UnixAddr::new(path)?)?;
        Ok(self)
    }

    /// Creates two connected ends as [`Self::pair`]. The second one cannot send file descriptors to
    /// the first one ([`foreign_fds::refuse`]).
    pub fn pair_without_fds() -> io::Result<(Self, Self)> {
        let (Self(a), b) = Self::pair()?;
        Ok((Self(ForeignSocket::refusing(a.into_fd())), b))
    }

    /// Returns whether the other end has not received all packets of this one.
    ///
    /// # Errors
    ///
    /// Fails if this is no socket.
    pub fn has_unread(&self) -> io::Result<bool> {
        /// Index of the memory of sent packets (`SK_MEMINFO_WMEM_ALLOC`) of `SK_MEMINFO_VARS`.
        const SENT: usize = 2;
        let mut info = [0_u32; 9];
        let mut len = size_of_val(&info) as libc::socklen_t;
        let (fd, value) = (self.0.as_raw_fd(), info.as_mut_ptr().cast());
        // SAFETY: the kernel writes at most `len` bytes to `info`, and a length to `len`.
        let got = unsafe {
            libc::getsockopt(fd, libc::SOL_SOCKET, libc::SO_MEMINFO, value, &raw mut len)
        };
        Errno::result(got)?;
        Ok(info[SENT] > 0)
    }

    /// Sends one packet and waits for buffer space. Fails with `EPIPE` if the peer is gone; never
    /// raises SIGPIPE.
    pub fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(bytes, fds, MsgFlags::empty())
    }

    /// Sends one packet, or fails with `WouldBlock`.
    pub fn try_send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.send_with(bytes, fds, MsgFlags::MSG_DONTWAIT)
    }

    fn send_with(&self, bytes: &[u8], fds: &[BorrowedFd<'_>], flags: MsgFlags) -> io::Result<()> {
        if bytes.len() > MAX_PACKET || fds.len() > MAX_FDS {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "The packet has too many bytes or file descriptors",
            ));
        }
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[][..] } else { &rights[..] };
        let flags = flags | MsgFlags::MSG_NOSIGNAL;
        loop {
            match sendmsg::<()>(self.0.as_raw_fd(), &[IoSlice::new(bytes)], control, flags, None) {
                Ok(_) => return Ok(()),
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Receives one packet without file descriptors: closes those that the peer sent. Returns
    /// `Ok(None)` if the peer has closed the connection. A packet longer than `buffer` is an error,
    /// so `buffer` should have [`MAX_PACKET`] bytes.
    pub fn recv(&self, buffer: &mut [u8]) -> io::Result<Option<Packet>> {
        self.recv_with(buffer, 0, MsgFlags::empty())
    }

    /// Receives one packet as [`Self::recv`], or fails with `WouldBlock`.
    pub fn try_recv(&self, buffer: &mut [u8]) -> io::Result<Option<Packet>> {
        self.recv_with(buffer, 0, MsgFlags::MSG_DONTWAIT)
    }

    /// Receives a copy of the next packet as [`Self::try_recv`]. The packet stays.
    pub fn try_peek(&self, buffer: &mut [u8]) -> io::Result<Option<Packet>> {
        self.recv_with(buffer, 0, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK)
    }

    /// Receives a copy of the next packet with up to [`MAX_FDS`] file descriptors, as
    /// [`Self::try_peek`].
    pub fn try_peek_with_fds(&self, buffer: &mut [u8]) -> io::Result<Option<Packet>> {
        self.recv_with(buffer, MAX_FDS, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK)
    }

    /// Removes the next packet, of any length, and closes its descriptors.
    pub fn discard(&self) -> io::Result<()> {
        loop {
            match receive(self.0.as_fd(), &mut [0], 0, MsgFlags::MSG_DONTWAIT) {
                Ok(_) => return Ok(()),
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Receives one packet with up to [`MAX_FDS`] file descriptors.
    pub fn recv_with_fds(&self, buffer: &mut [u8]) -> io::Result<Option<Packet>> {
        self.recv_with(buffer, MAX_FDS, MsgFlags::empty())
    }

    /// Receives one packet as [`Self::recv_with_fds`], or fails with `WouldBlock`.
    pub fn try_recv_with_fds(&self, buffer: &mut [u8]) -> io::Result<Option<Packet>> {
        self.recv_with(buffer, MAX_FDS, MsgFlags::MSG_DONTWAIT)
    }

    fn recv_with(
        &self,
        buffer: &mut [u8],
        max_fds: usize,
        flags: MsgFlags,
    ) -> io::Result<Option<Packet>> {
        let (len, fds, flags) = loop {
            match receive(self.0.as_fd(), buffer, max_fds, flags) {
                Ok(received) => break received,
                // The peer has closed the connection with messages that it had not received. The
                // kernel reports that once, before what the peer has sent.
                Err(error) if is_passing(&error) => {}
                Err(error) => return Err(error),
            }
        };
        let discarded = flags.contains(MsgFlags::MSG_CTRUNC) && max_fds > 0;
        if flags.contains(MsgFlags::MSG_TRUNC) || discarded && fds.len() >= max_fds {
            foreign_fds::close_all(fds);
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "The packet has too many bytes or file descriptors",
            ));
        }
        Ok((len > 0).then_some(Packet { len, fds, fds_lost: discarded }))
    }

    /// Ends the connection, as [`ForeignSocket::end`] does.
    pub fn end(&self) {
        self.0.end();
    }
}

impl AsFd for SeqPacket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for SeqPacket {
    fn from(fd: OwnedFd) -> Self {
        Self(fd.into())
    }
}

impl From<SeqPacket> for OwnedFd {
    fn from(socket: SeqPacket) -> Self {
        socket.0.into_fd()
    }
}

/// A listener for [`SeqPacket`] connections, bound to a path.
#[derive(Debug)]
pub struct SeqPacketListener(ForeignSocket);

impl SeqPacketListener {
    /// Binds and listens. Replaces an existing socket file, because the caller owns the directory.
    pub fn bind(path: &Path) -> io::Result<Self> {
        match std::fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let fd = new_socket()?;
        bind(fd.as_raw_fd(), &UnixAddr::new(path)?)?;
        listen(&fd, Backlog::new(16)?)?;
        Ok(Self(fd.into()))
    }

    /// Accepts one connection.
    pub fn accept(&self) -> io::Result<SeqPacket> {
        let fd = accept4(self.0.as_raw_fd(), SockFlag::SOCK_CLOEXEC)?;
        // SAFETY: accept4 has just created this descriptor.
        Ok(SeqPacket(unsafe { OwnedFd::from_raw_fd(fd) }.into()))
    }
}

impl AsFd for SeqPacketListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for SeqPacketListener {
    fn from(fd: OwnedFd) -> Self {
        Self(fd.into())
    }
}

impl From<SeqPacketListener> for OwnedFd {
    fn from(listener: SeqPacketListener) -> Self {
        listener.0.into_fd()
    }
}

fn new_socket() -> io::Result<OwnedFd> {
    Ok(socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?)
}

/// Encodes a message.
pub fn encode<T: Serialize>(message: &T) -> io::Result<Vec<u8>> {
    postcard::to_stdvec(message).map_err(io::Error::other)
}

/// Decodes a message. Bytes after its end are an error.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    let invalid = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
    match postcard::take_from_bytes(bytes) {
        Ok((message, [])) => Ok(message),
        Ok(_) => Err(invalid("The message has trailing bytes".into())),
        Err(error) => Err(invalid(format!("Cannot decode a message: {error}"))),
    }
}

/// Receives one packet with up to `max_fds` descriptors, close-on-exec.
fn receive(
    socket: BorrowedFd<'_>,
    buffer: &mut [u8],
    max_fds: usize,
    flags: MsgFlags,
) -> io::Result<(usize, Vec<ForeignFd>, MsgFlags)> {
    let mut fds = Vec::new();
    let received = foreign_fds::receive(socket, buffer, max_fds, flags.bits(), |fd| fds.push(fd))?;
    Ok((received.bytes, fds, MsgFlags::from_bits_truncate(received.flags)))
}

/// Returns whether the same call may succeed: after a signal, and once after the peer has closed
/// the connection.
fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::Interrupted | io::ErrorKind::ConnectionReset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_are_unread_until_the_other_end_receives_or_closes() {
        let (ours, theirs) = SeqPacket::pair().unwrap();
        assert!(!ours.has_unread().unwrap());
        ours.send(b"one", &[theirs.as_fd()]).unwrap();
        ours.send(b"two", &[]).unwrap();
        for is_unread in [true, false] {
            theirs.recv_with_fds(&mut [0; 8]).unwrap();
            assert_eq!(ours.has_unread().unwrap(), is_unread);
        }
        ours.send(b"three", &[]).unwrap();
        drop(theirs);
        // Received sockets are closed on a thread.
        while ours.has_unread().unwrap() {
            std::thread::yield_now();
        }
    }

    #[test]
    fn carries_bytes_and_descriptors() {
        let (a, b) = SeqPacket::pair().unwrap();
        a.send(b"hello", &[a.as_fd()]).unwrap();
        let mut buffer = [0; 16];
        let packet = b.recv_with_fds(&mut buffer).unwrap().unwrap();
        assert_eq!((&buffer[..packet.len], packet.fds.len()), (&b"hello"[..], 1));
        drop((a, packet));
        assert!(b.recv(&mut buffer).unwrap().is_none(), "closed");
    }

    #[test]
    fn what_was_sent_arrives_although_the_peer_has_not_received_all() {
        let (a, b) = SeqPacket::pair().unwrap();
        b.send(b"unread", &[]).unwrap();
        a.send(b"last words", &[]).unwrap();
        drop(a);
        let mut buffer = [0; 16];
        assert_eq!(b.try_peek(&mut buffer).unwrap().unwrap().len, 10);
        let packet = b.recv(&mut buffer).unwrap().unwrap();
        assert_eq!(&buffer[..packet.len], b"last words");
        assert!(b.recv(&mut buffer).unwrap().is_none(), "closed");
    }

    #[test]
    fn a_packet_stays_until_it_is_discarded() {
        let (a, b) = SeqPacket::pair().unwrap();
        let (reader, writer) = nix::unistd::pipe().unwrap();
        a.send(b"first", &[writer.as_fd()]).unwrap();
        a.send(b"second", &[]).unwrap();
        drop(writer);
        let mut buffer = [0; 16];
        for _ in 0..2 {
            let packet = b.try_peek_with_fds(&mut buffer).unwrap().unwrap();
            assert_eq!((&buffer[..packet.len], packet.fds.len()), (&b"first"[..], 1));
        }
        b.discard().unwrap();
        assert_eq!(nix::unistd::read(&reader, &mut [0]), Ok(0), "no writer is left");
        let packet = b.try_peek_with_fds(&mut buffer).unwrap().unwrap();
        assert_eq!((&buffer[..packet.len], packet.fds.len()), (&b"second"[..], 0));
        b.discard().unwrap();
        assert_eq!(b.discard().unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn descriptors_that_are_not_due_are_discarded() {
        let (a, b) = SeqPacket::pair().unwrap();
        let (reader, writer) = nix::unistd::pipe().unwrap();
        a.send(b"hello", &[writer.as_fd()]).unwrap();
        drop(writer);
        let packet = b.recv(&mut [0; 16]).unwrap().unwrap();
        assert_eq!((packet.len, packet.fds.len()), (5, 0));
        assert_eq!(nix::unistd::read(&reader, &mut [0]), Ok(0), "no writer is left");
    }

    #[test]
    fn receiving_times_out() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let _listener = SeqPacketListener::bind(&path).unwrap();
        let socket = SeqPacket::connect_with_timeout(&path, Duration::from_millis(20)).unwrap();
        let error = socket.recv(&mut [0; 16]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }

    #[test]
    fn closes_descriptors_of_a_packet_that_has_too_many() {
        let (a, b) = SeqPacket::pair().unwrap();
        let (reader, writer) = nix::unistd::pipe().unwrap();
        let raw = [writer.as_raw_fd(); MAX_FDS + 1];
        let rights = [ControlMessage::ScmRights(&raw)];
        let iov = [IoSlice::new(b"x")];
        sendmsg::<()>(a.0.as_raw_fd(), &iov, &rights, MsgFlags::empty(), None).unwrap();
        drop(writer);
        assert!(b.recv_with_fds(&mut [0; 16]).is_err());
        assert_eq!(nix::unistd::read(&reader, &mut [0]), Ok(0), "no writer is left");
    }

    #[test]
    fn refuses_a_packet_that_does_not_fit() {
        let (a, b) = SeqPacket::pair().unwrap();
        a.send(&[0; 32], &[]).unwrap();
        assert!(b.recv(&mut [0; 16]).is_err());
    }

    #[test]
    fn an_end_without_descriptors_refuses_them_to_its_peer() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = SeqPacketListener::bind(&path).unwrap();
        let connected = SeqPacket::connect_without_fds(&path, Duration::from_secs(10)).unwrap();
        let accepted = listener.accept().unwrap();
        let (ours, theirs) = SeqPacket::pair_without_fds().unwrap();
        for (ours, theirs) in [(connected, accepted), (ours, theirs)] {
            let file = tempfile::tempfile().unwrap();
            match theirs.send(b"file", &[file.as_fd()]) {
                Err(error) => assert_eq!(error.kind(), io::ErrorKind::PermissionDenied),
                // Before Linux 6.16, the kernel discards the descriptor when it is received.
                Ok(()) => assert!(ours.recv(&mut [0; 8]).unwrap().unwrap().fds.is_empty()),
            }
            theirs.send(b"text", &[]).unwrap();
            assert_eq!(ours.recv(&mut [0; 8]).unwrap().unwrap().len, 4);
        }
    }
}
