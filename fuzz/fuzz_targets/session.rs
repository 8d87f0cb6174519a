//! No sequence of messages, with descriptors and in pieces, ends a session that can still be understood; each request
//! gets one reply that can be understood, and in the end everything is given back.
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
use vfio_user_server::testing::Suspicious;

/// How wide each field of a command's payload is; what follows is data.
fn layout(command: u16) -> &'static [usize] {
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

struct Peer {
    stream: UnixStream,
    session: Session,
    device: Suspicious,
    /// Bytes of replies that are not taken apart yet.
    replies: Vec<u8>,
    /// The device may ask.
    asks: bool,
    /// Requests of the server's: id and command.
    asked: Vec<[u8; 4]>,
    /// Replies that are still owed.
    owed: usize,
}

impl Peer {
    fn new(asks: bool) -> Self {
        let (stream, theirs) = UnixStream::pair().expect("a pair of sockets");
        stream.set_nonblocking(true).expect("non-blocking");
        let session = Session::new(OwnedFd::from(theirs)).expect("a session");
        let device = Suspicious::new(5, asks);
        Self { stream, session, device, replies: Vec::new(), asks, asked: Vec::new(), owed: 0 }
    }

    /// Lets the session work off what is there; false once it has ended.
    fn turn(&mut self) -> bool {
        loop {
            let interest = self.session.on_ready(&mut self.device);
            self.read();
            match interest {
                Ok(interest) if interest.writable => {}
                Ok(_) => return true,
                Err(Closed::Framing { .. }) => {
                    self.owed = self.owed.wrapping_add(1);
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
            let asked = [header[0], header[1], header[2], header[3]];
            if self.replies.len() - at < size {
                break;
            }
            at += size;
            if is_reply {
                self.owed = self.owed.wrapping_sub(1);
            } else {
                assert!(self.asks && header[8..] == [0; 8], "not a request");
                self.asked.push(asked);
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
    let mut peer = Peer::new(first & 1 == 0);
    if first != 0xff {
        peer.send(&[&[1, 0, 1, 0, 20, 0, 0, 0], &[0; 12][..]].concat(), &[]);
        peer.owed = 1;
        assert!(peer.turn());
        assert_eq!(peer.owed, 0, "VERSION is answered");
    }
    let eventfd = EventFd::new().expect("an eventfd");
    let memory = memfd_create("memory", MFdFlags::MFD_CLOEXEC).expect("a memfd");
    for _ in 0..64 {
        if input.is_empty() {
            break;
        }
        let command = u16::from(input.byte() % 20);
        let how = input.byte();
        let mut payload = Vec::new();
        for width in layout(command) {
            let mut value = input.number();
            if command == 16 && payload.len() == 4 {
                // A method and a feature, most of which exist.
                value = (value & 7) << 16 | value >> 3 & 0xf;
            }
            payload.extend_from_slice(&value.to_le_bytes()[..*width]);
        }
        if how & 0x80 != 0 {
            let len = usize::from(input.byte());
            payload.extend_from_slice(input.bytes(len));
        }
        let posted = how & 0x40 != 0;
        // An answer to what the server has asked, right or wrong.
        let asked = matches!(command, 11 | 12).then(|| peer.asked.pop()).flatten();
        let mut size = 16 + payload.len() as u32;
        if how & 0x3f == 0x3f {
            size = input.u32();
        }
        let kind = u32::from(asked.is_some());
        let flags = kind | u32::from(posted) << 4;
        let named = asked
            .map_or([0_u16.to_le_bytes(), command.to_le_bytes()].concat(), |asked| asked.to_vec());
        let mut message = named;
        message.extend([size, flags, 0].iter().flat_map(|word| word.to_le_bytes()));
        message.extend(payload);
        let kind = if how & 0x20 != 0 { eventfd.as_raw_fd() } else { memory.as_raw_fd() };
        let fds = [kind; 20];
        // Now and then more than a message may have.
        let count = match how & 0x0f {
            0x0f => 20,
            few => usize::from(few & 3),
        };
        let cut = if how & 0x10 != 0 { usize::from(input.byte()) } else { 0 };
        let (one, two) = message.split_at(cut.min(message.len() - 1));
        peer.owed += usize::from(!posted && asked.is_none());
        let whole = size as usize == message.len();
        if !one.is_empty() {
            peer.send(one, &[]);
            if !peer.turn() {
                break;
            }
        }
        peer.send(two, &fds[..count]);
        if !peer.turn() {
            break;
        }
        if !whole {
            // What follows is read as something else: only that nothing breaks still holds.
            peer.owed = 0;
            let _ = peer.stream.write(input.bytes(4096));
            peer.turn();
            break;
        }
        assert_eq!(peer.owed, 0, "each request has one reply: {command}");
    }
    let Peer { stream, mut session, mut device, .. } = peer;
    drop(stream);
    while session.on_ready(&mut device).is_ok() {}
    assert_eq!(device.detached, 1, "the device is detached once");
});
