//! Queries: device, region and interrupt info, capabilities, features, and unsupported commands.

use std::path::Path;

use libc::{EINVAL, ENOTSUP};
use system_tests::bytes;
use system_tests::raw_client::*;

use super::{CONFIG, FREE, MSI};

pub fn short_payloads(path: &Path) {
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

pub fn infos(path: &Path) {
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

pub fn capabilities(path: &Path) {
    let mut client = RawClient::attach(path);
    for index in 0..9_u32 {
        let ask = |argsz: u32| bytes![argsz, 0_u32, index, 0_u32, 0_u64, 0_u64];
        let short = client.ok(GET_REGION_INFO, &ask(32));
        assert_eq!(short.payload.len(), 32, "no more than the given room");
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
            assert_eq!(
                reply.fds.len(),
                usize::from(mapped),
                "one descriptor for a mappable region"
            );
            assert_eq!(reply.u32_at(8), index);
        }
        if needed > 32 {
            let at = full.u32_at(12) as usize;
            assert_eq!(at, 32, "offset of the capability");
            let [id, version] = [at, at + 2]
                .map(|at| u16::from_ne_bytes(full.payload[at..at + 2].try_into().unwrap()));
            assert_eq!(
                (id, version, full.u32_at(at + 4)),
                (1, 1, 0),
                "the sparse areas capability only"
            );
            for area in 0..full.u32_at(at + 8) as usize {
                let (offset, size) =
                    (full.u64_at(at + 16 + area * 16), full.u64_at(at + 24 + area * 16));
                assert!(size > 0 && offset + size <= full.u64_at(16), "the area is in the region");
            }
        }
    }
}

pub fn unknown(path: &Path) {
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

pub fn features(path: &Path) {
    let mut client = RawClient::attach(path);
    for flags in [0_u32, 1, 0x3_0001, 0x8_0001, 0x10_0001, 0xfff8_0000] {
        client.fails(FEATURE, &bytes![8_u32, flags], EINVAL);
    }
    client.fails(FEATURE, &bytes![7_u32, 0x4_0001_u32], EINVAL);
    // Linux answers ENOTTY for missing features: QEMU distinguishes that from failures.
    for method in [0x1_0000_u32, 0x2_0000, 0x4_0000, 0x5_0000, 0x6_0000, 0x7_0000] {
        client.fails(FEATURE, &bytes![16_u32, method | 0xfffe, 0_u64], libc::ENOTTY);
    }
    let known: [(u32, bool, bool); 5] =
        [(1, true, false), (2, true, true), (6, false, true), (7, false, true), (8, true, false)];
    for (index, get, set) in known {
        // A plain probe asks for the feature; with methods, for each of the methods.
        let probe = |method: u32| bytes![16_u32, 0x4_0000 | method | index, 0x5a5a_5a5a_u32, 7_u32];
        let there = client.request(FEATURE, &probe(0), &[]);
        for (method, has) in [(0x1_0000, get), (0x2_0000, set), (0x3_0000, get && set)] {
            let reply = client.request(FEATURE, &probe(method), &[]);
            let errno = match (there.error, has) {
                (0, true) => 0,
                (0, false) => EINVAL,
                _ => libc::ENOTTY,
            };
            assert_eq!(reply.error, errno.unsigned_abs(), "feature {index}, method {method:#x}");
            assert!(errno != 0 || reply.payload == probe(method), "the reply is the request");
        }
        if there.error == 0 {
            assert_eq!(there.payload, probe(0), "the reply is the request");
            client.fails(FEATURE, &bytes![8_u32, 0x4_0000 | index, 0_u64], EINVAL);
        }
    }
}
