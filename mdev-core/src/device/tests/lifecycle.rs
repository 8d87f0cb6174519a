use std::fs::File;
use std::os::unix::fs::FileExt;

use super::*;
use crate::device::{SavedFunction, StateError};
use crate::testing::APERTURE_OFFSET;

#[test]
fn flr_resets_everything_but_memory_and_eventfds() {
    let mut guest = Guest::new();
    let (line, fd) = event();
    guest.set_triggers(IrqIndex::Intx, vec![Some(fd)]);
    guest.write16(CONFIG, 4, 0x406);
    guest.write32(CONTROL, reg::INTR_ENABLE, 7);
    guest.calls();
    guest.write16(CONFIG, 0x60, 0xa810);
    assert_eq!(guest.calls(), ["reset"]);
    assert_eq!(guest.read16(CONFIG, 4), 0);
    assert_eq!(guest.read32(CONTROL, reg::INTR_ENABLE), 0);
    assert_eq!(guest.read32(CONTROL, reg::MAILBOX_LO), 0);
    guest.write32(CONTROL, reg::MAILBOX_LO, MAILBOX as u32);
    assert_eq!(guest.request(Opcode::GetInfo, &[]).0, Status::Ok, "memory stays");
    guest.function.change_interrupts(|irq| irq.trigger(IrqIndex::Intx, 0, &[true])).unwrap();
    assert_eq!(signals(&line), 1);
}

#[test]
fn no_state_of_a_vm_remains_for_the_next() {
    let mut guest = Guest::new();
    let (vector, fd) = event();
    guest.set_triggers(IrqIndex::Msi, vec![Some(fd)]);
    guest.write32(CONTROL, reg::INTR_ENABLE, 7);
    guest.write32(VRAM, 0x2000, 0x5ec2_e700);
    let map = mailbox::map_guest(crate::abi::mailbox::VA_START, &[(0x10_0000, 0x1000)]);
    assert_eq!(guest.request(Opcode::MapGuest, &map).0, Status::Ok);
    assert_eq!(guest.record.lock().unwrap().imports.len(), 1);

    guest.function.detach();
    {
        let record = guest.record.lock().unwrap();
        assert!(record.imports.is_empty() && record.mapped.is_empty());
        assert_eq!(record.interrupts, [false; 4]);
    }
    guest.function.attach();
    assert_eq!(guest.read32(VRAM, 0x2000), 0, "video memory is scrubbed");
    assert_eq!(guest.read32(CONTROL, reg::MAILBOX_LO), 0);
    guest.write32(CONTROL, reg::MAILBOX_LO, MAILBOX as u32);
    guest.write32(CONTROL, reg::MAILBOX_DOORBELL, 1);
    assert_eq!(guest.read32(CONTROL, reg::MAILBOX_STATUS), Status::BadMailbox as u32);
    guest.function.change_interrupts(|irq| irq.trigger(IrqIndex::Msi, 0, &[true])).unwrap();
    assert_eq!(signals(&vector), 0);
}

/// A VMM may keep its descriptors of video memory and of the doorbell page.
#[test]
fn a_vm_that_left_shares_no_memory_with_the_next() {
    let mut guest = Guest::new();
    guest.record.lock().unwrap().renewable = true;
    let keep = |guest: &Guest, index| -> File {
        guest
            .function
            .region(index)
            .unwrap()
            .mapping
            .unwrap()
            .fd
            .try_clone_to_owned()
            .unwrap()
            .into()
    };
    let kept = keep(&guest, VRAM);
    guest.write32(VRAM, 0, 0x0102_0304);
    guest.function.detach();
    guest.function.attach();
    assert_eq!(guest.read32(VRAM, 0), 0);
    guest.write32(VRAM, 0, 0x5ec2_e700);
    let mut word = [0; 4];
    kept.read_exact_at(&mut word, APERTURE_OFFSET).unwrap();
    assert_eq!(u32::from_le_bytes(word), 0x0102_0304, "its own word");
    kept.write_all_at(&[0xff; 4], APERTURE_OFFSET).unwrap();
    assert_eq!(guest.read32(VRAM, 0), 0x5ec2_e700);
    assert_eq!(guest.record.lock().unwrap().scrubbed, 0);
}

/// Returns a guest that has set registers of each kind.
fn busy() -> Guest {
    let mut guest = Guest::new();
    guest.write16(CONFIG, 4, 0x6);
    guest.write32(CONFIG, 0x10, 0xe000_0000);
    guest.write32(CONFIG, 0x24, 0x8);
    guest.write32(CONTROL, reg::INTR_ENABLE, 3);
    guest.set_mode(640, 480, 32);
    guest.write16(DISPLAY, 0x512, 480);
    guest
}

#[test]
fn saved_state_matches_the_golden_file_and_restores() {
    let golden = include_str!("../../../testdata/function-v1.json");
    let mut guest = busy();
    let state = guest.function.save();
    let text = serde_json::to_string_pretty(&state).unwrap() + "\n";
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/testdata/function-v1.json");
        std::fs::write(path, &text).unwrap();
    }
    assert_eq!(text, golden, "a change of the saved state needs a new version");

    let scanout = guest.function.scanout();
    let mut other = Guest::new();
    let read: SavedFunction = serde_json::from_str(golden).unwrap();
    other.function.restore(&read).unwrap();
    assert_eq!(other.function.save(), state);
    assert_eq!(other.function.scanout(), scanout);
    assert_eq!(other.read32(CONTROL, reg::MAILBOX_LO), MAILBOX as u32);
    guest.function.detach();
    assert_ne!(guest.function.save(), state);
}

#[test]
fn an_unreachable_state_is_refused() {
    let golden = include_str!("../../../testdata/function-v1.json");
    for (from, to) in [
        ("\"DISPI_XRES\": 640", "\"DISPI_XRES\": 801"),
        ("\"DISPI_BPP\": 32", "\"DISPI_BPP\": 7"),
        ("\"DISPI_XRES\": 640", "\"DISPI_XRES\": 0"),
        ("\"COMMAND\": 6", "\"COMMAND\": 7"),
        ("\"BAR0\": 3758096392", "\"BAR0\": 3758096393"),
        ("\"INTR_ENABLE\": 3", "\"INTR_ENABLE\": 31"),
        ("\"INTR_ENABLE\": 3,", ""),
        ("\"QEXT_ENDIAN\": 505290270", "\"QEXT_ENDIAN\": 1"),
    ] {
        assert!(golden.contains(from), "{from}");
        let state: SavedFunction = serde_json::from_str(&golden.replace(from, to)).unwrap();
        let mut guest = Guest::new();
        let before = guest.function.save();
        let result = guest.function.restore(&state);
        assert!(matches!(result, Err(StateError::Registers { .. })), "{to}: {result:?}");
        assert_eq!(guest.function.save(), before);
    }
    let other: SavedFunction =
        serde_json::from_str(&golden.replace("\"version\": 1", "\"version\": 2")).unwrap();
    assert_eq!(Guest::new().function.restore(&other), Err(StateError::Version(2)));
    let with_head: SavedFunction = serde_json::from_str(golden).unwrap();
    assert!(Guest::with(false).function.restore(&with_head).is_err());
}
