use super::*;
use crate::abi::mailbox::{
    ChannelCreate, ChannelCreated, ChannelName, ChannelState, ENGINE_COMPUTE, Info, MAP_READ_ONLY,
    MAX_SCATTER, MapGuest, MapVram, Scatter, USERD_GUEST, USERD_VRAM, Unmap, VA_END, VA_START,
};
use crate::gpu::{Backing, Preamble};
use crate::ids::GpuVa;

/// Returns the payload of a `MapGuest` request.
pub(super) fn map_guest(va: u64, ranges: &[(u64, u64)]) -> Vec<u8> {
    let request = MapGuest { va, flags: 0, count: ranges.len() as u32 };
    let mut payload = request.as_bytes().to_vec();
    for (address, length) in ranges {
        payload.extend_from_slice(Scatter { address: *address, length: *length }.as_bytes());
    }
    payload
}

pub(super) fn channel_request() -> ChannelCreate {
    ChannelCreate {
        engine: ENGINE_COMPUTE,
        gpfifo_entries: 256,
        gpfifo_va: VA_START,
        userd: 0x20_0000,
        userd_aperture: USERD_GUEST,
        vector: 1,
        ..ChannelCreate::default()
    }
}

#[test]
fn info_and_cookie() {
    let mut guest = Guest::new();
    let (status, reply) = guest.request(Opcode::GetInfo, &[]);
    assert_eq!(status, Status::Ok);
    let info = Info::read_from_bytes(&reply).unwrap();
    assert_eq!(info.vram_bytes, 8 * MIB);
    assert_eq!((info.va_start, info.va_end), (VA_START, VA_END));
    assert_eq!(info.classes, [0xc86f, 0xc8b5, 0xcbc0]);
    let mut cookie = [0; 8];
    guest.ram.read_exact_at(&mut cookie, MAILBOX + 16).unwrap();
    assert_eq!(u64::from_le_bytes(cookie), 0x1234_5678_9abc);
}

#[test]
fn adjacent_guest_pages_are_mapped_together() {
    let mut guest = Guest::new();
    let list = [(0x10_0000, 0x1000), (0x10_1000, 0x3000), (0x40_0000, 0x2000)];
    assert_eq!(guest.request(Opcode::MapGuest, &map_guest(VA_START, &list)).0, Status::Ok);
    let mapped = guest.record.lock().unwrap().mapped.clone();
    let found: Vec<_> = mapped.iter().map(|(va, (len, ..))| (*va, *len)).collect();
    assert_eq!(found, [(VA_START, 0x4000), (VA_START + 0x4000, 0x2000)]);
    assert!(matches!(mapped[&VA_START].1, Backing::Guest { offset: 0x10_0000, .. }));

    let unmap = Unmap { va: VA_START, length: 0x6000 };
    assert_eq!(guest.request(Opcode::Unmap, unmap.as_bytes()).0, Status::Ok);
    assert_eq!(guest.request(Opcode::Unmap, unmap.as_bytes()).0, Status::NotFound);
}

#[test]
fn a_partly_failed_request_is_undone() {
    let mut guest = Guest::new();
    guest.record.lock().unwrap().maps_left = Some(1);
    let list = [(0x10_0000, 0x1000), (0x40_0000, 0x1000)];
    let map = map_guest(VA_START, &list);
    assert_eq!(guest.request(Opcode::MapGuest, &map).0, Status::Overlap);
    assert!(guest.record.lock().unwrap().mapped.is_empty());
}

#[test]
fn bad_maps_are_refused() {
    let mut guest = Guest::new();
    let page = |address| (address, 0x1000);
    for (va, list, status) in [
        (VA_START + 1, vec![page(0)], Status::Invalid),
        (VA_START, vec![], Status::Invalid),
        (VA_START, vec![(0, 0)], Status::Invalid),
        (VA_START, vec![(0x800, 0x1000)], Status::Invalid),
        (VA_START, vec![page(0); MAX_SCATTER + 1], Status::Invalid),
        (VA_START - 0x1000, vec![page(0)], Status::OutOfRange),
        (VA_END - 0x1000, vec![(0, 0x2000)], Status::OutOfRange),
        (u64::MAX - 0xfff, vec![page(0)], Status::OutOfRange),
        (VA_START, vec![page(RAM)], Status::OutOfRange),
        (VA_START, vec![(RAM - 0x1000, 0x2000)], Status::OutOfRange),
        (VA_START, vec![(0, !0xfff), (0, !0xfff)], Status::OutOfRange),
    ] {
        let mut payload = map_guest(va, &list);
        payload.truncate(PAGE_BYTES - PAYLOAD);
        assert_eq!(guest.request(Opcode::MapGuest, &payload).0, status, "{va:#x} {list:?}");
    }
    let mut flags = map_guest(VA_START, &[page(0)]);
    flags[8] = 2;
    assert_eq!(guest.request(Opcode::MapGuest, &flags).0, Status::Invalid);
    let vram = |offset, length, flags| MapVram { va: VA_START, offset, length, flags, reserved: 0 };
    for (request, status) in [
        (vram(0, 8 * MIB, MAP_READ_ONLY), Status::Ok),
        (vram(0x1000, 8 * MIB, 0), Status::OutOfRange),
        (vram(u64::MAX - 0xfff, 0x1000, 0), Status::OutOfRange),
        (vram(0, 0x10, 0), Status::Invalid),
        (vram(0, 0x1000, 8), Status::Invalid),
    ] {
        assert_eq!(guest.request(Opcode::MapVram, request.as_bytes()).0, status, "{request:?}");
    }
}

#[test]
fn channels_are_created_and_destroyed() {
    let mut guest = Guest::new();
    let (status, reply) = guest.request(Opcode::ChannelCreate, channel_request().as_bytes());
    assert_eq!(status, Status::Ok);
    let made = ChannelCreated::read_from_bytes(&reply).unwrap();
    assert_eq!(made.token, 0x100 + made.channel);
    let name = ChannelName { channel: made.channel, reserved: 0 };
    let (_, reply) = guest.request(Opcode::ChannelQuery, name.as_bytes());
    assert_eq!(ChannelState::read_from_bytes(&reply).unwrap().gp_get, 5);
    assert_eq!(guest.request(Opcode::ChannelDestroy, name.as_bytes()).0, Status::Ok);
    assert_eq!(guest.request(Opcode::ChannelQuery, name.as_bytes()).0, Status::NotFound);
}

#[test]
fn bad_channels_are_refused() {
    let mut guest = Guest::new();
    let good = channel_request();
    for (request, status) in [
        (ChannelCreate { engine: 7, ..good }, Status::Invalid),
        (ChannelCreate { gpfifo_entries: 0, ..good }, Status::Invalid),
        (ChannelCreate { gpfifo_entries: 3, ..good }, Status::Invalid),
        (ChannelCreate { gpfifo_entries: 1 << 17, ..good }, Status::Invalid),
        (ChannelCreate { gpfifo_va: VA_START + 4, ..good }, Status::Invalid),
        (ChannelCreate { gpfifo_va: 0, ..good }, Status::OutOfRange),
        (ChannelCreate { gpfifo_va: VA_END - 8, ..good }, Status::OutOfRange),
        (ChannelCreate { gpfifo_va: !7, ..good }, Status::OutOfRange),
        (ChannelCreate { userd: 0x100, ..good }, Status::Invalid),
        (ChannelCreate { userd: RAM, ..good }, Status::OutOfRange),
        (ChannelCreate { userd_aperture: USERD_VRAM, userd: 8 * MIB, ..good }, Status::OutOfRange),
        (ChannelCreate { userd_aperture: USERD_VRAM, userd: !511, ..good }, Status::OutOfRange),
        (ChannelCreate { userd_aperture: 2, ..good }, Status::Invalid),
        (ChannelCreate { vector: 4, ..good }, Status::Invalid),
        (ChannelCreate { reserved: 1, ..good }, Status::Invalid),
        (ChannelCreate { preamble_dwords: 1, preamble_va: 2, ..good }, Status::Invalid),
        (ChannelCreate { preamble_dwords: 1, preamble_va: VA_END, ..good }, Status::Invalid),
        (ChannelCreate { preamble_dwords: 1, preamble_va: !3, ..good }, Status::Invalid),
        (
            ChannelCreate { preamble_dwords: 1 << 21, preamble_va: VA_START, ..good },
            Status::Invalid,
        ),
    ] {
        let (got, _) = guest.request(Opcode::ChannelCreate, request.as_bytes());
        assert_eq!(got, status, "{request:?}");
    }
    assert!(guest.record.lock().unwrap().channels.is_empty());
}

#[test]
fn drivers_may_name_a_preamble() {
    let mut guest = Guest::new();
    let with = ChannelCreate { preamble_va: VA_START + 8, preamble_dwords: 5, ..channel_request() };
    assert_eq!(guest.request(Opcode::ChannelCreate, with.as_bytes()).0, Status::Ok);
    // Those of before do not know it.
    let short = &channel_request().as_bytes()[..ChannelCreate::SHORT_BYTES].to_vec();
    assert_eq!(guest.request(Opcode::ChannelCreate, short).0, Status::Ok);
    let longer = &with.as_bytes()[..ChannelCreate::SHORT_BYTES + 8].to_vec();
    assert_eq!(guest.request(Opcode::ChannelCreate, longer).0, Status::Invalid);
    let record = guest.record.lock().unwrap();
    let preambles: Vec<_> = record.channels.values().map(|channel| channel.preamble).collect();
    assert_eq!(preambles, [Preamble::new(GpuVa(VA_START + 8), 5), None]);
}

#[test]
fn payloads_of_a_wrong_length_are_refused() {
    let mut guest = Guest::new();
    for opcode in (1..=8).filter_map(Opcode::from_number) {
        assert_eq!(guest.request(opcode, &[0; 5]).0, Status::Invalid, "{opcode:?}");
    }
    let header = |opcode, request_bytes| Header { opcode, request_bytes, ..Header::default() };
    for (header, status) in [
        (header(0, 0), Status::UnknownOpcode),
        (header(9, 0), Status::UnknownOpcode),
        (header(1, u32::MAX), Status::Invalid),
        (header(1, (PAGE_BYTES - PAYLOAD + 1) as u32), Status::Invalid),
        (Header { reserved: 1, ..header(1, 0) }, Status::Invalid),
    ] {
        guest.ram.write_all_at(header.as_bytes(), MAILBOX).unwrap();
        assert_eq!(guest.ring().0, status, "{header:?}");
    }
}

#[test]
fn an_inaccessible_mailbox_is_reported_in_the_register() {
    let mut guest = Guest::new();
    let read_only = guest_ram(0x1000).1;
    let at = GuestPa(RAM);
    guest.function.dma_map(at, 0x1000, DmaAccess::READ, Some((read_only, 0))).unwrap();
    guest.calls();
    for address in [RAM, RAM + 0x1000, 0xffff_f000] {
        guest.write32(CONTROL, reg::MAILBOX_LO, address as u32);
        guest.write32(CONTROL, reg::MAILBOX_HI, 0);
        guest.write32(CONTROL, reg::MAILBOX_DOORBELL, 1);
        assert_eq!(guest.read32(CONTROL, reg::MAILBOX_STATUS), Status::BadMailbox as u32);
    }
    assert!(guest.calls().is_empty(), "no request was executed");
}

#[test]
fn unmapped_memory_is_released() {
    let mut guest = Guest::new();
    let map = map_guest(VA_START, &[(0x10_0000, 0x1000)]);
    assert_eq!(guest.request(Opcode::MapGuest, &map).0, Status::Ok);
    guest.function.dma_unmap(GuestPa(0), RAM).unwrap();
    assert!(guest.record.lock().unwrap().imports.is_empty());
    guest.write32(CONTROL, reg::MAILBOX_DOORBELL, 1);
    assert_eq!(guest.read32(CONTROL, reg::MAILBOX_STATUS), Status::BadMailbox as u32);
}
