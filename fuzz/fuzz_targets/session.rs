//! Random sequences of messages, with descriptors and in pieces.
//!
//! A session ends only if a header makes the stream undecodable. Each request gets one well-formed
//! reply, and the device is detached once at the end.
#![no_main]

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use vfio_user_server::session::{Closed, Session};
use vfio_user_server::testing::CheckingDevice;

/// Returns the widths of the fields in a command's payload. Data follows them.
fn field_widths(command: u16) -> &'static [usize] {
    match command {
        1 => &[2, 2],
        2 => &[4, 4, 8, 8, 8],
        3 => &[4, 4, 8, 8],
        4 | 6 | 7 => &[4, 4, 4, 4],
        5 => &[4, 4, 4, 4, 8, 8],
        8 => &[4, 4, 4, 4, 4],
        9 | 10 => &[8, 4, 4],
        11 | 12 => &[8, 8],
        15 => &[8, 8, 4, 4, 8],
        16 => &[4, 4, 8, 4, 4, 8, 8],
        17 | 18 => &[4, 4],
        _ => &[],
    }
}

/// Returns a payload with the command's fields, followed by data if `has_data`.
fn random_payload(input: &mut Input<'_>, command: u16, has_data: bool) -> Vec<u8> {
    let mut payload = Vec::new();
    for width in field_widths(command) {
        let mut value = input.number();
        if command == 16 && payload.len() == 4 {
            // Methods and feature indices that mostly exist.
            value = (value & 7) << 16 | value >> 3 & 0xf;
        }
        payload.extend_from_slice(&value.to_le_bytes()[..*width]);
    }
    if has_data {
        let len = usize::from(input.byte());
        payload.extend_from_slice(input.bytes(len));
    }
    payload
}

/// A client and the session that serves it.
struct Connection {
    stream: UnixStream,
    session: Session,
    device: CheckingDevice,
    /// Received bytes that are not split into messages yet.
    replies: Vec<u8>,
    /// True if the device requests transfers.
    has_transfers: bool,
    /// Id and command of the server's requests without a reply.
    server_requests: Vec<[u8; 4]>,
    /// Number of requests without a reply of the server.
    unanswered: usize,
}

impl Connection {
    fn new(has_transfers: bool) -> Self {
        let (stream, server) = UnixStream::pair().expect("a pair of sockets");
        stream.set_nonblocking(true).expect("non-blocking");
        let session = Session::new(OwnedFd::from(server)).expect("a session");
        let device = CheckingDevice::new(5, has_transfers);
        Self {
            stream,
            session,
            device,
            replies: Vec::new(),
            has_transfers,
            server_requests: Vec::new(),
            unanswered: 0,
        }
    }

    /// Handles the waiting messages. Returns false once the session has ended.
    fn process(&mut self) -> bool {
        loop {
            let interest = self.session.on_ready(&mut self.device);
            self.read();
            match interest {
                Ok(interest) if interest.writable => {}
                Ok(_) => return true,
                Err(Closed::Framing { .. }) => {
                    self.unanswered = self.unanswered.wrapping_add(1);
                    return false;
                }
                Err(closed) => panic!("the session ended: {closed}"),
            }
        }
    }

    fn read(&mut self) {
        let mut piece = [0; 65536];
        loop {
            match self.stream.read(&mut piece) {
                Ok(0) => break,
                Ok(n) => self.replies.extend_from_slice(&piece[..n]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("cannot read: {error}"),
            }
        }
        let mut at = 0;
        while let Some(header) = self.replies.get(at..at + 16) {
            let size = u32::from_ne_bytes(header[4..8].try_into().expect("4 bytes")) as usize;
            assert!((16..=(1 << 20) + 32).contains(&size), "a reply of {size} bytes");
            let is_reply = header[8] & 0xf == 1;
            let request = [header[0], header[1], header[2], header[3]];
            if self.replies.len() - at < size {
                break;
            }
            at += size;
            if is_reply {
                self.unanswered = self.unanswered.wrapping_sub(1);
            } else {
                assert!(self.has_transfers && header[8..] == [0; 8], "not a request");
                self.server_requests.push(request);
            }
        }
        self.replies.drain(..at);
    }

    fn send(&mut self, bytes: &[u8], fds: &[RawFd]) {
        let rights = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let iov = [IoSlice::new(bytes)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        let sent = sendmsg::<()>(self.stream.as_raw_fd(), &iov, control, flags, None);
        assert_eq!(sent, Ok(bytes.len()), "a short message fits the socket");
    }
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let first = input.byte();
    let mut connection = Connection::new(first & 1 == 0);
    if first != 0xff {
        connection.send(&[&[1, 0, 1, 0, 20, 0, 0, 0], &[0; 12][..]].concat(), &[]);
        connection.unanswered = 1;
        assert!(connection.process());
        assert_eq!(connection.unanswered, 0, "VERSION has a reply");
    }
    let eventfd = EventFd::new().expect("an eventfd");
    let memory = memfd_create("memory", MFdFlags::MFD_CLOEXEC).expect("a memfd");
    for _ in 0..64 {
        if input.is_empty() {
            break;
        }
        let command = u16::from(input.byte() % 20);
        let options = input.byte();
        let payload = random_payload(&mut input, command, options & 0x80 != 0);
        let posted = options & 0x40 != 0;
        // A reply to a request of the server, valid or not.
        let reply_to =
            matches!(command, 11 | 12).then(|| connection.server_requests.pop()).flatten();
        let mut size = 16 + payload.len() as u32;
        if options & 0x3f == 0x3f {
            size = input.u32();
        }
        let reply = u32::from(reply_to.is_some());
        let flags = reply | u32::from(posted) << 4;
        let mut message = reply_to.map_or_else(
            || [0_u16.to_le_bytes(), command.to_le_bytes()].concat(),
            |request| request.to_vec(),
        );
        message.extend([size, flags, 0].iter().flat_map(|word| word.to_le_bytes()));
        message.extend(payload);
        let fd = if options & 0x20 != 0 { eventfd.as_raw_fd() } else { memory.as_raw_fd() };
        let fds = [fd; 20];
        // Sometimes more descriptors than a message may have.
        let count = match options & 0x0f {
            0x0f => 20,
            few => usize::from(few & 3),
        };
        let cut = if options & 0x10 != 0 { usize::from(input.byte()) } else { 0 };
        let (head, tail) = message.split_at(cut.min(message.len() - 1));
        connection.unanswered += usize::from(!posted && reply_to.is_none());
        let is_complete = size as usize == message.len();
        if !head.is_empty() {
            connection.send(head, &[]);
            if !connection.process() {
                break;
            }
        }
        connection.send(tail, &fds[..count]);
        if !connection.process() {
            break;
        }
        if !is_complete {
            // The next bytes decode as other messages, so replies cannot be counted.
            connection.unanswered = 0;
            let _ = connection.stream.write(input.bytes(4096));
            connection.process();
            break;
        }
        assert_eq!(connection.unanswered, 0, "each request has one reply: {command}");
    }
    let Connection { stream, mut session, mut device, .. } = connection;
    drop(stream);
    while session.on_ready(&mut device).is_ok() {}
    assert_eq!(device.detached, 1, "the device is detached once");
});
