//! vfio-user client that writes raw bytes to the socket.
//!
//! The client shares no code with the server, so a mistake in the server's codec cannot hide.

// The methods are assertions of the tests that use them.
#![allow(clippy::unwrap_used)]

use std::collections::VecDeque;
use std::io::{ErrorKind, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use nix::sys::socket::{ControlMessage, ControlMessageOwned, MsgFlags, recvmsg, sendmsg};

/// `VFIO_USER_VERSION`.
pub const VERSION: u16 = 1;
/// `VFIO_USER_DMA_MAP`.
pub const DMA_MAP: u16 = 2;
/// `VFIO_USER_DMA_UNMAP`.
pub const DMA_UNMAP: u16 = 3;
/// `VFIO_USER_DEVICE_GET_INFO`.
pub const GET_INFO: u16 = 4;
/// `VFIO_USER_DEVICE_GET_REGION_INFO`.
pub const GET_REGION_INFO: u16 = 5;
/// `VFIO_USER_DEVICE_GET_REGION_IO_FDS`.
pub const GET_REGION_IO_FDS: u16 = 6;
/// `VFIO_USER_DEVICE_GET_IRQ_INFO`.
pub const GET_IRQ_INFO: u16 = 7;
/// `VFIO_USER_DEVICE_SET_IRQS`.
pub const SET_IRQS: u16 = 8;
/// `VFIO_USER_REGION_READ`.
pub const REGION_READ: u16 = 9;
/// `VFIO_USER_REGION_WRITE`.
pub const REGION_WRITE: u16 = 10;
/// `VFIO_USER_DMA_READ`.
pub const DMA_READ: u16 = 11;
/// `VFIO_USER_DMA_WRITE`.
pub const DMA_WRITE: u16 = 12;
/// `VFIO_USER_DEVICE_RESET`.
pub const RESET: u16 = 13;
/// `VFIO_USER_REGION_WRITE_MULTI`.
pub const REGION_WRITE_MULTI: u16 = 15;
/// `VFIO_USER_DEVICE_FEATURE`.
pub const FEATURE: u16 = 16;
/// `VFIO_USER_MIG_DATA_READ`.
pub const MIG_DATA_READ: u16 = 17;
/// `VFIO_USER_MIG_DATA_WRITE`.
pub const MIG_DATA_WRITE: u16 = 18;

/// Flag of a posted request.
pub const NO_REPLY: u32 = 1 << 4;

/// Capabilities that QEMU sends with its version.
pub const QEMU_CAPS: &[u8] =
    b"{\"capabilities\": {\"max_msg_fds\": 16, \"max_data_xfer_size\": 1048576, \
    \"pgsizes\": 4096, \"max_dma_maps\": 65535, \"migration\": {\"max_bitmap_size\": 268435456, \
    \"pgsize\": 4096}, \"write_multiple\": true}}\0";

/// Encodes numbers in native byte order, one after the other.
#[macro_export]
macro_rules! bytes {
    ($($value:expr),* $(,)?) => {{
        #[allow(unused_mut)]
        let mut bytes: Vec<u8> = Vec::new();
        $(bytes.extend_from_slice(&$value.to_ne_bytes());)*
        bytes
    }};
}

/// A message from the server.
#[derive(Debug)]
pub struct Reply {
    /// Message id.
    pub id: u16,
    /// Command number.
    pub command: u16,
    /// Type and flags.
    pub flags: u32,
    /// Error number; 0 without an error.
    pub error: u32,
    /// Payload after the header.
    pub payload: Vec<u8>,
    /// Descriptors that came with the message.
    pub fds: Vec<OwnedFd>,
}

impl Reply {
    /// Returns the 32-bit number at an offset of the payload.
    pub fn u32_at(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.payload[at..at + 4].try_into().unwrap())
    }

    /// Returns the 64-bit number at an offset of the payload.
    pub fn u64_at(&self, at: usize) -> u64 {
        u64::from_ne_bytes(self.payload[at..at + 8].try_into().unwrap())
    }
}

/// A connection.
#[derive(Debug)]
pub struct RawClient {
    /// The connection.
    pub stream: UnixStream,
    /// Requests that the server sent before a reply.
    pub requests: VecDeque<Reply>,
    id: u16,
}

impl RawClient {
    /// Connects without sending a version.
    pub fn connect(path: &Path) -> Self {
        Self::over(UnixStream::connect(path).unwrap())
    }

    /// Wraps a connected socket.
    pub fn over(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stream.set_write_timeout(Some(Duration::from_secs(10))).unwrap();
        Self { stream, requests: VecDeque::new(), id: 0x7000 }
    }

    /// Connects and negotiates the version as QEMU does.
    pub fn attach(path: &Path) -> Self {
        let mut client = Self::connect(path);
        client.ok(VERSION, &[&bytes![0_u16, 0_u16], QEMU_CAPS].concat());
        client
    }

    /// Encodes a message.
    pub fn message(id: u16, command: u16, flags: u32, payload: &[u8]) -> Vec<u8> {
        let size = 16 + payload.len() as u32;
        [bytes![id, command, size, flags, 0_u32], payload.to_vec()].concat()
    }

    /// Sends bytes and descriptors in one piece.
    pub fn send_bytes(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) {
        self.try_send_bytes(bytes, fds).unwrap();
    }

    /// Sends bytes and descriptors in one piece, unless the connection is closed.
    pub fn try_send_bytes(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> std::io::Result<()> {
        let raw: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        let rights = [ControlMessage::ScmRights(&raw)];
        let control = if raw.is_empty() { &[][..] } else { &rights[..] };
        let iov = [IoSlice::new(bytes)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        let sent = sendmsg::<()>(self.stream.as_raw_fd(), &iov, control, flags, None)?;
        self.stream.write_all(&bytes[sent..])
    }

    /// Sends a request and returns its id.
    pub fn send(&mut self, command: u16, flags: u32, payload: &[u8], fds: &[&OwnedFd]) -> u16 {
        self.id = self.id.wrapping_add(1);
        let fds: Vec<BorrowedFd<'_>> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.send_bytes(&Self::message(self.id, command, flags, payload), &fds);
        self.id
    }

    /// Answers a request of the server.
    pub fn answer(&mut self, request: &Reply, payload: &[u8]) {
        self.send_bytes(&Self::message(request.id, request.command, 1, payload), &[]);
    }

    /// Refuses a request of the server.
    pub fn refuse(&mut self, request: &Reply, errno: i32) {
        let (id, command, errno) = (request.id, request.command, errno.unsigned_abs());
        self.send_bytes(&bytes![id, command, 16_u32, 0x21_u32, errno], &[]);
    }

    /// Receives a reply or a request of the server; `None` if the server has closed the connection.
    pub fn receive(&mut self) -> Option<Reply> {
        let mut header = [0; 16];
        let mut fds = Vec::new();
        let mut control = nix::cmsg_space!([RawFd; 64]);
        let mut iov = [IoSliceMut::new(&mut header)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let got = match recvmsg::<()>(self.stream.as_raw_fd(), &mut iov, Some(&mut control), flags)
        {
            Ok(message) => {
                for item in message.cmsgs().unwrap() {
                    if let ControlMessageOwned::ScmRights(raw) = item {
                        // SAFETY: the kernel has just created these descriptors.
                        fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                }
                message.bytes
            }
            Err(nix::errno::Errno::ECONNRESET | nix::errno::Errno::EPIPE) => 0,
            Err(error) => panic!("no reply: {error}"),
        };
        if got == 0 {
            return None;
        }
        assert_eq!(got, 16, "QEMU requires headers in one piece");
        let u16_at = |at: usize| u16::from_ne_bytes(header[at..at + 2].try_into().unwrap());
        let u32_at = |at: usize| u32::from_ne_bytes(header[at..at + 4].try_into().unwrap());
        let mut payload = vec![0; u32_at(4) as usize - 16];
        self.stream.read_exact(&mut payload).unwrap();
        let (id, command) = (u16_at(0), u16_at(2));
        Some(Reply { id, command, flags: u32_at(8), error: u32_at(12), payload, fds })
    }

    /// Sends a request and receives its reply.
    pub fn request(&mut self, command: u16, payload: &[u8], fds: &[&OwnedFd]) -> Reply {
        let id = self.send(command, 0, payload, fds);
        loop {
            let reply = self.receive().unwrap_or_else(|| panic!("closed by command {command}"));
            if reply.flags.trailing_zeros() >= 4 {
                self.requests.push_back(reply);
                continue;
            }
            assert_eq!((reply.id, reply.command), (id, command), "the reply is to another request");
            assert_eq!(reply.flags & 0xf, 1, "it is not a reply");
            return reply;
        }
    }

    /// Sends a request that must succeed.
    #[track_caller]
    pub fn ok(&mut self, command: u16, payload: &[u8]) -> Reply {
        self.ok_with(command, payload, &[])
    }

    /// Sends a request with descriptors that must succeed.
    #[track_caller]
    pub fn ok_with(&mut self, command: u16, payload: &[u8], fds: &[&OwnedFd]) -> Reply {
        let reply = self.request(command, payload, fds);
        assert_eq!((reply.flags, reply.error), (1, 0), "command {command} {payload:?} fails");
        reply
    }

    /// Sends a request that must fail with an errno and without a payload.
    #[track_caller]
    pub fn fails(&mut self, command: u16, payload: &[u8], errno: i32) {
        self.fails_with(command, payload, &[], errno);
    }

    /// Sends a request with descriptors that must fail with an errno.
    #[track_caller]
    pub fn fails_with(&mut self, command: u16, payload: &[u8], fds: &[&OwnedFd], errno: i32) {
        let reply = self.request(command, payload, fds);
        let what = format!("command {command} {:02x?}", &payload[..payload.len().min(64)]);
        assert_eq!((reply.flags, reply.error), (0x21, errno.unsigned_abs()), "{what}");
        assert!(reply.payload.is_empty() && reply.fds.is_empty(), "{what}");
    }

    /// Checks that the server closes the connection, possibly after further messages.
    #[track_caller]
    pub fn is_closed(&mut self) {
        let mut rest = Vec::new();
        match self.stream.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
            Err(error) => panic!("still open: {error}"),
        }
    }

    /// Requests a region's description.
    pub fn region(&mut self, index: u32) -> Reply {
        self.ok(GET_REGION_INFO, &bytes![4096_u32, 0_u32, index, 0_u32, 0_u64, 0_u64])
    }

    /// Requests the number of interrupts of an index.
    pub fn irqs(&mut self, index: u32) -> u32 {
        self.ok(GET_IRQ_INFO, &bytes![16_u32, 0_u32, index, 0_u32]).u32_at(12)
    }

    /// Reads from a region.
    pub fn read(&mut self, region: u32, offset: u64, count: u32) -> Vec<u8> {
        let reply = self.ok(REGION_READ, &bytes![offset, region, count]);
        assert_eq!((reply.u64_at(0), reply.u32_at(8), reply.u32_at(12)), (offset, region, count));
        assert_eq!(reply.payload.len(), 16 + count as usize);
        reply.payload[16..].to_vec()
    }

    /// Writes to a region.
    pub fn write(&mut self, region: u32, offset: u64, data: &[u8]) {
        let place = bytes![offset, region, data.len() as u32];
        let reply = self.ok(REGION_WRITE, &[&place, data].concat());
        assert_eq!(reply.payload, place);
    }
}
