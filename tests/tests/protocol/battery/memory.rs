//! DMA maps and dirty page logging.

use std::path::Path;

use libc::{EEXIST, EINVAL, ENOENT, ENOTSUP};
use system_tests::bytes;
use system_tests::raw_client::*;

use super::FREE;
use crate::device::memory;

pub fn dma(path: &Path) {
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
    // Without a descriptor: unshared memory, ROMs, the device's own regions.
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

pub fn logging(path: &Path) {
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
    let errno = if has_it { EINVAL } else { libc::ENOTTY };
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
    client.fails(DMA_UNMAP, &unmap(48, 4096, 8), if has_it { EINVAL } else { ENOTSUP });
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

pub fn reset(path: &Path) {
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
