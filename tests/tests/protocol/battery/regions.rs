//! Region accesses, single and multiple.

use std::path::Path;

use libc::EINVAL;
use system_tests::bytes;
use system_tests::raw_client::*;

use super::CONFIG;

pub fn accesses(path: &Path) {
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
    // The longest write, to a read-only place: refused, and the stream continues.
    let long = [bytes![0_u64, CONFIG, 1_u32 << 20], vec![0; 1 << 20]].concat();
    client.fails(REGION_WRITE, &long, EINVAL);
    assert_eq!(client.read(CONFIG, 0, size as u32)[..4], whole[..4]);
}

pub fn write_multi(path: &Path) {
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
