//! Payloads of all commands decode consistently or fail.
#![no_main]

use libfuzzer_sys::fuzz_target;
use vfio_user_server::proto::caps::Capabilities;
use vfio_user_server::proto::header::{Header, MAX_DATA, MAX_MESSAGE};
use vfio_user_server::proto::message::{IrqData, Request};
use zerocopy::FromBytes;

fuzz_target!(|data: &[u8]| {
    if let Ok((header, _)) = Header::read_from_prefix(data) {
        let valid = header.has_valid_size();
        assert_eq!(valid, (Header::SIZE..=MAX_MESSAGE).contains(&(header.size as usize)));
        let _ = (header.kind(), header.wants_no_reply(), header.failure());
    }
    let Some((command, payload)) = data.split_first_chunk::<2>() else { return };
    match Request::decode(u16::from_le_bytes(*command), payload) {
        Ok(Request::Version { data, .. }) => check_capabilities(data),
        Ok(Request::DmaMap { address, size, offset, readable, writable }) => {
            assert!(size > 0 && (address | size | offset) % 4096 == 0 && (readable || writable));
            assert!(address.checked_add(size - 1).is_some() && offset.checked_add(size).is_some());
        }
        Ok(Request::SetIrqs(set)) => {
            assert!(set.start.checked_add(set.count).is_some());
            if let IrqData::Bool(selected) = set.data {
                assert_eq!(selected.len(), set.count as usize);
            }
        }
        Ok(Request::RegionRead(access)) => {
            assert!(access.count <= MAX_DATA);
            assert!(access.offset.checked_add(access.count.into()).is_some());
        }
        Ok(Request::RegionWrite(access, data)) => assert_eq!(access.count as usize, data.len()),
        Ok(Request::RegionWriteMulti(writes)) => {
            assert_eq!(writes.iter().count(), writes.len());
            for (access, data) in writes.iter().flatten() {
                assert!(data.len() <= 8 && access.count as usize == data.len());
            }
        }
        _ => {}
    }
    check_capabilities(payload);
});

/// Checks that decoded capabilities survive encoding.
fn check_capabilities(data: &[u8]) {
    let Ok(proposed) = Capabilities::decode(data) else { return };
    let common = Capabilities::SERVER.intersection(proposed);
    let mut encoded = Vec::new();
    common.encode(&mut encoded);
    assert_eq!(Capabilities::decode(&encoded), Ok(common));
}
