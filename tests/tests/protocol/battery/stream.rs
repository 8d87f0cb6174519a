//! The message stream: posted, fragmented, pipelined, invalid and truncated messages.

use std::os::fd::AsFd;
use std::path::Path;

use libc::{EINVAL, EMSGSIZE};
use system_tests::bytes;
use system_tests::raw_client::*;

use super::{CONFIG, FREE, MSI};
use crate::device::{eventfd, memory};

pub fn posted(path: &Path) {
    let mut client = RawClient::attach(path);
    let command = client.read(CONFIG, 4, 2);
    let write = [bytes![4_u64, CONFIG, 2_u32], command].concat();
    for _ in 0..50 {
        client.send(REGION_WRITE, NO_REPLY, &write, &[]);
        client.send(REGION_WRITE, NO_REPLY, &write[..17], &[]);
        client.send(REGION_READ, NO_REPLY, &bytes![0_u64, CONFIG, 4_u32], &[]);
        client.send(9999, NO_REPLY, &[], &[]);
        client.send(GET_INFO, NO_REPLY, &[], &[]);
    }
    client.read(CONFIG, 0, 4);
}

pub fn replies(path: &Path) {
    let mut client = RawClient::attach(path);
    for flags in [0x1_u32, 0x21, 0x31] {
        client.send(REGION_READ, flags, &[0; 32], &[]);
        client.send(0xffff, flags, &[], &[]);
    }
    client.read(CONFIG, 0, 4);
    for kind in [2_u32, 3, 7, 15] {
        let id = client.send(RESET, kind, &[], &[]);
        let reply = client.receive().unwrap();
        assert_eq!((reply.id, reply.flags, reply.error), (id, 0x21, EINVAL.unsigned_abs()));
    }
    // An error flag in a request has no meaning.
    client.send(GET_INFO, 0x20, &bytes![16_u32, 0_u32, 0_u32, 0_u32], &[]);
    assert_eq!(client.receive().unwrap().flags, 1);
}

pub fn dribble(path: &Path) {
    let mut client = RawClient::connect(path);
    let hello = [&bytes![0_u16, 0_u16], QEMU_CAPS].concat();
    let map = bytes![32_u32, 3_u32, 0_u64, FREE, 0x1000_u64];
    let fd = memory(0x1000);
    let messages = [
        RawClient::message(1, VERSION, 0, &hello),
        RawClient::message(2, REGION_READ, 0, &bytes![0_u64, CONFIG, 64_u32]),
        RawClient::message(3, DMA_MAP, 0, &map),
        RawClient::message(4, DMA_UNMAP, 0, &bytes![24_u32, 2_u32, 0_u64, 0_u64]),
    ];
    for (id, message) in (1..).zip(&messages) {
        for (at, byte) in message.iter().enumerate() {
            // The descriptor arrives in the middle of its message.
            let fds = [fd.as_fd()];
            client.send_bytes(&[*byte], if id == 3 && at == 20 { &fds } else { &[] });
        }
        let reply = client.receive().unwrap();
        assert_eq!((reply.id, reply.flags), (id, 1));
    }
    // Every split into two pieces.
    let read = RawClient::message(5, REGION_READ, 0, &bytes![0_u64, CONFIG, 4_u32]);
    for at in 1..read.len() {
        client.send_bytes(&read[..at], &[]);
        std::thread::yield_now();
        client.send_bytes(&read[at..], &[]);
        assert_eq!(client.receive().unwrap().flags, 1);
    }
}

pub fn pipeline(path: &Path) {
    let mut client = RawClient::attach(path);
    let whole = client.read(CONFIG, 0, 256);
    let fd = memory(0x1000);
    let mut batch = Vec::new();
    for id in 0..500_u16 {
        let place = bytes![u64::from(id) % 64, CONFIG, 4_u32];
        batch.extend(RawClient::message(id, REGION_READ, 0, &place));
    }
    client.send_bytes(&batch, &[]);
    for id in 0..500_u16 {
        let reply = client.receive().unwrap();
        assert_eq!((reply.id, reply.flags), (id, 1), "replies keep the order");
        let at = usize::from(id) % 64;
        // The device may change the status register at offset 6.
        assert!(at == 4 || (at < 8 && at > 0) || reply.payload[16..] == whole[at..at + 4]);
    }
    // Maps as QEMU sends them: several before it reads a reply, some with descriptors.
    for n in 0..40_u64 {
        let map = bytes![32_u32, 3_u32, 0_u64, FREE + n * 0x1000, 0x1000_u64];
        let fds = [&fd];
        client.send(DMA_MAP, 0, &map, if n % 3 == 0 { &[] } else { &fds });
    }
    client.send(DMA_UNMAP, 0, &bytes![24_u32, 2_u32, 0_u64, 0_u64], &[]);
    for _ in 0..=40 {
        assert_eq!(client.receive().unwrap().flags, 1);
    }
}

pub fn framing(path: &Path) {
    for (size, errno) in
        [(0_u32, EINVAL), (1, EINVAL), (15, EINVAL), (1 << 21, EMSGSIZE), (u32::MAX, EMSGSIZE)]
    {
        for attached in [false, true] {
            let mut client =
                if attached { RawClient::attach(path) } else { RawClient::connect(path) };
            client.send_bytes(&bytes![1_u16, GET_INFO, size, 0_u32, 0_u32, [0_u32; 8][0]], &[]);
            let reply = client.receive().unwrap();
            assert_eq!((reply.flags, reply.error), (0x21, errno.unsigned_abs()));
            client.is_closed();
        }
    }
    // Bytes without meaning.
    for seed in 0..50_u64 {
        let mut client = RawClient::connect(path);
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
        let garbage: Vec<u8> = (0..4096)
            .map(|_| {
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                state as u8
            })
            .collect();
        client.send_bytes(&garbage, &[]);
    }
    RawClient::attach(path).read(CONFIG, 0, 4);
}

pub fn descriptors(path: &Path) {
    let mut client = RawClient::attach(path);
    let fd = memory(0x1000);
    let info = bytes![16_u32, 0_u32, 0_u32, 0_u32];
    // Descriptors of a message that takes none are closed.
    for count in [1_usize, 2, 16] {
        client.ok_with(GET_INFO, &info, &vec![&fd; count]);
    }
    let map = bytes![32_u32, 3_u32, 0_u64, FREE, 0x1000_u64];
    for count in [2_usize, 16, 17, 100, 253] {
        client.fails_with(DMA_MAP, &map, &vec![&fd; count], EINVAL);
    }
    client.fails_with(GET_INFO, &info, &[&fd; 17], EINVAL);
    client.ok_with(DMA_MAP, &map, &[&fd]);
    client.ok(DMA_UNMAP, &bytes![24_u32, 2_u32, 0_u64, 0_u64]);
    // A descriptor with every byte of one message.
    let message = RawClient::message(1, DMA_MAP, 0, &map);
    for byte in &message {
        client.send_bytes(&[*byte], &[fd.as_fd()]);
    }
    assert_eq!(client.receive().unwrap().error, EINVAL.unsigned_abs());
    client.read(CONFIG, 0, 4);
}

pub fn leave(path: &Path) {
    let map = RawClient::message(1, DMA_MAP, 0, &bytes![32_u32, 3_u32, 0_u64, FREE, 0x1000_u64]);
    let fd = memory(0x1000);
    for at in 0..map.len() {
        let mut client = RawClient::attach(path);
        client.ok_with(SET_IRQS, &bytes![20_u32, 0x24_u32, MSI, 0_u32, 1_u32], &[&eventfd()]);
        if at > 0 {
            client.send_bytes(&map[..at], &[fd.as_fd()]);
        }
    }
    // With requests sent and no reply read.
    for _ in 0..20 {
        let mut client = RawClient::attach(path);
        for _ in 0..20 {
            client.send(REGION_READ, 0, &bytes![0_u64, CONFIG, 256_u32], &[]);
        }
    }
    RawClient::attach(path).read(CONFIG, 0, 4);
}

pub fn flood(path: &Path) {
    let mut client = RawClient::attach(path);
    client.stream.set_nonblocking(true).unwrap();
    let request = RawClient::message(7, REGION_READ, 0, &bytes![0_u64, CONFIG, 256_u32]);
    let mut sent = 0;
    let mut stalled = 0;
    let mut rest = &request[..];
    // Until the server has accepted nothing for a while.
    while stalled < 50 && sent < 1_000_000 {
        match std::io::Write::write(&mut client.stream, rest) {
            Ok(n) if n == rest.len() => (rest, sent, stalled) = (&request[..], sent + 1, 0),
            Ok(n) => rest = &rest[n..],
            Err(error) => {
                // The server's limit on pending requests.
                assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
                stalled += 1;
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        }
    }
    assert!(sent < 1_000_000, "the server accepts unlimited requests and queues their replies");
    client.stream.set_nonblocking(false).unwrap();
    for _ in 0..sent {
        assert_eq!(client.receive().unwrap().payload.len(), 272);
    }
    if rest.len() < request.len() {
        client.send_bytes(rest, &[]);
        client.receive().unwrap();
    }
    client.read(CONFIG, 0, 4);
}
