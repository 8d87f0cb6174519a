//! Migration states and data.

use std::path::Path;

use libc::{EINVAL, ENOTSUP};
use system_tests::bytes;
use system_tests::raw_client::*;

/// A device supports migration completely or reports that it does not.
pub fn migration(path: &Path) {
    let mut client = RawClient::attach(path);
    for bad in [bytes![7_u32, 0_u32], bytes![8_u32, 1_u32], bytes![8_u32, u32::MAX]] {
        client.fails(MIG_DATA_READ, &bad, EINVAL);
        client.fails(MIG_DATA_WRITE, &bad, EINVAL);
    }
    client.fails(MIG_DATA_WRITE, &bytes![8_u32, 0_u32, 1_u8], EINVAL);
    let has_it = client.request(FEATURE, &bytes![16_u32, 0x5_0001_u32], &[]).error == 0;
    // No data moves while the device runs.
    let errno = if has_it { EINVAL } else { ENOTSUP };
    client.fails(MIG_DATA_READ, &bytes![16_u32, 8_u32], errno);
    client.fails(MIG_DATA_WRITE, &bytes![8_u32, 2_u32, 7_u16], errno);
    let errno = if has_it { EINVAL } else { libc::ENOTTY };
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
