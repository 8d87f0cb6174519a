//! Codec tests: golden bytes, round trips and garbage.

use proptest::prelude::*;
use vfio_user_server::dma::DmaUnmap;
use vfio_user_server::errno::Errno;
use vfio_user_server::irq::IrqAction;
use vfio_user_server::proto::caps::{Capabilities, TwinSocket};
use vfio_user_server::proto::header::{Command, MAX_DATA};
use vfio_user_server::proto::message::{
    Access, Feature, FeatureAccess, IrqData, MultiWrites, Request, SetIrqs,
};

fn encode(request: &Request<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    request.encode(&mut out);
    out
}

#[cfg(target_endian = "little")]
#[test]
fn golden_bytes() {
    let page = 4096_u64;
    let map = Request::DmaMap {
        address: 16 * page,
        size: page,
        offset: 2 * page,
        readable: true,
        writable: true,
    };
    let msi = SetIrqs {
        index: 1,
        start: 2,
        count: 3,
        action: IrqAction::Trigger,
        data: IrqData::Bool(&[1, 0, 1]),
    };
    let place = Access { region: 7, offset: 0x1122, count: 4 };
    let feature = Feature { index: 2, access: FeatureAccess::Set, data: &[9] };
    let golden: [(Request<'_>, &str); 15] = [
        (Request::Version { major: 0, minor: 1, data: b"{}\0" }, "00000100 7b7d00"),
        (map, "20000000 03000000 0020000000000000 0000010000000000 0010000000000000"),
        (
            Request::DmaUnmap(DmaUnmap::Range { address: page, size: page }),
            "18000000 00000000 0010000000000000 0010000000000000",
        ),
        (Request::DmaUnmap(DmaUnmap::All), "18000000 02000000 0000000000000000 0000000000000000"),
        (Request::GetInfo, "10000000 00000000 00000000 00000000"),
        (
            Request::GetRegionInfo { index: 4, argsz: 80 },
            "50000000 00000000 04000000 00000000 0000000000000000 0000000000000000",
        ),
        (Request::GetRegionIoFds { index: 4, argsz: 56 }, "38000000 00000000 04000000 00000000"),
        (Request::GetIrqInfo { index: 3 }, "10000000 00000000 03000000 00000000"),
        (Request::SetIrqs(msi), "17000000 22000000 01000000 02000000 03000000 010001"),
        (Request::RegionRead(place), "2211000000000000 07000000 04000000"),
        (Request::RegionWrite(place, &[1, 2, 3, 4]), "2211000000000000 07000000 04000000 01020304"),
        (Request::Feature { argsz: 12, feature }, "0c000000 02000200 09"),
        (
            Request::DmaUnmapDirty { address: page, size: page, page_size: page, bitmap: 8 },
            "30000000 01000000 0010000000000000 0010000000000000 0010000000000000 0800000000000000",
        ),
        (Request::MigDataRead(0x100), "08010000 00010000"),
        (Request::MigDataWrite(&[1, 2]), "08000000 02000000 0102"),
    ];
    for (request, expected) in golden {
        let expected = expected.replace(' ', "");
        let expected: Vec<u8> = (0..expected.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&expected[at..at + 2], 16).unwrap())
            .collect();
        assert_eq!(encode(&request), expected, "{request:?}");
        assert_eq!(Request::decode(request.command() as u16, &encode(&request)), Ok(request));
    }
    assert!(encode(&Request::Reset).is_empty());
}

fn action() -> impl Strategy<Value = IrqAction> {
    prop_oneof![Just(IrqAction::Mask), Just(IrqAction::Unmask), Just(IrqAction::Trigger)]
}

/// Calls `check` with a request of each kind, made from the arguments.
fn check_requests(
    data: &[u8],
    numbers: [u32; 4],
    wide: [u64; 3],
    action: IrqAction,
    check: impl Fn(Request<'_>) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let [a, b, c, d] = numbers;
    let page = |value: u64| (value >> 13) << 12;
    let size = page(wide[1] >> 8).max(4096);
    let place = Access { region: a, offset: wide[0] >> 1, count: b % (MAX_DATA + 1) };
    let (start, count) = (c >> 1, (d >> 1).max(1));
    let irqs = |count, data| SetIrqs { index: a, start, count, action, data };
    let access = match b % 4 {
        0 => FeatureAccess::Get,
        1 => FeatureAccess::Set,
        _ => FeatureAccess::Probe { get: c & 1 != 0, set: d & 1 != 0 },
    };
    check(Request::Version { major: a as u16, minor: b as u16, data })?;
    check(Request::DmaMap {
        address: page(wide[0] >> 1),
        size,
        offset: page(wide[2] >> 2),
        readable: true,
        writable: a & 1 != 0,
    })?;
    check(Request::DmaUnmap(DmaUnmap::Range { address: wide[0] >> 1, size }))?;
    check(Request::DmaUnmap(DmaUnmap::All))?;
    check(Request::DmaUnmapDirty {
        address: wide[0] >> 1,
        size: size % (1 << 30) + 1,
        page_size: 4096 << (a % 20),
        bitmap: 1 << 20 >> (b % 6),
    })?;
    check(Request::MigDataRead(b % (MAX_DATA + 1)))?;
    check(Request::MigDataWrite(data))?;
    check(Request::GetInfo)?;
    check(Request::GetRegionInfo { index: a, argsz: b.max(32) })?;
    check(Request::GetRegionIoFds { index: a, argsz: b.max(16) })?;
    check(Request::GetIrqInfo { index: a })?;
    check(Request::SetIrqs(irqs(count, IrqData::None)))?;
    check(Request::SetIrqs(irqs(count, IrqData::EventFd)))?;
    if !data.is_empty() {
        check(Request::SetIrqs(irqs(data.len() as u32, IrqData::Bool(data))))?;
    }
    check(Request::RegionRead(place))?;
    check(Request::RegionWrite(Access { count: data.len() as u32, ..place }, data))?;
    check(Request::Reset)?;
    check(Request::Feature { argsz: c.max(8), feature: Feature { index: a as u16, access, data } })
}

/// Returns the payload of REGION_WRITE_MULTI.
fn multi_payload(writes: &[(Access, Vec<u8>)]) -> Vec<u8> {
    let mut bytes = (writes.len() as u64).to_ne_bytes().to_vec();
    for (access, data) in writes {
        bytes.extend_from_slice(&access.offset.to_ne_bytes());
        bytes.extend_from_slice(&access.region.to_ne_bytes());
        bytes.extend_from_slice(&access.count.to_ne_bytes());
        bytes.extend_from_slice(data);
        bytes.resize(bytes.len() + 8 - data.len(), 0xaa);
    }
    bytes
}

/// Decodes the writes of REGION_WRITE_MULTI.
fn decode_writes(writes: MultiWrites<'_>) -> Result<Vec<(Access, Vec<u8>)>, Errno> {
    writes.iter().map(|item| item.map(|(access, data)| (access, data.to_vec()))).collect()
}

proptest! {
    #[test]
    fn encoded_requests_decode_to_the_same(
        data in prop::collection::vec(any::<u8>(), 0..64),
        numbers: [u32; 4],
        wide: [u64; 3],
        action in action(),
    ) {
        check_requests(&data, numbers, wide, action, |request| {
            let bytes = encode(&request);
            prop_assert_eq!(Request::decode(request.command() as u16, &bytes), Ok(request));
            Ok(())
        })?;
    }

    #[test]
    fn encoded_multi_writes_decode_to_the_same(
        list in prop::collection::vec(
            (any::<u32>(), any::<u32>(), prop::collection::vec(any::<u8>(), 0..=8)),
            0..20,
        ),
    ) {
        let list: Vec<(Access, Vec<u8>)> = list
            .into_iter()
            .map(|(region, offset, data)| {
                (Access { region, offset: offset.into(), count: data.len() as u32 }, data)
            })
            .collect();
        let bytes = multi_payload(&list);
        let Ok(Request::RegionWriteMulti(decoded)) =
            Request::decode(Command::RegionWriteMulti as u16, &bytes)
        else {
            return Err(TestCaseError::fail("not decoded"));
        };
        prop_assert_eq!(&encode(&Request::RegionWriteMulti(decoded)), &bytes);
        prop_assert_eq!(decode_writes(decoded), Ok(list));
    }

    #[test]
    fn garbage_is_refused_or_decodes_consistently(
        command in 0_u16..20,
        payload in prop::collection::vec(prop_oneof![3 => Just(0_u8), 1 => any::<u8>()], 0..200),
    ) {
        if let Ok(request) = Request::decode(command, &payload) {
            prop_assert_eq!(request.command() as u16, command);
            let again = encode(&request);
            // Encoding sets argsz to the minimum and omits bytes after fixed structures.
            prop_assert_eq!(Request::decode(command, &again), Ok(request));
            if let Request::RegionWriteMulti(list) = request {
                let _ = decode_writes(list);
            }
        }
        let _ = Capabilities::decode(&payload);
    }

    #[test]
    fn encoded_capabilities_decode_to_the_same(
        max_msg_fds: Option<u64>,
        max_data_xfer_size: Option<u64>,
        max_dma_maps: Option<u64>,
        pgsizes: Option<u64>,
        write_multiple: Option<bool>,
        twin: Option<(bool, Option<u64>)>,
        room in 0_usize..200,
    ) {
        let caps = Capabilities {
            max_msg_fds, max_data_xfer_size, max_dma_maps, pgsizes, write_multiple,
            twin_socket: twin.map(|(supported, fd_index)| TwinSocket { supported, fd_index }),
        };
        let mut bytes = Vec::new();
        caps.encode(&mut bytes);
        prop_assert_eq!(Capabilities::decode(&bytes), Ok(caps));
        let mut within = Vec::new();
        let has_twin = caps.encode_within(room, &mut within);
        prop_assert!(within.len() <= room);
        let decoded = Capabilities::decode(&within).unwrap();
        prop_assert_eq!(decoded.twin_socket.is_some(), has_twin);
    }
}

#[test]
fn the_example_device_has_less_than_a_hundred_lines() {
    let lines = include_str!("../examples/scratch.rs").lines().count();
    assert!(lines < 100, "{lines}");
}
