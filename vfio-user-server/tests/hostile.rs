//! Random sequences of good, bad and broken messages never end a session that can still be understood, never hand a
//! device what it was promised not to get, and leave nothing behind.

// Clippy knows only the functions marked as tests, not those that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;

use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use proptest::prelude::*;
use vfio_user_server::session::{Closed, Session};
use vfio_user_server::testing::Suspicious;

/// One message to send.
#[derive(Clone, Debug)]
struct Sent {
    command: u16,
    flags: u32,
    payload: Vec<u8>,
    fds: usize,
    eventfds: bool,
    /// Where it is cut in two.
    cut: usize,
}

/// Numbers that are likely to matter.
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

/// Mostly one of these, now and then another number.
fn mostly(values: &'static [u64]) -> impl Strategy<Value = u64> {
    prop_oneof![9 => prop::sample::select(values), 1 => number()]
}

/// Payloads in the shape of their command, with numbers that mostly fit.
fn shaped() -> impl Strategy<Value = (u16, Vec<u8>)> {
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

fn sent() -> impl Strategy<Value = Sent> {
    let flags = prop_oneof![12 => Just(0_u32), 1 => Just(0x10), 1 => any::<u32>()];
    let fds = prop_oneof![6 => Just(0_usize), 3 => Just(1), 1 => 0_usize..20];
    (shaped(), flags, fds, any::<bool>(), any::<prop::sample::Index>()).prop_map(
        |((command, payload), flags, fds, eventfds, cut)| {
            let cut = cut.index(payload.len() + 16);
            Sent { command, flags, payload, fds, eventfds, cut }
        },
    )
}

struct Pair {
    client: UnixStream,
    session: Session,
    device: Suspicious,
    replies: Vec<u8>,
}

impl Pair {
    fn new() -> Self {
        let (client, server) = UnixStream::pair().unwrap();
        client.set_nonblocking(true).unwrap();
        let session = Session::new(server.into()).unwrap();
        let device = Suspicious::new(3, false);
        Self { client, session, device, replies: Vec::new() }
    }

    /// Lets the server do its work, and takes what it says.
    fn turn(&mut self) -> Result<(), Closed> {
        loop {
            let interest = self.session.on_ready(&mut self.device)?;
            let before = self.replies.len();
            match self.client.read_to_end(&mut self.replies) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                other => panic!("the server has closed: {other:?}"),
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
            self.turn()?;
            rest = &rest[self.client.write(rest).unwrap_or(0)..];
        }
        Ok(())
    }
}

fn message(id: u16, sent: &Sent) -> Vec<u8> {
    let size = 16 + sent.payload.len() as u32;
    let mut bytes = [id.to_ne_bytes(), sent.command.to_ne_bytes()].concat();
    bytes.extend([size, sent.flags, 0].map(u32::to_ne_bytes).concat());
    bytes.extend(&sent.payload);
    bytes
}

/// The ids and errors of the replies, which must be well formed.
fn ids(mut replies: &[u8]) -> Vec<u16> {
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

fn run(messages: &[Sent], at_once: bool, file: RawFd, event: RawFd) -> Result<(), TestCaseError> {
    let mut pair = Pair::new();
    let hello = Sent { command: 1, flags: 0, payload: vec![0; 4], fds: 0, eventfds: false, cut: 0 };
    pair.send(&message(0, &hello), &[]).unwrap();
    let mut expected = vec![0];
    for (id, sent) in (1..).zip(messages) {
        let bytes = message(id, sent);
        let fds = vec![if sent.eventfds { event } else { file }; sent.fds];
        let (head, tail) = bytes.split_at(if at_once { bytes.len() } else { sent.cut });
        if !head.is_empty() {
            pair.send(head, &fds).unwrap();
        }
        if !at_once {
            pair.turn().unwrap();
        }
        if !tail.is_empty() {
            pair.send(tail, if head.is_empty() { &fds } else { &[] }).unwrap();
        }
        if !at_once {
            pair.turn().unwrap();
        }
        let is_reply = sent.flags & 0xf == 1;
        if !is_reply && sent.flags & 0x10 == 0 {
            expected.push(id);
        }
    }
    pair.turn().unwrap();
    prop_assert_eq!(ids(&pair.replies), expected, "a reply to each, in order");
    // It still works.
    pair.replies.clear();
    let info = Sent { command: 4, payload: narrow(&[16, 0, 0, 0]), ..hello };
    pair.send(&message(77, &info), &[]).unwrap();
    pair.turn().unwrap();
    prop_assert_eq!(pair.replies.len(), 32);
    drop(pair.client);
    let end = pair.session.on_ready(&mut pair.device);
    prop_assert!(matches!(end, Err(Closed::ByPeer)));
    prop_assert_eq!(pair.device.detached, 1);
    Ok(())
}

/// Bytes without any order: the connection may end, and nothing else may.
fn run_garbage(pieces: &[Vec<u8>], file: RawFd) {
    let mut pair = Pair::new();
    for (n, piece) in pieces.iter().enumerate() {
        let fds = [file];
        let result = pair.send(piece, if n % 3 == 0 { &fds } else { &[] });
        if result.and_then(|()| pair.turn()).is_err() {
            assert_eq!(pair.device.detached, 1);
            return;
        }
    }
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// One test, so that nothing else in this process opens descriptors.
#[test]
fn nothing_that_a_client_sends_matters_to_anyone_else() {
    let file = memfd_create(c"hostile", MFdFlags::MFD_CLOEXEC).unwrap();
    let event: OwnedFd = EventFd::new().unwrap().into();
    let (file, event) = (file.as_raw_fd(), event.as_raw_fd());
    let cases = std::env::var("PROPTEST_CASES").ok().and_then(|n| n.parse().ok()).unwrap_or(512);
    let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(cases) };
    let before = open_fds();
    proptest!(config.clone(), |(messages in prop::collection::vec(sent(), 0..60), at_once: bool)| {
        run(&messages, at_once, file, event)?;
    });
    assert_eq!(open_fds(), before);
    proptest!(config, |(pieces in prop::collection::vec(
        prop::collection::vec(prop_oneof![2 => Just(0_u8), 1 => any::<u8>()], 1..100), 0..30,
    ))| {
        run_garbage(&pieces, file);
    });
    assert_eq!(open_fds(), before);
}
