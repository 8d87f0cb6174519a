//! Checks that hold for every device behind a vfio-user socket, whatever it is. Each takes the socket's path, connects
//! as often as it likes, and leaves the server ready for the next client.

use std::os::fd::AsFd;
use std::path::Path;

use libc::{EEXIST, EINVAL, EMSGSIZE, ENOENT, ENOTSUP};

use crate::bytes;
use crate::device::{eventfd, memory};
use crate::raw::*;

const CONFIG: u32 = 7;
const MSI: u32 = 1;
const FREE: u64 = 0x70_0000_0000;

/// A promise, and what checks it.
type Check = (&'static str, fn(&Path));

pub const ALL: &[Check] = &[
    ("version comes first, once, and is checked", version),
    ("a version reply fits the request and offers no more than was asked", version_reply),
    ("short payloads are refused", short_payloads),
    ("argsz rules of device, region and interrupt info", infos),
    ("region capabilities wait for room", capabilities),
    ("region accesses stay within their region", accesses),
    ("several writes in one message", write_multi),
    ("DMA maps", dma),
    ("interrupt commands", interrupts),
    ("what does not exist is not supported", unknown),
    ("device features", features),
    ("migration states and data", migration),
    ("logged writes and bitmaps", logging),
    ("a second socket where it is asked for", twin),
    ("posted requests are not answered", posted),
    ("replies and unknown message types do no harm", replies),
    ("bytes may dribble in", dribble),
    ("requests may be pipelined", pipeline),
    ("impossible sizes end the connection, and no more", framing),
    ("superfluous descriptors", descriptors),
    ("a client may leave within any message", leave),
    ("a client that does not read stalls itself alone", flood),
    ("reset", reset),
];

fn version(path: &Path) {
    let mut client = RawClient::connect(path);
    for command in [0_u16, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 15, 16, 999] {
        let reply = client.request(command, &[0; 64], &[]);
        assert_eq!(reply.flags, 0x21, "command {command} before the version");
        assert_ne!(reply.error, 0);
    }
    for major in [1_u16, 2, 0xffff] {
        client.fails(VERSION, &bytes![major, 0_u16], EINVAL);
    }
    for len in 0..4 {
        client.fails(VERSION, &[0; 4][..len], EINVAL);
    }
    for data in [
        &b"{}"[..],
        b"{\"capabilities\":{}}",
        b"{\0",
        b"\xff\xfe\0",
        b"7\0",
        b"{\"capabilities\":{\"max_msg_fds\":\"many\"}}\0",
        b"{\"capabilities\":{\"max_msg_fds\":-1}}\0",
        b"{\"capabilities\":[[[[[[[[\0",
    ] {
        client.fails(VERSION, &[&bytes![0_u16, 0_u16], data].concat(), EINVAL);
    }
    let deep = [bytes![0_u16, 0_u16], vec![b'['; 500_000], vec![0]].concat();
    client.fails(VERSION, &deep, EINVAL);
    client.ok(VERSION, &[&bytes![0_u16, 0_u16], QEMU_CAPS].concat());
    client.fails(VERSION, &[&bytes![0_u16, 0_u16], QEMU_CAPS].concat(), EINVAL);
    client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
}

fn version_reply(path: &Path) {
    let offers: [&[u8]; 7] = [
        b"",
        b"\0",
        b"{}\0",
        b"{\"capabilities\":{}}\0",
        b"{\"capabilities\":{\"max_msg_fds\":1}}\0",
        b"{\"capabilities\":{\"max_msg_fds\":8,\"max_data_xfer_size\":4096,\"migration\":{\"pgsize\":4096}}}\0",
        QEMU_CAPS,
    ];
    for (minor, offer) in (0_u16..).zip(offers) {
        let mut client = RawClient::connect(path);
        let reply = client.ok(VERSION, &[&bytes![0_u16, minor], offer].concat());
        assert!(reply.payload.len() <= 4 + offer.len(), "longer than the request");
        let u16_at = |at: usize| u16::from_ne_bytes(reply.payload[at..at + 2].try_into().unwrap());
        assert_eq!(u16_at(0), 0);
        assert!(u16_at(2) <= minor);
        let Some((0, json)) = reply.payload[4..].split_last() else {
            assert!(reply.payload.len() == 4, "JSON without a NUL");
            continue;
        };
        let asked = String::from_utf8_lossy(offer);
        let json: serde_json::Value = serde_json::from_slice(json).unwrap();
        for (name, value) in json["capabilities"].as_object().unwrap() {
            assert!(asked.contains(name.as_str()), "{name} was not asked for");
            match name.as_str() {
                "max_msg_fds" => assert!((1..=16).contains(&value.as_u64().unwrap())),
                "pgsizes" => assert_eq!(value, 4096),
                _ => {}
            }
        }
        assert!(offer != QEMU_CAPS || json["capabilities"]["write_multiple"] == true);
    }
}

fn short_payloads(path: &Path) {
    let mut client = RawClient::attach(path);
    let whole = [
        (DMA_MAP, bytes![32_u32, 3_u32, 0_u64, FREE, 4096_u64]),
        (DMA_UNMAP, bytes![24_u32, 2_u32, 0_u64, 0_u64]),
        (GET_INFO, bytes![16_u32, 0_u32, 0_u32, 0_u32]),
        (GET_REGION_INFO, bytes![32_u32, 0_u32, CONFIG, 0_u32, 0_u64, 0_u64]),
        (GET_REGION_IO_FDS, bytes![16_u32, 0_u32, CONFIG, 0_u32]),
        (GET_IRQ_INFO, bytes![16_u32, 0_u32, MSI, 0_u32]),
        (SET_IRQS, bytes![20_u32, 0x21_u32, MSI, 0_u32, 0_u32]),
        (REGION_READ, bytes![0_u64, CONFIG, 4_u32]),
        (REGION_WRITE, bytes![4_u64, CONFIG, 2_u32, 0_u16]),
        (REGION_WRITE_MULTI, bytes![1_u64, 4_u64, CONFIG, 2_u32, 0_u64]),
        (FEATURE, bytes![8_u32, 0x4_0001_u32]),
    ];
    for (command, payload) in &whole {
        for len in 0..payload.len() {
            client.fails(*command, &payload[..len], EINVAL);
        }
        if *command != FEATURE {
            client.ok(*command, payload);
        }
    }
    client.ok(DMA_UNMAP, &bytes![24_u32, 2_u32, 0_u64, 0_u64]);
}

fn infos(path: &Path) {
    let mut client = RawClient::attach(path);
    for argsz in [0_u32, 1, 15] {
        client.fails(GET_INFO, &bytes![argsz, 0_u32, 0_u32, 0_u32], EINVAL);
        client.fails(GET_IRQ_INFO, &bytes![argsz, 0_u32, 0_u32, 0_u32], EINVAL);
    }
    for argsz in [0_u32, 16, 31] {
        let request = bytes![argsz, 0_u32, 0_u32, 0_u32, 0_u64, 0_u64];
        client.fails(GET_REGION_INFO, &request, EINVAL);
    }
    let info = client.ok(GET_INFO, &bytes![u32::MAX, 0_u32, 0_u32, 0_u32]);
    assert_eq!((info.payload.len(), info.u32_at(0)), (16, 16));
    assert_eq!(info.u32_at(4) & 3, 3, "a PCI device with a reset");
    let (regions, irqs) = (info.u32_at(8), info.u32_at(12));
    assert!((9..=100).contains(&regions) && (5..=50).contains(&irqs), "QEMU's limits");
    for index in [regions, regions + 1, u32::MAX] {
        let request = bytes![32_u32, 0_u32, index, 0_u32, 0_u64, 0_u64];
        client.fails(GET_REGION_INFO, &request, EINVAL);
    }
    for index in [irqs, u32::MAX] {
        client.fails(GET_IRQ_INFO, &bytes![16_u32, 0_u32, index, 0_u32], EINVAL);
    }
    for index in 0..irqs {
        let reply = client.ok(GET_IRQ_INFO, &bytes![16_u32, 0_u32, index, 0_u32]);
        assert_eq!((reply.payload.len(), reply.u32_at(0), reply.u32_at(8)), (16, 16, index));
    }
    let config = client.region(CONFIG);
    assert!([256, 4096].contains(&config.u64_at(16)));
    assert_eq!(config.u32_at(4) & 7, 3, "configuration space is read, written and not mapped");
}

fn capabilities(path: &Path) {
    let mut client = RawClient::attach(path);
    for index in 0..9_u32 {
        let ask = |argsz: u32| bytes![argsz, 0_u32, index, 0_u32, 0_u64, 0_u64];
        let short = client.ok(GET_REGION_INFO, &ask(32));
        assert_eq!(short.payload.len(), 32, "no more than there is room for");
        assert_eq!(short.u32_at(4) & 8, 0, "capabilities without room");
        assert_eq!(short.u32_at(12), 0);
        let needed = short.u32_at(0);
        if needed > 32 {
            let nearly = client.ok(GET_REGION_INFO, &ask(needed - 1));
            assert_eq!((nearly.payload.len(), nearly.u32_at(0)), (32, needed));
        }
        let full = client.ok(GET_REGION_INFO, &ask(needed));
        assert_eq!(full.payload.len(), needed as usize);
        assert_eq!(full.u32_at(4) & 8 != 0, needed > 32);
        for reply in [&short, &full] {
            let mapped = reply.u32_at(4) & 4 != 0;
            assert_eq!(reply.fds.len(), usize::from(mapped), "one descriptor for what is mapped");
            assert_eq!(reply.u32_at(8), index);
        }
        if needed > 32 {
            let at = full.u32_at(12) as usize;
            assert_eq!(at, 32, "where the capability is");
            let [id, version] = [at, at + 2]
                .map(|at| u16::from_ne_bytes(full.payload[at..at + 2].try_into().unwrap()));
            assert_eq!((id, version, full.u32_at(at + 4)), (1, 1, 0), "sparse areas, and no more");
            for area in 0..full.u32_at(at + 8) as usize {
                let (offset, size) =
                    (full.u64_at(at + 16 + area * 16), full.u64_at(at + 24 + area * 16));
                assert!(size > 0 && offset + size <= full.u64_at(16), "the area is in the region");
            }
        }
    }
}

fn accesses(path: &Path) {
    let mut client = RawClient::attach(path);
    let regions = client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]).u32_at(8);
    let size = client.region(CONFIG).u64_at(16);
    let whole = client.read(CONFIG, 0, size as u32);
    assert_eq!(&client.read(CONFIG, 0, 4)[..], &whole[..4], "in one piece and in parts");
    assert!(client.read(CONFIG, size, 0).is_empty());
    for (offset, count) in [
        (size, 1_u32),
        (size - 1, 2),
        (0, size as u32 + 1),
        (0, 1 << 20),
        (0, (1 << 20) + 1),
        (0, u32::MAX),
        (u64::MAX, 1),
        (u64::MAX - 3, 4),
        (1 << 63, 4),
    ] {
        client.fails(REGION_READ, &bytes![offset, CONFIG, count], EINVAL);
        let data = vec![0; (count as usize).min(64)];
        client.fails(REGION_WRITE, &[bytes![offset, CONFIG, count], data].concat(), EINVAL);
    }
    for region in [regions, u32::MAX] {
        client.fails(REGION_READ, &bytes![0_u64, region, 4_u32], EINVAL);
        client.fails(REGION_WRITE, &bytes![0_u64, region, 4_u32, 0_u32], EINVAL);
    }
    for given in [0_usize, 1, 3, 5, 1000] {
        let message = [bytes![4_u64, CONFIG, 4_u32], vec![0; given]].concat();
        client.fails(REGION_WRITE, &message, EINVAL);
    }
    // The longest write there is, to a place that takes none: refused, and the stream goes on.
    let long = [bytes![0_u64, CONFIG, 1_u32 << 20], vec![0; 1 << 20]].concat();
    client.fails(REGION_WRITE, &long, EINVAL);
    assert_eq!(client.read(CONFIG, 0, size as u32)[..4], whole[..4]);
}

fn write_multi(path: &Path) {
    let mut client = RawClient::attach(path);
    let command = client.read(CONFIG, 4, 2);
    let value = [&command[..], &[0; 6]].concat();
    let one = |offset: u64, region: u32, count: u32| {
        [bytes![offset, region, count], value.clone()].concat()
    };
    assert_eq!(client.ok(REGION_WRITE_MULTI, &bytes![0_u64]).payload, bytes![0_u64]);
    let two = [bytes![2_u64], one(4, CONFIG, 2), one(4, CONFIG, 1)].concat();
    assert_eq!(client.ok(REGION_WRITE_MULTI, &two).payload, bytes![2_u64]);
    for count in [0_u64, 1, 3, u64::MAX, u64::MAX / 24, 1 << 61] {
        let wrong = [bytes![count], one(4, CONFIG, 2), one(4, CONFIG, 1)].concat();
        client.fails(REGION_WRITE_MULTI, &wrong, EINVAL);
    }
    for bad in [one(4, CONFIG, 9), one(4, 99, 2), one(u64::MAX, CONFIG, 2), one(8192, CONFIG, 2)] {
        client.fails(REGION_WRITE_MULTI, &[bytes![1_u64], bad].concat(), EINVAL);
    }
}

fn dma(path: &Path) {
    let mut client = RawClient::attach(path);
    let fd = memory(0x10_0000);
    let map = |argsz: u32, flags: u32, offset: u64, address: u64, size: u64| {
        bytes![argsz, flags, offset, address, size]
    };
    let unmap = |flags: u32, address: u64, size: u64| bytes![24_u32, flags, address, size];
    let plain = map(32, 3, 0, FREE, 0x1_0000);
    assert!(client.ok_with(DMA_MAP, &plain, &[&fd]).payload.is_empty());
    for (address, size) in [
        (FREE, 0x1_0000_u64),
        (FREE, 0x1000),
        (FREE + 0xf000, 0x1000),
        (FREE - 0x1000, 0x2000),
        (FREE - 0x1000, 0x10_0000),
    ] {
        client.fails_with(DMA_MAP, &map(32, 3, 0, address, size), &[&fd], EEXIST);
        client.fails(DMA_MAP, &map(32, 1, 0, address, size), EEXIST);
    }
    for bad in [
        map(31, 3, 0, 0, 0x1000),
        map(0, 3, 0, 0, 0x1000),
        map(32, 0, 0, 0, 0x1000),
        map(32, 8, 0, 0, 0x1000),
        map(32, 0xffff_ffff, 0, 0, 0x1000),
        map(32, 3, 0, 0, 0),
        map(32, 3, 0, 0, 1),
        map(32, 3, 0, 1, 0x1000),
        map(32, 3, 1, 0, 0x1000),
        map(32, 3, 0, !0xfff, 0x2000),
        map(32, 3, !0xfff, 0, 0x2000),
        map(32, 3, (1 << 63) - 0x1000, 0, 0x2000),
    ] {
        client.fails_with(DMA_MAP, &bad, &[&fd], EINVAL);
    }
    client.fails_with(DMA_MAP, &map(32, 3, 0, 0x8000_0000, 0x1000), &[&fd, &fd], EINVAL);
    // Without a descriptor: memory that is not shared, ROMs, the device's own regions.
    client.ok(DMA_MAP, &map(32, 1, 0, 0xfffc_0000, 0x4_0000));
    client.ok(DMA_MAP, &map(32, 3, 0, 0xfe00_0000, 0x1000));
    for (address, size) in
        [(FREE, 0x1000_u64), (FREE + 0x1000, 0xf000), (0, 0x1000), (FREE, 0x2_0000)]
    {
        client.fails(DMA_UNMAP, &unmap(0, address, size), ENOENT);
    }
    client.fails(DMA_UNMAP, &unmap(0, FREE, 0), EINVAL);
    client.fails(DMA_UNMAP, &unmap(0, u64::MAX, 2), EINVAL);
    client.fails(DMA_UNMAP, &bytes![23_u32, 0_u32, FREE, 0x1_0000_u64], EINVAL);
    client.fails(DMA_UNMAP, &unmap(1, FREE, 0x1_0000), EINVAL);
    client.fails(DMA_UNMAP, &unmap(4, FREE, 0x1_0000), EINVAL);
    client.fails(DMA_UNMAP, &unmap(2, FREE, 0x1_0000), EINVAL);
    let request = unmap(0, FREE, 0x1_0000);
    assert_eq!(client.ok(DMA_UNMAP, &request).payload, request, "the original entry");
    client.fails(DMA_UNMAP, &request, ENOENT);
    client.ok_with(DMA_MAP, &plain, &[&fd]);
    let all = unmap(2, 0, 0);
    assert_eq!(client.ok(DMA_UNMAP, &all).payload, all);
    client.ok(DMA_UNMAP, &all);
    client.fails(DMA_UNMAP, &request, ENOENT);
    for round in 0..200_u64 {
        let address = FREE + (round % 7) * 0x10_0000;
        client.ok_with(DMA_MAP, &map(32, 3, 0, address, 0x10_0000), &[&fd]);
        client.ok(DMA_UNMAP, &unmap(0, address, 0x10_0000));
    }
}

fn interrupts(path: &Path) {
    let mut client = RawClient::attach(path);
    let irqs = client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]).u32_at(12);
    let count = client.irqs(MSI);
    assert!(count >= 1, "a device with MSI");
    let set =
        |flags: u32, index: u32, start: u32, count: u32| bytes![20_u32, flags, index, start, count];
    let fd = eventfd();
    // Exactly one kind of data and one action.
    for flags in 0..0x80_u32 {
        let (data, action) = (flags & 7, flags & 0x38);
        let valid = data.is_power_of_two() && action.is_power_of_two() && flags < 0x40;
        if !valid {
            client.fails(SET_IRQS, &set(flags, MSI, 0, 1), EINVAL);
        }
    }
    for index in [irqs, u32::MAX] {
        client.fails(SET_IRQS, &set(0x21, index, 0, 0), EINVAL);
    }
    for (start, n) in [(0, count + 1), (count, 1), (count - 1, 2), (u32::MAX, 1), (1, u32::MAX)] {
        client.fails(SET_IRQS, &set(0x21, MSI, start, n), EINVAL);
        client.fails_with(SET_IRQS, &set(0x24, MSI, start, n), &[&fd], EINVAL);
        client.fails(SET_IRQS, &set(0x24, MSI, start, n), EINVAL);
    }
    for argsz in [0_u32, 19] {
        client.fails(SET_IRQS, &bytes![argsz, 0x21_u32, MSI, 0_u32, 0_u32], EINVAL);
    }
    // Messages have no mask of their own here; their table has.
    for flags in [0x09_u32, 0x11] {
        client.fails(SET_IRQS, &set(flags, MSI, 0, 1), libc::ENOTTY);
    }
    // No interrupts are named, and it is not "turn all off".
    for flags in [0x09, 0x11, 0x22, 0x24_u32] {
        client.fails(SET_IRQS, &set(flags, MSI, 0, 0), EINVAL);
    }
    client.fails(SET_IRQS, &set(0x21, MSI, 1, 0), EINVAL);
    // As many descriptors as interrupts, and eventfds at that.
    client.fails_with(SET_IRQS, &set(0x24, MSI, 0, 1), &[&fd, &fd], EINVAL);
    let (reader, _writer) = nix::unistd::pipe().unwrap();
    for wrong in [memory(4096), reader, client.stream.as_fd().try_clone_to_owned().unwrap()] {
        client.fails_with(SET_IRQS, &set(0x24, MSI, 0, 1), &[&wrong], EINVAL);
    }
    client.fails_with(SET_IRQS, &set(0x21, MSI, 0, 1), &[&fd], EINVAL);
    // Bytes that are missing, or not covered by argsz.
    client.fails(SET_IRQS, &bytes![21_u32, 0x22_u32, MSI, 0_u32, 1_u32], EINVAL);
    client.fails(SET_IRQS, &bytes![20_u32, 0x22_u32, MSI, 0_u32, 1_u32, 1_u8], EINVAL);
    // An interrupt of the client's own making arrives at the client.
    client.ok_with(SET_IRQS, &set(0x24, MSI, 0, 1), &[&fd]);
    client.ok(SET_IRQS, &bytes![21_u32, 0x22_u32, MSI, 0_u32, 1_u32, 0_u8]);
    let mut value = [0; 8];
    assert!(nix::unistd::read(&fd, &mut value).is_err(), "the byte says no");
    client.ok(SET_IRQS, &bytes![21_u32, 0x22_u32, MSI, 0_u32, 1_u32, 1_u8]);
    client.ok(SET_IRQS, &set(0x21, MSI, 0, 1));
    nix::unistd::read(&fd, &mut value).unwrap();
    assert_eq!(u64::from_ne_bytes(value), 2);
    client.ok(SET_IRQS, &set(0x24, MSI, 0, 1));
    client.ok(SET_IRQS, &set(0x21, MSI, 0, 0));
    // The pin, as QEMU under KVM sets it up and tears it down.
    client.ok_with(SET_IRQS, &set(0x24, 0, 0, 1), &[&fd]);
    client.ok(SET_IRQS, &set(0x09, 0, 0, 1));
    client.ok_with(SET_IRQS, &set(0x14, 0, 0, 1), &[&eventfd()]);
    client.ok(SET_IRQS, &set(0x11, 0, 0, 1));
    client.ok(SET_IRQS, &set(0x21, 0, 0, 0));
}

fn unknown(path: &Path) {
    let mut client = RawClient::attach(path);
    for command in [0_u16, 11, 12, 14, 19, 20, 100, 0x7fff, 0xffff] {
        client.fails(command, &[], ENOTSUP);
        client.fails(command, &[0xff; 100], ENOTSUP);
    }
    client.fails(GET_REGION_IO_FDS, &bytes![16_u32, 0_u32, u32::MAX, 0_u32], EINVAL);
    client.fails(GET_REGION_IO_FDS, &bytes![15_u32, 0_u32, 0_u32, 0_u32], EINVAL);
    client.fails(GET_REGION_IO_FDS, &bytes![16_u32, 1_u32, 0_u32, 0_u32], EINVAL);
    let reply = client.ok(GET_REGION_IO_FDS, &bytes![16_u32, 0_u32, CONFIG, 0_u32]);
    assert_eq!((reply.payload.len(), reply.u32_at(12)), (16, 0), "none in configuration space");
}

fn features(path: &Path) {
    let mut client = RawClient::attach(path);
    for flags in [0_u32, 1, 0x3_0001, 0x8_0001, 0x10_0001, 0xfff8_0000] {
        client.fails(FEATURE, &bytes![8_u32, flags], EINVAL);
    }
    client.fails(FEATURE, &bytes![7_u32, 0x4_0001_u32], EINVAL);
    for method in [0x1_0000_u32, 0x2_0000, 0x4_0000, 0x5_0000, 0x6_0000, 0x7_0000] {
        client.fails(FEATURE, &bytes![16_u32, method | 0xfffe, 0_u64], ENOTSUP);
    }
}

/// A device has it, and then all of it, or says that it has not.
fn migration(path: &Path) {
    let mut client = RawClient::attach(path);
    for bad in [bytes![7_u32, 0_u32], bytes![8_u32, 1_u32], bytes![8_u32, u32::MAX]] {
        client.fails(MIG_DATA_READ, &bad, EINVAL);
        client.fails(MIG_DATA_WRITE, &bad, EINVAL);
    }
    client.fails(MIG_DATA_WRITE, &bytes![8_u32, 0_u32, 1_u8], EINVAL);
    let has_it = client.request(FEATURE, &bytes![16_u32, 0x5_0001_u32], &[]).error == 0;
    let errno = if has_it { EINVAL } else { ENOTSUP };
    // Nothing moves while the device runs.
    client.fails(MIG_DATA_READ, &bytes![16_u32, 8_u32], errno);
    client.fails(MIG_DATA_WRITE, &bytes![8_u32, 2_u32, 7_u16], errno);
    let set = |state: u32| bytes![16_u32, 0x2_0002_u32, state, 0_u32];
    for state in [0_u32, 5, 7, 8, u32::MAX] {
        client.fails(FEATURE, &set(state), errno);
    }
    client.fails(FEATURE, &bytes![8_u32, 0x6_0001_u32], errno);
    client.fails(FEATURE, &bytes![16_u32, 0x2_0001_u32, 0_u64], errno);
    if has_it {
        client.ok(FEATURE, &bytes![8_u32, 0x7_0002_u32]);
        client.fails(FEATURE, &set(2)[..12], EINVAL);
        for (state, then) in [(2_u32, 2_u32), (1, 1), (3, 3), (1, 1), (4, 4), (3, 4), (2, 4)] {
            let reply = client.request(FEATURE, &set(state), &[]);
            assert!(reply.error != 0 || reply.payload == set(state), "the reply is the request");
            if then == 4 && state != 4 {
                break; // Leaving a restore without data is the device's to judge.
            }
            let now = client.ok(FEATURE, &bytes![16_u32, 0x1_0002_u32]);
            assert_eq!((now.u32_at(0), now.u32_at(8)), (16, then));
        }
        client.ok(RESET, &[]);
        assert_eq!(client.ok(FEATURE, &bytes![16_u32, 0x1_0002_u32]).u32_at(8), 2, "running");
    }
}

fn logging(path: &Path) {
    let mut client = RawClient::attach(path);
    let start = |page: u64, ranges: &[[u64; 2]]| {
        let mut bytes = bytes![4096_u32, 0x2_0006_u32, page, ranges.len() as u32, 0_u32];
        ranges.iter().flatten().for_each(|value| bytes.extend(value.to_ne_bytes()));
        bytes
    };
    let report = |argsz: u32, page: u64| bytes![argsz, 0x1_0008_u32, FREE, 0x1_0000_u64, page];
    let unmap =
        |argsz: u32, page: u64, size: u64| bytes![argsz, 1_u32, FREE, 0x1_0000_u64, page, size];
    let map = bytes![32_u32, 3_u32, 0_u64, FREE, 0x1_0000_u64];
    client.ok(DMA_MAP, &map);
    let has_it = client.request(FEATURE, &bytes![8_u32, 0x6_0006_u32], &[]).error == 0;
    let errno = if has_it { EINVAL } else { ENOTSUP };
    for bad in [
        start(0, &[]),
        start(3, &[]),
        start(4096, &[[0, 0]]),
        start(4096, &[[u64::MAX, 2]]),
        start(4096, &[[0, 1]])[..39].to_vec(),
        bytes![8_u32, 0x1_0006_u32],
        bytes![8_u32, 0x2_0008_u32],
        report(4096, 4096),
    ] {
        client.fails(FEATURE, &bad, errno);
    }
    // Too little room, too short a bitmap, no page size.
    for bad in [unmap(47, 4096, 8), unmap(48, 4096, 7), unmap(48, 0, 8), unmap(48, 4097, 8)] {
        client.fails(DMA_UNMAP, &bad, EINVAL);
    }
    client.fails(DMA_UNMAP, &unmap(u32::MAX, 4096, 1 << 21), EINVAL);
    client.fails(DMA_UNMAP, &unmap(48, 4096, 8), errno);
    if has_it {
        client.ok(FEATURE, &start(4096, &[[FREE, 0x1_0000]]));
        client.fails(FEATURE, &start(4096, &[]), libc::EBUSY);
        let short = client.ok(FEATURE, &report(32, 4096));
        assert_eq!((short.u32_at(0), short.payload.len()), (40, 8), "ask again with 40 bytes");
        let full = client.ok(FEATURE, &report(40, 4096));
        assert_eq!((full.payload.len(), full.u64_at(8), full.u64_at(24)), (40, FREE, 4096));
        client.fails(FEATURE, &report(40, 1024), EINVAL);
        let huge = bytes![u32::MAX, 0x1_0008_u32, 0_u64, u64::MAX, 4096_u64];
        client.fails(FEATURE, &huge, libc::E2BIG);
        let request = unmap(48, 4096, 8);
        let reply = client.ok(DMA_UNMAP, &request).payload;
        assert_eq!((&reply[..40], reply.len()), (&request[..], 48));
        client.ok(DMA_MAP, &map);
        client.ok(FEATURE, &bytes![8_u32, 0x2_0007_u32]);
    }
    client.ok(DMA_UNMAP, &bytes![24_u32, 0_u32, FREE, 0x1_0000_u64]);
}

fn twin(path: &Path) {
    for (asked, caps) in [
        (true, &b"{\"capabilities\":{\"max_msg_fds\":8,\"twin_socket\":{\"supported\":true}   }             }\0"[..]),
        (true, b"{\"capabilities\":{\"twin_socket\":{\"supported\":true}}}\0"),
        (false, b"{\"capabilities\":{\"twin_socket\":{\"supported\":false}}}                \0"),
        (false, b"{\"capabilities\":{\"twin_socket\":{}}}                                    \0"),
    ] {
        let mut client = RawClient::connect(path);
        let reply = client.ok(VERSION, &[&bytes![0_u16, 0_u16], caps].concat());
        let json = String::from_utf8(reply.payload[4..].to_vec()).unwrap();
        let given = json.contains("\"twin_socket\":{\"supported\":true,\"fd_index\":0}");
        assert!(asked || !given, "{json}");
        assert_eq!(reply.fds.len(), usize::from(given), "{json}");
        client.read(CONFIG, 0, 4);
        if let Some(fd) = reply.fds.into_iter().next() {
            let mut twin = RawClient::over(fd.into());
            // Nothing is awaited there yet: neither answers nor requests do harm, nor does its end.
            twin.send(DMA_READ, 1, &[0; 20], &[]);
            twin.send(REGION_READ, 0, &bytes![0_u64, CONFIG, 4_u32], &[]);
            client.read(CONFIG, 0, 4);
            drop(twin);
        }
        client.read(CONFIG, 0, 4);
    }
    let mut client = RawClient::connect(path);
    let bad = b"{\"capabilities\":{\"twin_socket\":true}}\0";
    client.fails(VERSION, &[&bytes![0_u16, 0_u16], &bad[..]].concat(), EINVAL);
}

fn posted(path: &Path) {
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

fn replies(path: &Path) {
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
    // An error flag in a request means nothing.
    client.send(GET_INFO, 0x20, &bytes![16_u32, 0_u32, 0_u32, 0_u32], &[]);
    assert_eq!(client.receive().unwrap().flags, 1);
}

fn dribble(path: &Path) {
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
            // The descriptor comes somewhere in the middle of its message.
            let fds = [fd.as_fd()];
            client.send_bytes(&[*byte], if id == 3 && at == 20 { &fds } else { &[] });
        }
        let reply = client.receive().unwrap();
        assert_eq!((reply.id, reply.flags), (id, 1));
    }
    // In every pair of pieces.
    let read = RawClient::message(5, REGION_READ, 0, &bytes![0_u64, CONFIG, 4_u32]);
    for at in 1..read.len() {
        client.send_bytes(&read[..at], &[]);
        std::thread::yield_now();
        client.send_bytes(&read[at..], &[]);
        assert_eq!(client.receive().unwrap().flags, 1);
    }
}

fn pipeline(path: &Path) {
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
        // The status register, at 6, is the device's to change.
        assert!(at == 4 || (at < 8 && at > 0) || reply.payload[16..] == whole[at..at + 4]);
    }
    // Maps as QEMU sends them: several before it reads a reply, some with a descriptor and some without.
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

fn framing(path: &Path) {
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
    // Bytes that mean nothing.
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

fn descriptors(path: &Path) {
    let mut client = RawClient::attach(path);
    let fd = memory(0x1000);
    let info = bytes![16_u32, 0_u32, 0_u32, 0_u32];
    // With a message that takes none they are closed, and nothing else happens.
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

fn leave(path: &Path) {
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

fn flood(path: &Path) {
    let mut client = RawClient::attach(path);
    client.stream.set_nonblocking(true).unwrap();
    let request = RawClient::message(7, REGION_READ, 0, &bytes![0_u64, CONFIG, 256_u32]);
    let mut sent = 0;
    let mut stalled = 0;
    let mut rest = &request[..];
    // Until the server has not taken anything for a while.
    while stalled < 50 && sent < 1_000_000 {
        match std::io::Write::write(&mut client.stream, rest) {
            Ok(n) if n == rest.len() => (rest, sent, stalled) = (&request[..], sent + 1, 0),
            Ok(n) => rest = &rest[n..],
            Err(_) => {
                stalled += 1;
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        }
    }
    assert!(sent < 1_000_000, "the server takes requests without end, and keeps their replies");
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

fn reset(path: &Path) {
    let mut client = RawClient::attach(path);
    let fd = memory(0x1000);
    client.ok_with(DMA_MAP, &bytes![32_u32, 3_u32, 0_u64, FREE, 0x1000_u64], &[&fd]);
    for _ in 0..10 {
        assert!(client.ok(RESET, &[]).payload.is_empty());
    }
    let again = bytes![32_u32, 3_u32, 0_u64, FREE, 0x1000_u64];
    client.fails_with(DMA_MAP, &again, &[&fd], EEXIST);
    client.ok(DMA_UNMAP, &bytes![24_u32, 0_u32, FREE, 0x1000_u64]);
}
