//! Packets on a vGPU's socket for programs decode to messages that encode to the same, or fail.
#![no_main]

use cuda_socket::calls::NodeKind;
use cuda_socket::{CallShape, Reply, Request, decode, decode_numbered, encode, encode_numbered};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(request) = decode::<Request>(data) {
        let bytes = encode(&request).expect("a decoded request can be encoded");
        assert_eq!(decode::<Request>(&bytes).ok(), Some(request));
    }
    if let Ok((number, request)) = decode_numbered::<Request>(data) {
        let bytes = encode_numbered(number, &request).expect("it can be encoded");
        assert_eq!(decode_numbered::<Request>(&bytes).ok(), Some((number, request)));
    }
    if let Ok(reply) = decode::<Reply>(data) {
        let bytes = encode(&reply).expect("a decoded reply can be encoded");
        assert_eq!(decode::<Reply>(&bytes).ok().as_ref(), Some(&reply));
        if let Reply::Welcome(welcome) = reply {
            welcome.calls.iter().for_each(|shape| check_shape(shape, data));
        }
    }
});

/// Finds what any argument points to, by a shape of any offsets.
fn check_shape(shape: &CallShape, argument: &[u8]) {
    if let Some(range) = shape.range_in(argument) {
        assert!(range.address != 0 && range.len != 0);
    }
    assert!(shape.fd_in(argument).is_none_or(|fd| fd >= 0));
    let request = argument.first_chunk().map_or(0, |word| u32::from_le_bytes(*word));
    let _ = (shape.is_of(NodeKind::Rm, request), shape.argument_len(request));
}
