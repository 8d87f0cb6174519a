use super::*;
use crate::device::Scanout;

const XRES: u64 = 0x502;
const YRES: u64 = 0x504;
const BPP: u64 = 0x506;
const ENABLE: u64 = 0x508;
const VIRT_WIDTH: u64 = 0x50c;
const VIRT_HEIGHT: u64 = 0x50e;
const X_OFFSET: u64 = 0x510;
const Y_OFFSET: u64 = 0x512;

impl Guest {
    fn blank(&mut self, blank: bool) {
        self.function.region_write(DISPLAY, 0x402, &[1]).unwrap();
        self.function.region_read(DISPLAY, 0x41a, &mut [0]).unwrap();
        let index = if blank { 0 } else { 0x20 };
        self.function.region_write(DISPLAY, 0x400, &[index]).unwrap();
    }

    /// Writes the mode registers in the order of Linux's bochs driver.
    pub(super) fn set_mode(&mut self, width: u16, height: u16, bits: u16) {
        self.blank(false);
        for (register, value) in [
            (ENABLE, 0),
            (BPP, bits),
            (XRES, width),
            (YRES, height),
            (0x50a, 0),
            (VIRT_WIDTH, width),
            (VIRT_HEIGHT, 999),
            (X_OFFSET, 0),
            (Y_OFFSET, 0),
            (ENABLE, 0x41),
        ] {
            self.write16(DISPLAY, register, value);
        }
    }
}

#[test]
fn a_driver_detects_the_adapter() {
    let mut guest = Guest::new();
    assert_eq!(guest.read16(DISPLAY, 0x500), 0xb0c5);
    assert_eq!(u64::from(guest.read16(DISPLAY, 0x514)) * 0x1_0000, 4 * MIB, "the size of BAR 0");
    assert_eq!(guest.read32(DISPLAY, 0x600), 8);
    let mut edid = [0; 128];
    guest.function.region_read(DISPLAY, 0, &mut edid).unwrap();
    assert_eq!(edid[..8], [0, 255, 255, 255, 255, 255, 255, 0]);
    assert_eq!(u32::from(edid[56]) | u32::from(edid[58] >> 4) << 8, 800);
    guest.write16(DISPLAY, ENABLE, 2);
    let caps = [XRES, YRES, BPP].map(|register| guest.read16(DISPLAY, register));
    assert_eq!(caps, [800, 600, 32]);
}

#[test]
fn a_mode_is_set_panned_and_blanked() {
    let mut guest = Guest::new();
    assert_eq!(guest.function.scanout(), Scanout::default());
    guest.write32(FRAMEBUFFER, 0, 0xffff_ffff);
    guest.set_mode(640, 480, 32);
    assert_eq!(guest.read32(FRAMEBUFFER, 0), 0, "setting a mode clears the picture");
    let first = Scanout {
        enabled: true,
        width: 640,
        height: 480,
        stride: 2560,
        bits_per_pixel: 32,
        offset: 0,
        big_endian: false,
    };
    assert_eq!(guest.function.scanout(), first);
    assert_eq!(u64::from(guest.read16(DISPLAY, VIRT_HEIGHT)), 4 * MIB / 2560);

    guest.write16(DISPLAY, VIRT_WIDTH, 700);
    guest.write16(DISPLAY, X_OFFSET, 10);
    guest.write16(DISPLAY, Y_OFFSET, 480);
    let panned = guest.function.scanout();
    assert_eq!((panned.stride, panned.offset), (2800, 480 * 2800 + 40));
    guest.write32(DISPLAY, 0x604, 0xbebe_bebe);
    assert!(guest.function.scanout().big_endian);

    guest.blank(true);
    assert!(!guest.function.scanout().enabled);
    guest.blank(false);
    assert!(guest.function.scanout().enabled);
    guest.write16(DISPLAY, ENABLE, 0);
    assert!(!guest.function.scanout().enabled);
}

#[test]
fn the_client_gets_each_change_of_the_scanout_once() {
    let mut guest = Guest::new();
    let scanouts = |guest: &Guest| {
        let record = guest.record.lock().unwrap();
        (record.scanouts, record.scanout)
    };
    assert_eq!(scanouts(&guest), (0, Scanout::default()));
    guest.set_mode(640, 480, 32);
    assert_eq!(scanouts(&guest), (1, guest.function.scanout()), "once, when the mode is complete");
    guest.read16(DISPLAY, XRES);
    guest.write16(DISPLAY, XRES, 640);
    guest.write32(FRAMEBUFFER, 0, 7);
    assert_eq!(scanouts(&guest).0, 1);
    guest.write16(DISPLAY, Y_OFFSET, 100);
    assert_eq!(scanouts(&guest), (2, guest.function.scanout()));
    let state = guest.function.save();
    guest.function.detach();
    assert_eq!(scanouts(&guest), (3, Scanout::default()), "the VM is gone");
    guest.function.restore(&state).unwrap();
    assert_eq!(scanouts(&guest), (4, guest.function.scanout()));
    assert_eq!(guest.function.scanout().offset, 100 * 2560);
}

#[test]
fn no_mode_is_larger_than_the_type_or_the_framebuffer() {
    let mut guest = Guest::new();
    guest.set_mode(640, 480, 32);
    guest.write16(DISPLAY, XRES, 801);
    guest.write16(DISPLAY, YRES, 601);
    guest.write16(DISPLAY, BPP, 12);
    let mode = [XRES, YRES, BPP].map(|register| guest.read16(DISPLAY, register));
    assert_eq!(mode, [640, 480, 32], "refused as in DISPI");

    guest.write16(DISPLAY, ENABLE, 0);
    guest.write16(DISPLAY, XRES, 0);
    guest.write16(DISPLAY, ENABLE, 1);
    assert_eq!(guest.read16(DISPLAY, ENABLE) & 1, 0, "no mode is set");
}

#[test]
fn panning_never_leaves_the_framebuffer() {
    let mut guest = Guest::new();
    guest.set_mode(800, 600, 32);
    for (width, x, y) in [(0xffff, 0, 0), (800, 0xffff, 0), (0, 0xffff, 0xffff), (800, 0, 2000)] {
        guest.write16(DISPLAY, VIRT_WIDTH, width);
        guest.write16(DISPLAY, X_OFFSET, x);
        guest.write16(DISPLAY, Y_OFFSET, y);
        let scanout = guest.function.scanout();
        let end = scanout.offset + 599 * u64::from(scanout.stride) + 3200;
        assert!(!scanout.enabled || end <= 4 * MIB, "{scanout:?}");
    }
}

#[test]
fn a_head_that_does_not_fit_the_granted_resources_is_refused() {
    for (max_width, max_height) in [(0, 600), (2000, 2000), (70_000, 1)] {
        let (client, _) = Recorder::new();
        let display = Some(DisplayLimits { max_width, max_height });
        assert!(VirtualFunction::new(&FunctionSpec { display, ..spec(true) }, client).is_err());
    }
}
