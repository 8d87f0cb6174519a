//! EDID block of a virtual monitor (VESA E-EDID 1.4, one block, no extensions).

use super::DisplayLimits;

/// Length of the block in bytes.
pub(super) const BYTES: usize = 128;

/// Modes besides the preferred mode, largest first, with the code of their aspect ratio.
const STANDARD: [(u32, u32, u8); 10] = [
    (1920, 1200, ASPECT_16_10),
    (1920, 1080, ASPECT_16_9),
    (1680, 1050, ASPECT_16_10),
    (1600, 1200, ASPECT_4_3),
    (1600, 900, ASPECT_16_9),
    (1440, 900, ASPECT_16_10),
    (1280, 1024, ASPECT_5_4),
    (1280, 800, ASPECT_16_10),
    (1280, 720, ASPECT_16_9),
    (1152, 864, ASPECT_4_3),
];
const ASPECT_16_10: u8 = 0;
const ASPECT_4_3: u8 = 1;
const ASPECT_5_4: u8 = 2;
const ASPECT_16_9: u8 = 3;

/// Established timings at 60 Hz: byte and bit of the bitmap.
const ESTABLISHED: [(u32, u32, usize, u8); 3] =
    [(640, 480, 35, 5), (800, 600, 35, 0), (1024, 768, 36, 3)];

/// Maximum width and height of a detailed timing.
const MAX_PIXELS: u32 = 4095;

/// Returns the block of a monitor whose native mode is the head's largest mode.
pub(super) fn block(limits: DisplayLimits) -> [u8; BYTES] {
    let fits = |width: u32, height: u32| width <= limits.max_width && height <= limits.max_height;
    let native = (limits.max_width.min(MAX_PIXELS), limits.max_height.min(MAX_PIXELS));
    let mut edid = [0; BYTES];
    edid[..8].copy_from_slice(&[0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0]);
    edid[8..10].copy_from_slice(&manufacturer(*b"TSR").to_be_bytes());
    edid[10] = 1; // product code
    edid[17] = 35; // made in 1990 + 35
    edid[18..20].copy_from_slice(&[1, 4]);
    edid[20] = 0xa5; // digital, 8 bits per colour, DisplayPort
    edid[21] = centimetres(native.0);
    edid[22] = centimetres(native.1);
    edid[23] = 220 - 100; // gamma 2.2
    edid[24] = 0x06; // sRGB; the first detailed timing is the native one
    edid[25..35].copy_from_slice(&SRGB);
    for (width, height, byte, bit) in ESTABLISHED {
        if fits(width, height) {
            edid[byte] |= 1 << bit;
        }
    }
    let mut standard = STANDARD.iter().filter(|(width, height, _)| fits(*width, *height));
    for slot in edid[38..54].chunks_exact_mut(2) {
        slot.copy_from_slice(&match standard.next() {
            Some((width, _, aspect)) => [(width / 8 - 31) as u8, aspect << 6],
            None => [1, 1],
        });
    }
    edid[54..72].copy_from_slice(&detailed_timing(native.0, native.1));
    edid[72..90].copy_from_slice(&RANGES);
    edid[90..108].copy_from_slice(b"\0\0\0\xfc\0Tessera\n     ");
    edid[111] = 0x10; // an unused descriptor
    let sum = edid.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
    edid[127] = sum.wrapping_neg();
    edid
}

/// Chromaticity of sRGB in E-EDID's encoding.
const SRGB: [u8; 10] = [0xee, 0x91, 0xa3, 0x54, 0x4c, 0x99, 0x26, 0x0f, 0x50, 0x54];

/// Display range limits: 30 to 75 Hz, 15 to 255 kHz, 660 MHz, no derived timings.
const RANGES: [u8; 18] =
    [0, 0, 0, 0xfd, 0, 30, 75, 15, 255, 66, 1, b'\n', b' ', b' ', b' ', b' ', b' ', b' '];

fn manufacturer(letters: [u8; 3]) -> u16 {
    letters.iter().fold(0, |id, letter| id << 5 | u16::from(letter - b'A' + 1))
}

/// Returns a length in millimetres at 96 pixels per inch.
fn millimetres(pixels: u32) -> u32 {
    pixels * 254 / 960
}

fn centimetres(pixels: u32) -> u8 {
    (millimetres(pixels) / 10).min(255) as u8
}

/// Returns a detailed timing with CVT's reduced blanking at 60 Hz, or 30 Hz if the pixel clock
/// exceeds its field.
fn detailed_timing(width: u32, height: u32) -> [u8; 18] {
    const H_BLANK: u32 = 160;
    const H_FRONT: u32 = 48;
    const H_SYNC: u32 = 32;
    const V_FRONT: u32 = 3;
    const V_SYNC: u32 = 6;
    const MIN_BLANK_US: u32 = 460;

    let v_blank = |hz: u32| {
        // A line takes (frame - blank) / height.
        let lines = MIN_BLANK_US * height / (1_000_000 / hz - MIN_BLANK_US) + 1;
        lines.max(V_FRONT + V_SYNC + 6)
    };
    let clock = |hz: u32| {
        u64::from(width + H_BLANK) * u64::from(height + v_blank(hz)) * u64::from(hz) / 10_000
    };
    let hz = if u16::try_from(clock(60)).is_ok() { 60 } else { 30 };
    let v_blank = v_blank(hz);
    let (mm_width, mm_height) = (millimetres(width), millimetres(height));
    let high = |value: u32, other: u32| ((value >> 8 & 0xf) << 4 | other >> 8 & 0xf) as u8;

    let mut timing = [0; 18];
    timing[..2].copy_from_slice(&u16::try_from(clock(hz)).unwrap_or(u16::MAX).to_le_bytes());
    timing[2] = width as u8;
    timing[3] = H_BLANK as u8;
    timing[4] = high(width, H_BLANK);
    timing[5] = height as u8;
    timing[6] = v_blank as u8;
    timing[7] = high(height, v_blank);
    timing[8] = H_FRONT as u8;
    timing[9] = H_SYNC as u8;
    timing[10] = (V_FRONT << 4 | V_SYNC) as u8;
    timing[12] = mm_width as u8;
    timing[13] = mm_height as u8;
    timing[14] = high(mm_width, mm_height);
    timing[17] = 0x1a; // separate digital sync, horizontal positive
    timing
}

#[cfg(test)]
mod tests {
    use super::*;

    fn for_size(max_width: u32, max_height: u32) -> [u8; BYTES] {
        block(DisplayLimits { max_width, max_height })
    }

    #[test]
    fn checksum_and_header_are_valid() {
        for (width, height) in [(1, 1), (640, 480), (1920, 1200), (4096, 4096), (60_000, 60_000)] {
            let edid = for_size(width, height);
            assert_eq!(edid.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)), 0);
            assert_eq!(edid[..8], [0, 255, 255, 255, 255, 255, 255, 0]);
        }
    }

    #[test]
    fn the_largest_mode_is_preferred() {
        let edid = for_size(1920, 1200);
        let timing = &edid[54..72];
        assert_eq!(u32::from(timing[2]) | u32::from(timing[4] >> 4) << 8, 1920);
        assert_eq!(u32::from(timing[5]) | u32::from(timing[7] >> 4) << 8, 1200);
        let clock = u32::from(u16::from_le_bytes([timing[0], timing[1]])) * 10_000;
        assert_eq!(clock / 2080 / 1235, 59, "{clock}: CVT's 154 MHz for 59.95 Hz");
    }

    #[test]
    fn no_mode_exceeds_the_head() {
        let edid = for_size(1280, 800);
        let modes: Vec<_> = edid[38..54].chunks(2).filter(|mode| *mode != [1, 1]).collect();
        assert_eq!(modes, [[(1280 / 8 - 31) as u8, 0], [(1280 / 8 - 31) as u8, 3 << 6]]);
        assert_eq!(for_size(640, 480)[35..37], [1 << 5, 0]);
    }
}
