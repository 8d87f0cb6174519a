//! Sessions against a device of this process.
//!
//! The tests run the [`battery`], check what reaches the device, and connect a foreign client (the
//! `vfio_user` crate's).

use std::os::fd::{AsRawFd, OwnedFd};
use std::time::{Duration, Instant};

use system_tests::bytes;
use system_tests::raw_client::*;

use crate::device::{
    self, FEATURE_INDEX, MSI_COUNT, READ_ONLY, SCRATCH, SHARED, SPARSE, SPARSE_OFFSET, Server,
};
use crate::{battery, eventually, exclusive};

#[test]
fn every_check_of_the_battery_holds_and_nothing_leaks() {
    let _exclusive = exclusive();
    let server = Server::start();
    drop(RawClient::attach(&server.path));
    eventually("the client leaves", || server.served() == 1);
    // A thread may not have closed the first client's socket yet.
    let mut before = device::open_fds("self");
    for (name, check) in battery::ALL {
        let start = Instant::now();
        check(&server.path);
        eventually(name, || device::open_fds("self") <= before);
        before = before.min(device::open_fds("self"));
        eprintln!("{name}: {:?}", start.elapsed());
    }
}

#[test]
fn regions_are_read_written_and_mapped() {
    let _exclusive = exclusive();
    let server = Server::start();
    let mut client = RawClient::attach(&server.path);
    for count in [1_usize, 2, 3, 4, 8, 100, 4096] {
        let data: Vec<u8> = (0..count).map(|n| (n * 7 + count) as u8).collect();
        client.write(SCRATCH, 0, &data);
        assert_eq!(client.read(SCRATCH, 0, count as u32), data);
    }
    client.fails(REGION_WRITE, &bytes![0_u64, READ_ONLY, 4_u32, 0_u32], libc::EACCES);
    client.fails(REGION_READ, &bytes![0x3ffc_u64, SPARSE, 4_u32], libc::EIO);
    let empty = client.region(1);
    assert_eq!((empty.u64_at(16), empty.u32_at(4)), (0, 0), "an absent BAR");
    client.fails(REGION_READ, &bytes![0_u64, 1_u32, 4_u32], libc::EINVAL);
    let whole = client.region(SHARED);
    assert_eq!((whole.u64_at(16), whole.u64_at(24), whole.u32_at(4)), (0x1_0000, 0, 7));
    let sparse = client.region(SPARSE);
    assert_eq!((sparse.u32_at(0), sparse.u32_at(4), sparse.u64_at(24)), (80, 15, SPARSE_OFFSET));
    assert_eq!((sparse.u64_at(64), sparse.u64_at(72)), (0x3000, 0x1000), "the second area");
    assert_eq!(nix::sys::stat::fstat(&sparse.fds[0]).unwrap().st_size, 0x4_0000);
}

#[test]
fn the_device_receives_what_the_client_sends() {
    let _exclusive = exclusive();
    let server = Server::start();
    let mut client = RawClient::attach(&server.path);
    let fd = device::memory(0x2000);
    client.ok_with(DMA_MAP, &bytes![32_u32, 3_u32, 0_u64, 0x1000_u64, 0x2000_u64], &[&fd]);
    client.ok(DMA_MAP, &bytes![32_u32, 1_u32, 0_u64, 0x8000_u64, 0x1000_u64]);
    client.ok(DMA_UNMAP, &bytes![24_u32, 0_u32, 0x1000_u64, 0x2000_u64]);
    client.ok(DMA_UNMAP, &bytes![24_u32, 2_u32, 0_u64, 0_u64]);
    client.ok(RESET, &[]);
    let one = |region: u32, count: u32| bytes![8_u64, region, count, 0_u64];
    let half_bad = [bytes![2_u64], one(SCRATCH, 4), one(READ_ONLY, 4)].concat();
    client.fails(REGION_WRITE_MULTI, &half_bad, libc::EACCES);
    client.ok(REGION_WRITE_MULTI, &[bytes![2_u64], one(SCRATCH, 4), one(SCRATCH, 8)].concat());
    drop(client);
    eventually("the client leaves", || server.served() == 1);
    let expected = [
        "map 0x1000+0x2000 fd",
        "map 0x8000+0x1000 no fd",
        "Range { address: 1000, size: 2000 }",
        "All",
        "reset",
        "write 0 0x8 4",
        "write 0 0x8 8",
        "detach",
    ];
    assert_eq!(server.log.take(), expected, "one bad write invalidates the whole message");
}

#[test]
fn ioeventfds_are_offered() {
    let _exclusive = exclusive();
    let server = Server::start();
    let mut client = RawClient::attach(&server.path);
    let ask = |argsz: u32| bytes![argsz, 0_u32, SCRATCH, 0_u32];
    let short = client.ok(GET_REGION_IO_FDS, &ask(16));
    assert_eq!((short.payload.len(), short.u32_at(0), short.fds.len()), (16, 56, 0));
    let full = client.ok(GET_REGION_IO_FDS, &ask(56));
    assert_eq!((full.payload.len(), full.u32_at(12), full.fds.len()), (56, 1, 1));
    assert_eq!((full.u64_at(16), full.u64_at(24), full.u64_at(48)), (0x10, 4, 7));
}

#[test]
fn features_are_probed_set_and_read() {
    let _exclusive = exclusive();
    let server = Server::start();
    let mut client = RawClient::attach(&server.path);
    let feature = |argsz: u32, method: u32| bytes![argsz, method | u32::from(FEATURE_INDEX)];
    client.ok(FEATURE, &feature(8, 0x7_0000));
    let set = [feature(12, 0x2_0000), bytes![77_u32]].concat();
    assert_eq!(client.ok(FEATURE, &set).payload, set, "the reply is the request");
    let got = client.ok(FEATURE, &feature(12, 0x1_0000));
    assert_eq!((got.u32_at(0), got.u32_at(8)), (12, 77));
    let short = client.ok(FEATURE, &feature(8, 0x1_0000));
    assert_eq!((short.u32_at(0), short.payload.len()), (12, 8), "ask again with 12 bytes");
    client.fails(FEATURE, &[feature(9, 0x2_0000), vec![0]].concat(), libc::EINVAL);
}

#[test]
fn a_foreign_client_is_served() {
    let _exclusive = exclusive();
    let server = Server::start();
    let mut client = vfio_user::Client::new(&server.path).unwrap();
    let sparse = client.region(SPARSE).unwrap();
    assert_eq!((sparse.size, sparse.sparse_areas.len()), (0x4000, 2));
    let shared = client.region(SHARED).unwrap();
    assert_eq!((shared.size, shared.file_offset.is_some()), (0x1_0000, true));
    client.region_write(SCRATCH, 0x20, &[1, 2, 3, 4]).unwrap();
    let mut data = [0; 4];
    client.region_read(SCRATCH, 0x20, &mut data).unwrap();
    assert_eq!(data, [1, 2, 3, 4]);
    let memory = device::memory(0x10_0000);
    client.dma_map(0, 0, 0x10_0000, memory.as_raw_fd()).unwrap();
    client.dma_unmap(0, 0x10_0000).unwrap();
    assert_eq!(client.get_irq_info(1).unwrap().count, MSI_COUNT);
    let events: Vec<OwnedFd> = (0..4).map(|_| device::eventfd()).collect();
    let fds: Vec<_> = events.iter().map(AsRawFd::as_raw_fd).collect();
    client.set_irqs(1, 0x24, 2, 4, &fds).unwrap();
    client.set_irqs(1, 0x21, 3, 2, &[]).unwrap();
    let raised: Vec<bool> =
        events.iter().map(|event| nix::unistd::read(event, &mut [0; 8]).is_ok()).collect();
    assert_eq!(raised, [false, true, true, false]);
    client.set_irqs(1, 0x21, 0, 0, &[]).unwrap();
    client.reset().unwrap();
    client.region_read(SCRATCH, 0x20, &mut data).unwrap();
    assert_eq!(data, [0; 4]);
    client.shutdown().unwrap();
    eventually("the client leaves", || server.served() == 1);
    assert_eq!(server.log.take().last().map(String::as_str), Some("detach"));
}

#[test]
fn queued_replies_keep_their_descriptors() {
    let _exclusive = exclusive();
    let server = Server::start();
    let mut client = RawClient::attach(&server.path);
    let ask = |index: u32| bytes![32_u32, 0_u32, index, 0_u32, 0_u64, 0_u64];
    client.stream.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let mut sent = 0_u16;
    // The client reads nothing until the server stops accepting, with a reply pending.
    while sent < 50_000 {
        let index = if sent.is_multiple_of(2) { SHARED } else { SCRATCH };
        let message = RawClient::message(sent, GET_REGION_INFO, 0, &ask(index));
        match std::io::Write::write(&mut client.stream, &message) {
            Ok(n) => assert_eq!(n, message.len()),
            Err(_) => break,
        }
        sent += 1;
    }
    assert!((100..50_000).contains(&sent), "{sent}");
    for id in 0..sent {
        let reply = client.receive().unwrap();
        assert_eq!((reply.id, reply.fds.len()), (id, usize::from(id.is_multiple_of(2))));
    }
}

#[test]
fn ten_thousand_clients_leak_nothing() {
    const CLIENTS: usize = 10_000;
    let _exclusive = exclusive();
    let server = Server::start();
    let fd = device::memory(0x1000);
    let event = device::eventfd();
    drop(RawClient::attach(&server.path));
    eventually("the first client leaves", || server.served() == 1);
    let before = device::open_fds("self");
    for _ in 0..CLIENTS {
        let mut client = RawClient::attach(&server.path);
        client.ok_with(DMA_MAP, &bytes![32_u32, 3_u32, 0_u64, 0_u64, 0x1000_u64], &[&fd]);
        client.ok_with(SET_IRQS, &bytes![20_u32, 0x24_u32, 1_u32, 0_u32, 1_u32], &[&event]);
    }
    eventually("all clients leave", || server.served() == 1 + CLIENTS);
    assert_eq!(device::open_fds("self"), before);
}

#[test]
fn dma_maps_are_limited() {
    let _exclusive = exclusive();
    let server = Server::start();
    let mut client = RawClient::attach(&server.path);
    let map = |n: u64| bytes![32_u32, 3_u32, 0_u64, n * 0x1000, 0x1000_u64];
    let mut batch = Vec::new();
    for n in 0..65_535_u64 {
        batch.extend(RawClient::message(1, DMA_MAP, NO_REPLY, &map(n)));
    }
    client.send_bytes(&batch, &[]);
    client.fails(DMA_MAP, &map(70_000), libc::ENOSPC);
    client.ok(DMA_UNMAP, &bytes![24_u32, 0_u32, 0_u64, 0x1000_u64]);
    client.ok(DMA_MAP, &map(70_000));
}
