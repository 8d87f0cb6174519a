//! Saving and restoring a vGPU, with the memory of another VMM.

use super::mailbox::{channel_request, map_guest};
use super::*;
use crate::abi::mailbox::{MapVram, VA_START};
use crate::device::{ConfigWrite, RestoreError, SavedVgpu};
use crate::gpu::{Backing, ChannelSpec};

/// Start of a mapping of video memory.
const VRAM_VA: u64 = VA_START + (1 << 30);

/// Returns a guest with mappings, a channel and a picture.
pub(super) fn busy() -> Guest {
    let mut guest = Guest::new();
    let list = [(0x10_0000, 0x1000), (0x40_0000, 0x2000)];
    assert_eq!(guest.request(Opcode::MapGuest, &map_guest(VA_START, &list)).0, Status::Ok);
    let vram = MapVram { va: VRAM_VA, offset: 0x3000, length: 0x1000, ..MapVram::default() };
    assert_eq!(guest.request(Opcode::MapVram, vram.as_bytes()).0, Status::Ok);
    let channel = channel_request();
    assert_eq!(guest.request(Opcode::ChannelCreate, channel.as_bytes()).0, Status::Ok);
    guest.write32(CONFIG, 0x10, 0xe000_0000);
    guest.write32(CONFIG, 0x24, 0x8);
    guest.write16(CONFIG, 4, 0x6);
    guest.write32(CONTROL, reg::INTR_ENABLE, 3);
    guest
}

fn save(guest: &mut Guest) -> SavedVgpu {
    guest.function.pause().unwrap();
    guest.function.save_vgpu().unwrap()
}

#[test]
fn a_restored_vgpu_uses_the_memory_of_its_own_vmm() {
    let mut guest = busy();
    let saved = save(&mut guest);
    // The other VMM splits the memory in two, and has registered other memory before.
    let (client, record) = Recorder::new();
    let mut function = VirtualFunction::new(&spec(true), client).unwrap();
    let both = DmaAccess::READ | DmaAccess::WRITE;
    for (start, len) in [(0, 0x40_1000), (0x40_1000, RAM - 0x40_1000)] {
        let (_, fd) = guest_ram(len);
        function.dma_map(GuestPa(start), len, both, Some((fd, 0))).unwrap();
    }
    function.restore_vgpu(&saved).unwrap();
    assert!(record.lock().unwrap().paused, "until it is resumed");
    assert!(function.warnings().iter().any(|line| line.contains("`vgpuctl resume`")));
    let mapped: Vec<_> = record
        .lock()
        .unwrap()
        .mapped
        .iter()
        .map(|(va, (len, backing, _))| (*va, *len, backing.offset()))
        .collect();
    let expected = [
        (VA_START, 0x1000, 0x10_0000),
        (VA_START + 0x1000, 0x1000, 0x40_0000),
        (VA_START + 0x2000, 0x1000, 0),
        (VRAM_VA, 0x1000, 0x3000),
    ];
    assert_eq!(mapped, expected);
    let before = guest.record.lock().unwrap().channels.clone();
    let after = record.lock().unwrap().channels.clone();
    assert!(before.keys().eq(after.keys()), "the guest knows the channels by their ids");
    function.resume().unwrap();
    assert!(!function.warnings().iter().any(|line| line.contains("paused")));
    assert!(!record.lock().unwrap().paused);
    // What a VMM has to know: addresses first, then what enables them.
    let writes = function.config_writes();
    assert_eq!(writes[0], ConfigWrite { offset: 0x10, value: 0xe000_0008 });
    assert_eq!(writes.last(), Some(&ConfigWrite { offset: 4, value: 6 }));
    let msi = writes[writes.len() - 2];
    assert_eq!((msi.offset, msi.value & 0xff), (0x48, 5), "the capability's id: {writes:x?}");
}

#[test]
fn a_state_that_no_guest_can_cause_leaves_a_vgpu_that_was_reset() {
    let mut guest = busy();
    let good = save(&mut guest);
    guest.function.resume().unwrap();
    let with = |change: &dyn Fn(&mut SavedVgpu)| {
        let mut saved = good.clone();
        change(&mut saved);
        saved
    };
    let bad: [&dyn Fn(&mut SavedVgpu); 11] = [
        &|saved| saved.imports.clear(),
        &|saved| saved.imports[0].len = 0x1000,
        &|saved| saved.imports[0].address = GuestPa(RAM),
        &|saved| saved.imports[0].address = GuestPa(u64::MAX),
        &|saved| saved.client.mappings[0].len = 0,
        &|saved| saved.client.mappings[0].len = 0x1234,
        &|saved| saved.client.mappings[0].va.0 = u64::MAX - 0xfff,
        &|saved| saved.client.mappings[0].backing = Backing::Vram { offset: 8 * MIB },
        &|saved| saved.client.channels[0].spec.gpfifo_entries = 3,
        &|saved| saved.client.channels[0].spec.userd = Backing::Vram { offset: u64::MAX - 511 },
        &|saved| {
            let channel = saved.client.channels[0].clone();
            saved.client.channels.push(channel);
        },
    ];
    for (number, change) in bad.into_iter().enumerate() {
        let refused = guest.function.restore_vgpu(&with(change));
        assert!(matches!(refused, Err(RestoreError::Memory | RestoreError::Gpu(_))), "{number}");
        let record = guest.record.lock().unwrap();
        let left: Vec<&ChannelSpec> = record.channels.values().collect();
        assert!(left.is_empty() && record.mapped.is_empty() && !record.paused, "{number}");
    }
    guest.function.restore_vgpu(&good).unwrap();
}

#[test]
fn a_lost_gpu_is_not_saved() {
    let mut guest = busy();
    guest.record.lock().unwrap().lost = true;
    assert_eq!(guest.request(Opcode::GetInfo, &[]).0, Status::Ok);
    guest.function.reset();
    assert!(guest.function.pause().is_err());
}
