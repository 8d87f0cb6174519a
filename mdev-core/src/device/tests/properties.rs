use proptest::prelude::*;

use super::*;

/// Access of a session to a region.
#[derive(Clone, Debug)]
enum Access {
    Read(u32, u64, usize),
    Write(u32, u64, Vec<u8>),
}

fn access() -> impl Strategy<Value = Access> {
    let offset = prop_oneof![0u64..0x700, 0u64..0x5000, any::<u64>()];
    let data = prop::collection::vec(any::<u8>(), 0..20);
    prop_oneof![
        (0u32..10, offset.clone(), 0usize..20).prop_map(|(r, o, n)| Access::Read(r, o, n)),
        (0u32..10, offset, data).prop_map(|(r, o, d)| Access::Write(r, o, d)),
    ]
}

/// Returns mailbox pages: random bytes, often with a valid header.
fn page() -> impl Strategy<Value = Vec<u8>> {
    let noise = prop::collection::vec(any::<u8>(), 128);
    let small = prop::collection::vec(prop_oneof![Just(0u8), Just(1), Just(0x10), any::<u8>()], 96);
    let lengths = prop_oneof![Just(0u32), Just(8), Just(16), Just(32), Just(48), any::<u32>()];
    prop_oneof![
        noise,
        (0u32..10, lengths, small).prop_map(|(opcode, request_bytes, payload)| {
            let header = Header { opcode, request_bytes, ..Header::default() };
            [header.as_bytes(), &payload].concat()
        }),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_sequence_of_accesses_panics_or_leaves_the_framebuffer(
        display: bool,
        accesses in prop::collection::vec(access(), 0..200),
    ) {
        let mut guest = Guest::with(display);
        for access in accesses {
            match access {
                Access::Read(region, offset, len) => {
                    let _ = guest.function.region_read(region, offset, &mut vec![0; len]);
                }
                Access::Write(region, offset, data) => {
                    let _ = guest.function.region_write(region, offset, &data);
                }
            }
            let scanout = guest.function.scanout();
            if scanout.enabled {
                let row = u64::from(scanout.width * scanout.bits_per_pixel.div_ceil(8));
                let rows = u64::from(scanout.height - 1) * u64::from(scanout.stride);
                prop_assert!(scanout.offset + rows + row <= 4 * MIB);
            }
        }
        let state = guest.function.save();
        prop_assert_eq!(guest.function.restore(&state), Ok(()), "reachable states restore");
        prop_assert_eq!(guest.function.save(), state);
    }

    #[test]
    fn every_mailbox_page_gets_a_status(pages in prop::collection::vec(page(), 1..40)) {
        let mut guest = Guest::new();
        for page in pages {
            guest.ram.write_all_at(&page, MAILBOX).unwrap();
            guest.ram.write_all_at(&[0xff; 4], MAILBOX + 4).unwrap();
            let (status, _) = guest.ring();
            prop_assert!(status != Status::Internal && status != Status::BadMailbox);
        }
    }

    #[test]
    fn dma_maps_and_unmaps_never_panic(
        operations in prop::collection::vec((any::<bool>(), 0u64..64, 0u64..8, any::<bool>()), 0..80)
    ) {
        let mut guest = Guest::new();
        for (map, page, pages, file) in operations {
            let (iova, size) = (GuestPa(RAM + page * 4096), pages * 4096);
            if map {
                let file = file.then(|| (guest_ram(size).1, 0));
                let access = DmaAccess::READ | DmaAccess::WRITE;
                let _ = guest.function.dma_map(iova, size, access, file);
            } else {
                let _ = guest.function.dma_unmap(iova, size);
            }
            let _ = guest.function.warnings();
        }
        guest.function.dma_unmap_all();
        prop_assert!(guest.record.lock().unwrap().imports.is_empty());
    }
}
