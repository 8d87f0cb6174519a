//! Sessions survive random sequences of valid, invalid and malformed messages.
//!
//! A session ends only if a header makes the stream undecodable, passes only checked arguments to
//! its device, and leaks no descriptors.

// Clippy knows only the functions marked as tests, not those that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use proptest::prelude::*;
use vfio_user_server::session::{Closed, Session};
use vfio_user_server::testing::CheckingDevice;

/// Message of the client.
#[derive(Clone, Debug)]
struct TestMessage {
    command: u16,
    flags: u32,
    payload: Vec<u8>,
    fds: usize,
    eventfds: bool,
    /// Offset at which the message is split into two writes.
    cut: usize,
}

/// Returns numbers at the limits of sizes, offsets and flags.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0_u64..9,
        4 => prop::sample::select(vec![16_u64, 20, 24, 32, 0x21, 0x22, 0x24, 0x14, 0x09, 256, 4096]),
        4 => (0_u64..8).prop_map(|page| page * 4096),
        1 => prop::sample::select(vec![u64::MAX, 1 << 63, u64::from(u32::MAX), 1 << 20, (1 << 20) + 1]),
        1 => any::<u64>(),
    ]
}

fn narrow(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|&value| (value as u32).to_ne_bytes()).collect()
}

fn wide(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}

/// Returns mostly one of the values, sometimes another number.
fn mostly(values: &'static [u64]) -> impl Strategy<Value = u64> {
    prop_oneof![9 => prop::sample::select(values), 1 => number()]
}

/// Returns payloads with the structure of their command and mostly valid fields.
fn structured_payload() -> impl Strategy<Value = (u16, Vec<u8>)> {
    const REGIONS: &[u64] = &[0, 7];
    const COUNTS: &[u64] = &[0, 1, 2, 4, 8, 64];
    const PAGES: &[u64] = &[0, 0x1000, 0x2000, 0x3000, 0x8000];
    const IRQ_FLAGS: &[u64] = &[0x21, 0x22, 0x24, 0x14, 0x09, 0x11, 0x0a, 0x12];
    const ARGSZ: &[u64] = &[16, 32, 64];
    let data = || prop::collection::vec(any::<u8>(), 0..40);
    let sizes = || prop_oneof![9 => Just(0x1000_u64), 3 => Just(0x2000), 1 => number()];
    prop_oneof![
        1 => data().prop_map(|data| (1, [vec![0; 4], data].concat())),
        4 => (mostly(&[1, 3]), mostly(PAGES), mostly(PAGES), sizes()).prop_map(
            |(flags, offset, address, size)| {
                (2, [narrow(&[32, flags]), wide(&[offset, address, size])].concat())
            }
        ),
        4 => (mostly(&[0]), mostly(PAGES), sizes()).prop_map(|(flags, address, size)| {
            (3, [narrow(&[24, flags]), wide(&[address, size])].concat())
        }),
        1 => Just((3, [narrow(&[24, 2]), wide(&[0, 0])].concat())),
        1 => mostly(ARGSZ).prop_map(|argsz| (4, narrow(&[argsz, 0, 0, 0]))),
        1 => (mostly(ARGSZ), number()).prop_map(|(argsz, index)| {
            (5, narrow(&[argsz, 0, index, 0, 0, 0, 0, 0]))
        }),
        1 => (mostly(ARGSZ), number()).prop_map(|(argsz, index)| {
            (6, narrow(&[argsz, 0, index, 0]))
        }),
        1 => (mostly(ARGSZ), number()).prop_map(|(argsz, index)| {
            (7, narrow(&[argsz, 0, index, 0]))
        }),
        6 => (mostly(IRQ_FLAGS), mostly(&[0, 1]), mostly(&[0, 1, 6]), mostly(&[0, 1, 2]), data())
            .prop_map(|(flags, index, start, count, data)| {
                (8, [narrow(&[60, flags, index, start, count]), data].concat())
            }),
        4 => (mostly(COUNTS), mostly(REGIONS), mostly(COUNTS)).prop_map(
            |(offset, region, count)| (9, [wide(&[offset]), narrow(&[region, count])].concat())
        ),
        4 => (mostly(COUNTS), mostly(REGIONS), data()).prop_map(|(offset, region, data)| {
            (10, [wide(&[offset]), narrow(&[region, data.len() as u64]), data].concat())
        }),
        2 => (mostly(&[1]), mostly(COUNTS), mostly(REGIONS), mostly(COUNTS)).prop_map(
            |(count, offset, region, bytes)| {
                (15, [wide(&[count, offset]), narrow(&[region, bytes, 0, 0])].concat())
            }
        ),
        4 => (mostly(&[8, 16, 48]), mostly(&[1, 2, 4, 5, 6]), mostly(&[1, 2, 6, 7, 8]), number(), number())
            .prop_map(|(argsz, how, index, a, b)| {
                let flags = (how << 16) | index;
                (16, [narrow(&[argsz, flags]), wide(&[a, b])].concat())
            }),
        1 => (mostly(&[8, 64]), mostly(&[0, 8])).prop_map(|(argsz, size)| {
            (17, narrow(&[argsz, size]))
        }),
        1 => (mostly(&[8]), data()).prop_map(|(argsz, data)| {
            (18, [narrow(&[argsz, data.len() as u64]), data].concat())
        }),
        1 => Just((13, Vec::new())),
        1 => (any::<u16>(), data()),
    ]
}

fn test_message() -> impl Strategy<Value = TestMessage> {
    let flags = prop_oneof![12 => Just(0_u32), 1 => Just(0x10), 1 => any::<u32>()];
    let fds = prop_oneof![6 => Just(0_usize), 3 => Just(1), 1 => 0_usize..20];
    (structured_payload(), flags, fds, any::<bool>(), any::<prop::sample::Index>()).prop_map(
        |((command, payload), flags, fds, eventfds, cut)| {
            let cut = cut.index(payload.len() + 16);
            TestMessage { command, flags, payload, fds, eventfds, cut }
        },
    )
}

/// A client and the session that serves it.
struct Connection {
    client: UnixStream,
    session: Session,
    device: CheckingDevice,
    replies: Vec<u8>,
}

impl Connection {
    fn new() -> Self {
        let (client, server) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let session = Session::new(server.into()).unwrap();
        let device = CheckingDevice::new(3, false);
        Self { client, session, device, replies: Vec::new() }
    }

    /// Handles the waiting messages and collects the replies.
    fn process(&mut self) -> Result<(), Closed> {
        loop {
            let interest = self.session.on_ready(&mut self.device)?;
            let before = self.replies.len();
            match self.client.read_to_end(&mut self.replies) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => panic!("the server closed the connection: {other:?}"),
            }
            if !interest.writable && before == self.replies.len() {
                return Ok(());
            }
        }
    }

    fn send(&mut self, bytes: &[u8], fds: &[RawFd]) -> Result<(), Closed> {
        let rights = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let iov = [IoSlice::new(bytes)];
        let flags = MsgFlags::MSG_NOSIGNAL;
        let sent = sendmsg::<()>(self.client.as_raw_fd(), &iov, control, flags, None).unwrap();
        let mut rest = &bytes[sent..];
        while !rest.is_empty() {
            self.process()?;
            rest = &rest[self.client.write(rest).unwrap_or(0)..];
        }
        Ok(())
    }
}

fn encode(id: u16, message: &TestMessage) -> Vec<u8> {
    let size = 16 + message.payload.len() as u32;
    let mut bytes = [id.to_ne_bytes(), message.command.to_ne_bytes()].concat();
    bytes.extend([size, message.flags, 0].map(u32::to_ne_bytes).concat());
    bytes.extend(&message.payload);
    bytes
}

/// Returns the ids of the replies. Replies must be well-formed.
fn reply_ids(mut replies: &[u8]) -> Vec<u16> {
    let mut ids = Vec::new();
    while !replies.is_empty() {
        let word = |at: usize| u32::from_ne_bytes(replies[at..at + 4].try_into().unwrap());
        let (size, flags, error) = (word(4) as usize, word(8), word(12));
        assert!(flags == 1 || (flags == 0x21 && error != 0 && size == 16), "{flags:#x} {error}");
        ids.push(u16::from_ne_bytes(replies[..2].try_into().unwrap()));
        replies = &replies[size..];
    }
    ids
}

/// Sends the messages, in two parts each unless `at_once`, and checks the replies.
fn run(
    messages: &[TestMessage],
    at_once: bool,
    file: RawFd,
    event: RawFd,
) -> Result<(), TestCaseError> {
    let mut connection = Connection::new();
    let version =
        TestMessage { command: 1, flags: 0, payload: vec![0; 4], fds: 0, eventfds: false, cut: 0 };
    connection.send(&encode(0, &version), &[]).unwrap();
    let mut expected = vec![0];
    for (id, message) in (1..).zip(messages) {
        let bytes = encode(id, message);
        let fds = vec![if message.eventfds { event } else { file }; message.fds];
        let (head, tail) = bytes.split_at(if at_once { bytes.len() } else { message.cut });
        if !head.is_empty() {
            connection.send(head, &fds).unwrap();
        }
        if !at_once {
            connection.process().unwrap();
        }
        if !tail.is_empty() {
            connection.send(tail, if head.is_empty() { &fds } else { &[] }).unwrap();
        }
        if !at_once {
            connection.process().unwrap();
        }
        let is_reply = message.flags & 0xf == 1;
        if !is_reply && message.flags & 0x10 == 0 {
            expected.push(id);
        }
    }
    connection.process().unwrap();
    prop_assert_eq!(reply_ids(&connection.replies), expected, "one reply per request, in order");
    // The session still works.
    connection.replies.clear();
    let info = TestMessage { command: 4, payload: narrow(&[16, 0, 0, 0]), ..version };
    connection.send(&encode(77, &info), &[]).unwrap();
    connection.process().unwrap();
    prop_assert_eq!(connection.replies.len(), 32);
    drop(connection.client);
    let end = connection.session.on_ready(&mut connection.device);
    prop_assert!(matches!(end, Err(Closed::ByPeer)));
    prop_assert_eq!(connection.device.detached, 1);
    Ok(())
}

/// Sends random bytes. The session may end, and must then have detached the device.
fn run_garbage(pieces: &[Vec<u8>], file: RawFd) {
    let mut connection = Connection::new();
    for (n, piece) in pieces.iter().enumerate() {
        let fds = [file];
        let result = connection.send(piece, if n % 3 == 0 { &fds } else { &[] });
        if result.and_then(|()| connection.process()).is_err() {
            assert_eq!(connection.device.detached, 1);
            return;
        }
    }
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Waits until the process has as many descriptors: threads close those of clients.
#[track_caller]
fn wait_for_open_fds(expected: usize) {
    let start = Instant::now();
    while open_fds() != expected {
        assert!(start.elapsed() < Duration::from_secs(10), "{} instead of {expected}", open_fds());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The only test of this process, because others would open descriptors meanwhile.
#[test]
fn sessions_survive_hostile_clients() {
    let file = memfd_create(c"hostile", MFdFlags::MFD_CLOEXEC).unwrap();
    let event: OwnedFd = EventFd::new().unwrap().into();
    let (file, event) = (file.as_raw_fd(), event.as_raw_fd());
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(512);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) };
    let before = open_fds();
    proptest!(config.clone(), |(messages in prop::collection::vec(test_message(), 0..60), at_once: bool)| {
        run(&messages, at_once, file, event)?;
    });
    wait_for_open_fds(before);
    proptest!(config, |(pieces in prop::collection::vec(
        prop::collection::vec(prop_oneof![2 => Just(0_u8), 1 => any::<u8>()], 1..100), 0..30,
    ))| {
        run_garbage(&pieces, file);
    });
    wait_for_open_fds(before);
}
