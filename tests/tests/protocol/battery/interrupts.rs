//! Interrupts, in all data types and actions.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use libc::{EINVAL, ENOTTY};
use system_tests::bytes;
use system_tests::raw_client::*;

use super::MSI;
use crate::device::{eventfd, memory};

pub fn interrupts(path: &Path) {
    let mut client = RawClient::attach(path);
    let irqs = client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]).u32_at(12);
    let count = client.irqs(MSI);
    assert!(count >= 1, "a device with MSI");
    let set =
        |flags: u32, index: u32, start: u32, count: u32| bytes![20_u32, flags, index, start, count];
    let fd = eventfd();
    // Exactly one data type and one action are valid.
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
    // MSI has no mask here; its capability has per-vector masks instead.
    for flags in [0x09_u32, 0x11] {
        client.fails(SET_IRQS, &set(flags, MSI, 0, 1), ENOTTY);
    }
    // A command for no interrupts does not mean "disable all".
    for flags in [0x09, 0x11, 0x22, 0x24_u32] {
        client.fails(SET_IRQS, &set(flags, MSI, 0, 0), EINVAL);
    }
    client.fails(SET_IRQS, &set(0x21, MSI, 1, 0), EINVAL);
    // The number of descriptors must equal the number of interrupts, and all must be eventfds.
    client.fails_with(SET_IRQS, &set(0x24, MSI, 0, 1), &[&fd, &fd], EINVAL);
    let (reader, _writer) = nix::unistd::pipe().unwrap();
    for wrong in [memory(4096), reader, client.stream.as_fd().try_clone_to_owned().unwrap()] {
        client.fails_with(SET_IRQS, &set(0x24, MSI, 0, 1), &[&wrong], EINVAL);
    }
    client.fails_with(SET_IRQS, &set(0x21, MSI, 0, 1), &[&fd], EINVAL);
    // Missing bytes, or bytes beyond argsz.
    client.fails(SET_IRQS, &bytes![21_u32, 0x22_u32, MSI, 0_u32, 1_u32], EINVAL);
    client.fails(SET_IRQS, &bytes![20_u32, 0x22_u32, MSI, 0_u32, 1_u32, 1_u8], EINVAL);
    // An interrupt that the client triggers arrives at the client.
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
    // INTx as QEMU under KVM sets it up and tears it down.
    client.ok_with(SET_IRQS, &set(0x24, 0, 0, 1), &[&fd]);
    client.ok(SET_IRQS, &set(0x09, 0, 0, 1));
    client.ok_with(SET_IRQS, &set(0x14, 0, 0, 1), &[&eventfd()]);
    client.ok(SET_IRQS, &set(0x11, 0, 0, 1));
    client.ok(SET_IRQS, &set(0x21, 0, 0, 0));
}

/// Returns how often an interrupt has fired since the last call.
fn taken(event: &OwnedFd) -> u64 {
    let mut count = [0; 8];
    nix::unistd::read(event, &mut count).map_or(0, |_| u64::from_ne_bytes(count))
}

/// Every index: INTx, MSI, MSI-X, error and release request.
pub fn each_kind(path: &Path) {
    const NONE: u32 = 1;
    const BOOL: u32 = 2;
    const EVENTFD: u32 = 4;
    const MASK: u32 = 8;
    const UNMASK: u32 = 0x10;
    const TRIGGER: u32 = 0x20;
    let mut client = RawClient::attach(path);
    let irqs = client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]).u32_at(12);
    for index in 0..irqs {
        let set = |flags: u32, count: u32| bytes![20_u32, flags, index, 0_u32, count];
        let choose = |action: u32, yes: u8| bytes![21_u32, BOOL | action, index, 0_u32, 1_u32, yes];
        let info = client.ok(GET_IRQ_INFO, &bytes![16_u32, 0_u32, index, 0_u32]);
        let (flags, count) = (info.u32_at(4), info.u32_at(12));
        let event = eventfd();
        if count == 0 {
            client.fails(SET_IRQS, &set(NONE | TRIGGER, 1), EINVAL);
            client.fails(SET_IRQS, &choose(TRIGGER, 1), EINVAL);
            client.fails_with(SET_IRQS, &set(EVENTFD | TRIGGER, 1), &[&event], EINVAL);
            client.ok(SET_IRQS, &set(NONE | TRIGGER, 0));
            continue;
        }
        let (by_eventfd, maskable, automasked) = (flags & 1 != 0, flags & 2 != 0, flags & 4 != 0);
        assert!(by_eventfd && (maskable || !automasked), "index {index}: {flags:#x}");
        client.ok_with(SET_IRQS, &set(EVENTFD | TRIGGER, 1), &[&event]);
        client.ok(SET_IRQS, &set(NONE | TRIGGER, 1));
        assert_eq!(taken(&event), 1, "index {index}");
        client.ok(SET_IRQS, &choose(TRIGGER, 1));
        client.ok(SET_IRQS, &choose(TRIGGER, 0));
        assert_eq!(taken(&event), 1, "index {index}: the second interrupt was not selected");
        if maskable {
            client.ok(SET_IRQS, &choose(MASK, 0));
            client.ok(SET_IRQS, &set(NONE | TRIGGER, 1));
            assert_eq!(taken(&event), 1, "the interrupt was not selected");
            for mask in [set(NONE | MASK, 1), choose(MASK, 1)] {
                for unmask in [set(NONE | UNMASK, 1), choose(UNMASK, 1)] {
                    client.ok(SET_IRQS, &mask);
                    client.ok(SET_IRQS, &choose(UNMASK, 0));
                    client.ok(SET_IRQS, &set(NONE | TRIGGER, 1));
                    assert_eq!(taken(&event), 0, "masked");
                    client.ok(SET_IRQS, &unmask);
                    client.ok(SET_IRQS, &set(NONE | TRIGGER, 1));
                    assert_eq!(taken(&event), 1, "no longer masked");
                }
            }
            // Unmasking without a message: the server watches the eventfd.
            let unmask = eventfd();
            client.ok_with(SET_IRQS, &set(EVENTFD | UNMASK, 1), &[&unmask]);
            client.ok(SET_IRQS, &set(NONE | MASK, 1));
            client.ok(SET_IRQS, &set(NONE | TRIGGER, 1));
            assert_eq!(taken(&event), 0, "masked");
            nix::unistd::write(&unmask, &1_u64.to_ne_bytes()).unwrap();
            crate::eventually("the eventfd unmasks", || {
                client.ok(SET_IRQS, &set(NONE | TRIGGER, 1));
                taken(&event) > 0
            });
            // After removal, writes to the eventfd have no effect.
            client.ok(SET_IRQS, &set(EVENTFD | UNMASK, 1));
            client.ok(SET_IRQS, &set(NONE | MASK, 1));
            nix::unistd::write(&unmask, &1_u64.to_ne_bytes()).unwrap();
            std::thread::sleep(std::time::Duration::from_millis(20));
            client.ok(SET_IRQS, &set(NONE | TRIGGER, 1));
            assert_eq!(taken(&event), 0, "still masked");
        } else {
            for action in [MASK, UNMASK] {
                client.fails(SET_IRQS, &set(NONE | action, 1), ENOTTY);
                client.fails(SET_IRQS, &choose(action, 1), ENOTTY);
                client.fails_with(SET_IRQS, &set(EVENTFD | action, 1), &[&eventfd()], ENOTTY);
            }
        }
        // Assigning no eventfds removes them and disables the index.
        client.ok(SET_IRQS, &set(EVENTFD | TRIGGER, 1));
        client.ok(SET_IRQS, &set(NONE | TRIGGER, 0));
        assert_eq!(taken(&event), 0);
        client.ok_with(SET_IRQS, &set(EVENTFD | TRIGGER, 1), &[&event]);
        client.ok(SET_IRQS, &set(NONE | TRIGGER, 1));
        assert_eq!(taken(&event), 1, "index {index} works again, and is not masked");
        client.ok(SET_IRQS, &set(NONE | TRIGGER, 0));
    }
}
