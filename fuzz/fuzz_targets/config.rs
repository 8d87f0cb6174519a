//! Random accesses to configuration space.
//!
//! The identity does not change, the capability list stays intact, and all reachable states can be
//! saved and restored.
#![no_main]

use fuzz::input::Input;
use libfuzzer_sys::fuzz_target;
use pci_registers::capability::{express_endpoint, msi, power_management};
use pci_registers::{Bar, BarWidth, ConfigSpace, ConfigTable, Identity};

const IDENTITY: Identity = Identity {
    vendor: 0x1234,
    device: 0x1111,
    subsystem_vendor: 0x1af4,
    subsystem: 0x1100,
    class: 0x03_80_00,
    revision: 2,
};

const BARS: [Bar; 3] = [
    Bar {
        index: 0,
        doc: "Framebuffer",
        size: 1 << 24,
        width: BarWidth::Bits32,
        prefetchable: true,
    },
    Bar {
        index: 3,
        doc: "Control registers",
        size: 1 << 14,
        width: BarWidth::Bits32,
        prefetchable: false,
    },
    Bar {
        index: 4,
        doc: "Video memory",
        size: 1 << 33,
        width: BarWidth::Bits64,
        prefetchable: true,
    },
];

/// Checks that the capability list is aligned, finite and not empty.
fn check_capabilities(config: &ConfigSpace) {
    let byte = |at: u64| {
        let mut byte = [0];
        config.read(at, &mut byte, false);
        byte[0]
    };
    let mut at = u64::from(byte(0x34));
    let mut steps = 0;
    while at != 0 {
        assert!((0x40..0x100).contains(&at) && at % 4 == 0, "a capability at {at:#x}");
        steps += 1;
        assert!(steps < 48, "the list has a loop");
        at = byte(at + 1).into();
    }
    assert!(steps > 0);
}

fuzz_target!(|data: &[u8]| {
    let mut input = Input(data);
    let mut config = ConfigSpace::new(&ConfigTable {
        identity: IDENTITY,
        intx: true,
        bars: &BARS,
        capabilities: &[power_management(), msi(4), express_endpoint()],
    });
    let mut fresh = [0; 0x40];
    config.read(0, &mut fresh, false);
    for _ in 0..256 {
        if input.is_empty() {
            break;
        }
        let at = input.number();
        match input.byte() {
            write @ 0..0xc0 => {
                let bytes = input.bytes(usize::from(write % 20));
                let effect = config.write(at, bytes);
                if effect.reset {
                    config.reset();
                }
            }
            read @ 0xc0..0xf0 => {
                config.read(at, &mut vec![0; usize::from(read)], read & 1 == 0);
            }
            _ => {
                let state = config.save();
                assert!(config.check(&state).is_ok(), "a reachable state must be valid");
                assert!(config.restore(&state).is_ok());
                assert_eq!(config.save(), state);
            }
        }
        for bar in BARS {
            if let Some(address) = config.bar_address(bar.index) {
                assert_eq!(address % bar.size, 0, "BAR addresses are aligned to the size");
            }
        }
    }
    let mut after = [0; 0x40];
    config.read(0, &mut after, false);
    for at in [0, 1, 2, 3, 8, 9, 10, 11, 14, 0x2c, 0x2d, 0x2e, 0x2f, 0x34] {
        assert_eq!(after[at], fresh[at], "byte {at:#x} is read-only");
    }
    check_capabilities(&config);
});
