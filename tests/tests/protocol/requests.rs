//! Server requests, migration, and dirty page logging.

use std::time::Duration;

use system_tests::bytes;
use system_tests::raw_client::*;

use crate::device::{SCRATCH, Server, TRANSFER, TRANSFER_DONE};
use crate::exclusive;

const AT: u64 = 0x10_0000;
const SIZE: u64 = 0x1_0000;

/// Starts a server, and a client with unshared memory.
fn start() -> (Server, RawClient) {
    let server = Server::start();
    let mut client = RawClient::attach(&server.path);
    client.ok(DMA_MAP, &bytes![32_u32, 3_u32, 0_u64, AT, SIZE]);
    client.ok(DMA_MAP, &bytes![32_u32, 1_u32, 0_u64, AT + SIZE, SIZE]);
    (server, client)
}

/// Makes the device transfer memory.
fn transfer(client: &mut RawClient, address: u64, count: u32, write: bool) {
    client.write(SCRATCH, TRANSFER, &bytes![address, count, u32::from(write)]);
}

/// Returns the number of transfers and the errno of the last one.
fn done(client: &mut RawClient) -> (u32, i32) {
    let status = client.read(SCRATCH, TRANSFER_DONE, 8);
    let [count, errno] =
        [0, 4].map(|at| u32::from_ne_bytes(status[at..at + 4].try_into().unwrap()));
    (count, errno.cast_signed())
}

/// Returns the next request of the server.
fn next(client: &mut RawClient) -> Reply {
    client.requests.pop_front().unwrap_or_else(|| client.receive().unwrap())
}

#[track_caller]
fn expect(client: &mut RawClient, command: u16, address: u64, count: u64) -> Reply {
    let request = next(client);
    assert_eq!((request.command, request.flags), (command, 0));
    assert_eq!((request.u64_at(0), request.u64_at(8)), (address, count));
    request
}

#[track_caller]
fn is_silent(client: &mut RawClient) {
    assert!(client.requests.is_empty());
    client.stream.set_nonblocking(true).unwrap();
    let read = std::io::Read::read(&mut client.stream, &mut [0]);
    assert!(read.is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock));
    client.stream.set_nonblocking(false).unwrap();
}

#[test]
fn a_device_accesses_unshared_memory_by_messages() {
    let _exclusive = exclusive();
    let (_server, mut client) = start();
    transfer(&mut client, AT + 8, 5, false);
    let read = expect(&mut client, DMA_READ, AT + 8, 5);
    assert_eq!(read.payload.len(), 16);
    assert_eq!(done(&mut client), (0, 0), "the client may answer late");
    client.answer(&read, &[&bytes![AT + 8, 5_u64], &b"hello"[..]].concat());
    assert_eq!(done(&mut client), (1, 0));
    assert_eq!(client.read(SCRATCH, TRANSFER_DONE + 8, 5), b"hello");
    client.answer(&read, &[&bytes![AT + 8, 5_u64], &b"again"[..]].concat());
    assert_eq!(
        client.read(SCRATCH, TRANSFER_DONE + 8, 5),
        b"hello",
        "the second answer is ignored"
    );
    transfer(&mut client, AT, 3, true);
    let write = expect(&mut client, DMA_WRITE, AT, 3);
    assert_eq!(write.payload[16..], [0xd0; 3]);
    client.answer(&write, &bytes![AT, 3_u64]);
    assert_eq!(done(&mut client), (2, 0));
    // QEMU answers this way until the guest enables bus mastering.
    transfer(&mut client, AT, 4, false);
    let read = expect(&mut client, DMA_READ, AT, 4);
    client.refuse(&read, libc::ENODEV);
    assert_eq!(done(&mut client), (3, libc::ENODEV));
}

#[test]
fn clients_that_misplace_data_get_no_writes() {
    let _exclusive = exclusive();
    let (_server, mut client) = start();
    transfer(&mut client, AT + 0x100, 3, true);
    let probe = expect(&mut client, DMA_READ, AT, 4);
    is_silent(&mut client);
    client.answer(&probe, &bytes![AT, 4_u32, 0x1234_5678_u32]);
    assert_eq!(done(&mut client), (1, libc::ENOTSUP));
    for write in [true, false] {
        transfer(&mut client, AT, 3, write);
    }
    assert_eq!(done(&mut client), (3, libc::ENOTSUP));
    is_silent(&mut client);
    // A correct client gets writes after one read.
    let (_server, mut client) = start();
    transfer(&mut client, AT + 0x100, 3, true);
    let probe = expect(&mut client, DMA_READ, AT, 4);
    client.answer(&probe, &bytes![AT, 4_u64, 0_u32]);
    expect(&mut client, DMA_WRITE, AT + 0x100, 3);
}

#[test]
fn requests_are_limited_in_number_and_to_mapped_memory() {
    let _exclusive = exclusive();
    let (_server, mut client) = start();
    let cases = [
        (AT - 1, 2_u32, false, libc::EFAULT),
        (AT + 2 * SIZE - 1, 2, false, libc::EFAULT),
        (AT + SIZE, 4, true, libc::EACCES),
        (AT + SIZE - 1, 2, true, libc::EACCES),
        (AT, 0, false, libc::EINVAL),
        (AT, (1 << 20) + 1, false, libc::EINVAL),
        (u64::MAX, 2, false, libc::EINVAL),
    ];
    for (n, (address, count, write, errno)) in (1..).zip(cases) {
        transfer(&mut client, address, count, write);
        assert_eq!(done(&mut client), (n, errno), "{address:#x}+{count:#x}");
    }
    transfer(&mut client, AT + SIZE - 1, 2, false);
    let across = expect(&mut client, DMA_READ, AT + SIZE - 1, 2);
    client.answer(&across, &bytes![AT + SIZE - 1, 2_u64, 0_u16]);
    for _ in 0..20 {
        transfer(&mut client, AT, 4, false);
    }
    let asked: Vec<Reply> = client.requests.drain(..).collect();
    assert_eq!(asked.len(), 16, "the other requests wait");
    // Unmapped memory is not read any more, whatever the client answers.
    client.ok(DMA_UNMAP, &bytes![24_u32, 2_u32, 0_u64, 0_u64]);
    assert_eq!(done(&mut client).1, libc::EFAULT);
    for request in &asked {
        client.answer(request, &bytes![AT, 4_u64, 7_u32]);
    }
    assert_eq!(done(&mut client), (7 + 1 + 20, libc::EFAULT));
}

#[test]
fn a_twin_socket_carries_server_requests() {
    const CAPS: &[u8] = b"{\"capabilities\": {\"max_msg_fds\": 8,            \
        \"twin_socket\": {\"supported\": true}}}\0";
    let _exclusive = exclusive();
    let server = Server::start();
    let mut client = RawClient::connect(&server.path);
    let mut hello = client.ok(VERSION, &[&bytes![0_u16, 0_u16], CAPS].concat());
    let mut twin = RawClient::over(hello.fds.remove(0).into());
    client.ok(DMA_MAP, &bytes![32_u32, 3_u32, 0_u64, AT, SIZE]);
    transfer(&mut client, AT, 4, false);
    let read = expect(&mut twin, DMA_READ, AT, 4);
    // The answer arrives without a message on the first socket.
    twin.answer(&read, &bytes![AT, 4_u64, 7_u32]);
    transfer(&mut client, AT, 4, true);
    let write = expect(&mut twin, DMA_WRITE, AT, 4);
    twin.answer(&write, &bytes![AT, 4_u64]);
    crate::eventually("both transfers are done", || done(&mut client) == (2, 0));
    transfer(&mut client, AT, 4, false);
    expect(&mut twin, DMA_READ, AT, 4);
    drop(twin);
    crate::eventually("the request fails without an answer", || {
        done(&mut client) == (3, libc::EIO)
    });
    transfer(&mut client, AT, 4, false);
    assert_eq!(done(&mut client), (4, libc::EIO), "without a twin socket there are no requests");
    client.stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
    is_silent(&mut client);
}

fn set_state(client: &mut RawClient, state: u32) -> u32 {
    client.request(FEATURE, &bytes![16_u32, 0x2_0002_u32, state, 0_u32], &[]).error
}

#[test]
fn a_migration_state_is_saved_and_restored() {
    let _exclusive = exclusive();
    let server = Server::start();
    let mut client = RawClient::attach(&server.path);
    client.write(SCRATCH, 0x40, b"remember");
    let flags = client.ok(FEATURE, &bytes![16_u32, 0x1_0001_u32]);
    assert_eq!((flags.u32_at(0), flags.u64_at(8)), (16, 5), "stop-copy and pre-copy");
    assert_eq!(set_state(&mut client, 3), 0);
    let mut state = Vec::new();
    loop {
        let reply = client.ok(MIG_DATA_READ, &bytes![1008_u32, 1000_u32]);
        assert_eq!(reply.u32_at(0), 8 + reply.u32_at(4));
        assert_eq!(reply.payload.len(), reply.u32_at(0) as usize);
        state.extend_from_slice(&reply.payload[8..]);
        if reply.u32_at(4) < 1000 {
            break;
        }
    }
    assert_eq!(set_state(&mut client, 6), 22, "no way back to pre-copy");
    assert_eq!(set_state(&mut client, 2), 0);
    client.write(SCRATCH, 0x40, b"forgotten");
    assert_eq!(set_state(&mut client, 4), 0);
    for piece in state.chunks(777) {
        let head = bytes![8_u32, piece.len() as u32];
        assert!(client.ok(MIG_DATA_WRITE, &[&head, piece].concat()).payload.is_empty());
    }
    assert_eq!(set_state(&mut client, 2), 0);
    assert_eq!(client.read(SCRATCH, 0x40, 8), b"remember");
    let steps: Vec<String> =
        server.log.take().into_iter().filter(|line| line.contains(" to ")).collect();
    let expected = [
        "Running to Stop",
        "Stop to StopCopy",
        "StopCopy to Stop",
        "Stop to Running",
        "Running to Stop",
        "Stop to Resuming",
        "Resuming to Stop",
        "Stop to Running",
    ];
    assert_eq!(steps, expected);
    // An incomplete state is invalid; only a reset helps.
    assert_eq!(set_state(&mut client, 4), 0);
    client.ok(MIG_DATA_WRITE, &bytes![8_u32, 4_u32, 0_u32]);
    assert_eq!(set_state(&mut client, 2), 22);
    assert_eq!(client.ok(FEATURE, &bytes![16_u32, 0x1_0002_u32]).u32_at(8), 0, "error");
    assert_eq!(set_state(&mut client, 2), 22);
    client.ok(RESET, &[]);
    assert_eq!(set_state(&mut client, 1), 0);
}

#[test]
fn dirty_pages_are_reported_once() {
    let _exclusive = exclusive();
    let (server, mut client) = start();
    let control = bytes![64_u32, 0x2_0006_u32, 2048_u64, 1_u32, 0_u32, AT, SIZE];
    let reply = client.ok(FEATURE, &control);
    assert_eq!((reply.u64_at(8), &reply.payload[16..]), (4096, &control[16..]), "its page size");
    let write = |client: &mut RawClient, address: u64, count: u32| {
        transfer(client, address, count, true);
        loop {
            let request = next(client);
            let zero = if request.command == DMA_READ { vec![0; 4] } else { Vec::new() };
            client.answer(&request, &[&request.payload[..16], &zero].concat());
            if request.command == DMA_WRITE {
                return;
            }
        }
    };
    write(&mut client, AT + 0x1000, 4);
    write(&mut client, AT + 0x2fff, 2);
    let report = bytes![48_u32, 0x1_0008_u32, AT, SIZE, 4096_u64];
    client.ok(FEATURE, &[bytes![8_u32], report[4..].to_vec()].concat());
    assert_eq!(client.ok(FEATURE, &report).u64_at(32), 0b1110);
    assert_eq!(client.ok(FEATURE, &report).u64_at(32), 0);
    write(&mut client, AT + 0xf000, 1);
    let unmap = bytes![48_u32, 1_u32, AT, SIZE, 4096_u64, 8_u64];
    assert_eq!(client.ok(DMA_UNMAP, &unmap).u64_at(40), 1 << 15);
    drop(client);
    crate::eventually("the client leaves", || server.served() == 1);
    assert!(server.log.take().contains(&"stop logging".to_owned()));
}
