use std::collections::HashMap;

use super::*;
use crate::abi::control::{Features, MAGIC};
use crate::abi::doorbell;
use crate::device::AccessError;
use crate::testing::APERTURE_OFFSET;

#[test]
fn regions_have_their_sizes_and_mappings() {
    let guest = Guest::new();
    let sizes: Vec<_> = (0..9).map(|index| guest.function.region(index).unwrap().size).collect();
    assert_eq!(sizes, [4 * MIB, 0x1_0000, 0x1000, 0x4000, 8 * MIB, 0, 0, 0x1000, 0]);
    assert!(guest.function.region(9).is_none());
    let mapped = |index| guest.function.region(index).unwrap().mapping.map(|it| it.len);
    assert_eq!(mapped(FRAMEBUFFER), Some(4 * MIB));
    assert_eq!(mapped(DOORBELL), Some(0x1_0000));
    assert_eq!(mapped(VRAM), Some(8 * MIB));
    assert!([DISPLAY, CONTROL, CONFIG].into_iter().all(|index| mapped(index).is_none()));
}

#[test]
fn a_type_without_a_head_has_no_display_regions() {
    let mut guest = Guest::with(false);
    assert_eq!(guest.read32(CONFIG, 0), 0x10f0_1af4);
    assert_eq!(guest.read32(CONFIG, 8) >> 8, 0x12_00_00);
    for index in [FRAMEBUFFER, DISPLAY] {
        assert_eq!(guest.function.region(index).unwrap().size, 0);
        assert_eq!(
            guest.function.region_read(index, 0, &mut [0]),
            Err(AccessError::NoRegion(index))
        );
    }
    assert!(!guest.function.scanout().enabled);
}

#[test]
fn accesses_beyond_a_region_are_refused() {
    let mut guest = Guest::new();
    for (index, offset, len) in [(CONFIG, 4095, 2), (CONTROL, 0x4000, 1), (VRAM, u64::MAX, 8)] {
        let mut data = vec![0; len];
        assert!(guest.function.region_read(index, offset, &mut data).is_err());
        assert!(guest.function.region_write(index, offset, &data).is_err());
    }
    guest.function.region_read(CONFIG, 0, &mut [0; 4096]).unwrap();
}

#[test]
fn control_registers_describe_the_vgpu() {
    let mut guest = Guest::new();
    assert_eq!(guest.read32(CONTROL, reg::MAGIC), MAGIC);
    assert_eq!(guest.read32(CONTROL, reg::FEATURES), (Features::all() - Features::QUEUE).bits());
    assert_eq!(guest.read32(CONTROL, reg::STATUS), 1);
    assert_eq!(guest.read32(CONTROL, reg::VRAM_BYTES_LO), 8 << 20);
    assert_eq!(guest.read32(CONTROL, reg::MAX_CHANNELS), 8);
    let mut name = [0; 64];
    guest.function.region_read(CONTROL, reg::TYPE_NAME, &mut name).unwrap();
    assert_eq!(&name[..8], b"SOFT-1Q\0");
    let mut uuid = [0; 16];
    guest.function.region_read(CONTROL, reg::UUID, &mut uuid).unwrap();
    assert_eq!(uuid[..4], [0x00, 0x11, 0x22, 0x33]);
}

#[test]
fn mapped_bars_are_accessible_by_messages() {
    let mut guest = Guest::new();
    guest.write32(VRAM, 0x1000, 0xcafe_f00d);
    assert_eq!(guest.read32(FRAMEBUFFER, 0x1000), 0xcafe_f00d, "the same memory");
    guest.function.region_write(VRAM, 8 * MIB - 3, b"end").unwrap();
    let mut tail = [0; 3];
    guest.function.region_read(VRAM, 8 * MIB - 3, &mut tail).unwrap();
    assert_eq!(&tail, b"end");
    assert_eq!(guest.function.traps().memory, 4);
}

#[test]
fn an_aperture_is_confined_to_its_range_of_the_file() {
    let mut guest = Guest::new();
    for index in [FRAMEBUFFER, VRAM] {
        assert_eq!(guest.function.region(index).unwrap().mapping.unwrap().offset, APERTURE_OFFSET);
    }
    let file = File::from(guest.function.vram().unwrap().fd.try_clone_to_owned().unwrap());
    let neighbours = [0xa5; APERTURE_OFFSET as usize];
    for place in [0, APERTURE_OFFSET + 8 * MIB] {
        file.write_all_at(&neighbours, place).unwrap();
    }
    guest.write32(VRAM, 0, 0x0102_0304);
    guest.write32(VRAM, 8 * MIB - 4, 0x0506_0708);
    let mut word = [0; 4];
    file.read_exact_at(&mut word, APERTURE_OFFSET).unwrap();
    assert_eq!(u32::from_le_bytes(word), 0x0102_0304);
    file.read_exact_at(&mut word, APERTURE_OFFSET + 8 * MIB - 4).unwrap();
    assert_eq!(u32::from_le_bytes(word), 0x0506_0708);
    // Setting a mode clears the framebuffer, and the end of a VM scrubs.
    guest.set_mode(640, 480, 32);
    guest.function.detach();
    assert_eq!(guest.read32(VRAM, 8 * MIB - 4), 0);
    for place in [0, APERTURE_OFFSET + 8 * MIB] {
        let mut bytes = [0; APERTURE_OFFSET as usize];
        file.read_exact_at(&mut bytes, place).unwrap();
        assert_eq!(bytes, neighbours, "the neighbours' memory is unchanged");
    }
    assert_eq!(guest.record.lock().unwrap().scrubbed, 0, "the file has holes");
}

#[test]
fn trapped_doorbells_wake_the_engine_and_are_counted() {
    let mut guest = Guest::new();
    guest.write32(DOORBELL, doorbell::TOKEN, 0x107);
    guest.write32(DOORBELL, 0x10, 0x108);
    guest.write32(CONTROL, reg::WAKE, 0x109);
    assert_eq!(guest.calls(), ["wake 0x107", "wake 0x109"]);
    assert_eq!(guest.read32(CONTROL, reg::TRAPPED_DOORBELLS), 2);
    assert_eq!(guest.function.traps().doorbell, 2);
    guest.function.reset();
    assert_eq!(guest.read32(CONTROL, reg::TRAPPED_DOORBELLS), 0);
}

#[test]
fn the_documentation_shows_the_current_tables() {
    const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/device-interface.md");
    let guest = Guest::new();
    let tables: HashMap<_, _> = guest.function.register_tables().into_iter().collect();
    let text = std::fs::read_to_string(PATH).unwrap();
    let mut expected = text.clone();
    for (name, table) in &tables {
        let (begin, end) = (format!("<!-- table {name} -->\n"), "<!-- end -->");
        let start = expected.find(&begin).unwrap_or_else(|| panic!("No {begin}")) + begin.len();
        let length = expected[start..].find(end).unwrap();
        expected.replace_range(start..start + length, table);
    }
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(PATH, &expected).unwrap();
    }
    assert!(text == expected, "Out of date: run UPDATE_GOLDEN=1 cargo test -p mdev-core");
}
