//! Encoding of messages.
//!
//! A numbered packet begins with the number, in eight bytes.

use serde::Serialize;
use serde::de::DeserializeOwned;

/// Maximum length of a packet, in bytes. The longest parameters of the driver have 64 KiB.
pub const MAX_PACKET: usize = 80 << 10;

/// A packet that is no message.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    /// Invalid encoding.
    #[error("Cannot decode a message: {0}")]
    Invalid(#[from] postcard::Error),
    /// Bytes after the message.
    #[error("A message has trailing bytes")]
    Trailing,
    /// Fewer bytes than a number has.
    #[error("A message has no number")]
    Unnumbered,
}

/// Encodes a message.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_stdvec(message)
}

/// Decodes a message. Bytes after its end are an error.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, DecodeError> {
    match postcard::take_from_bytes(bytes)? {
        (message, []) => Ok(message),
        _ => Err(DecodeError::Trailing),
    }
}

/// Encodes a message with its number.
pub fn encode_numbered<T: Serialize>(number: u64, message: &T) -> Result<Vec<u8>, postcard::Error> {
    postcard::to_extend(message, number.to_le_bytes().to_vec())
}

/// Decodes a message with its number. Bytes after its end are an error.
pub fn decode_numbered<T: DeserializeOwned>(bytes: &[u8]) -> Result<(u64, T), DecodeError> {
    let (number, message) = bytes.split_first_chunk().ok_or(DecodeError::Unnumbered)?;
    Ok((u64::from_le_bytes(*number), decode(message)?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Block, Done, FileId, IoctlRequest, Range, Refused, Reply, Request, SharedRange};

    proptest! {
        #[test]
        fn any_bytes_decode_or_are_refused(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(request) = decode::<Request>(&bytes) {
                prop_assert_eq!(decode::<Request>(&encode(&request).unwrap()).unwrap(), request);
            }
            if let Ok(reply) = decode::<Reply>(&bytes) {
                prop_assert_eq!(decode::<Reply>(&encode(&reply).unwrap()).unwrap(), reply);
            }
        }
    }

    #[test]
    fn messages_survive_the_wire() {
        let block = Block { address: 7, bytes: vec![1, 2, 3] };
        let request = Request::Ioctl(IoctlRequest {
            file: FileId(u64::MAX),
            request: 0xc020_462a,
            argument: vec![0; 32],
            blocks: vec![block.clone()],
            files: vec![(3, FileId(9))],
            shared: vec![SharedRange { range: Range { address: 4096, len: 8192 }, offset: 4096 }],
            refused: Refused { files: vec![-1], share: vec![Range { address: 0, len: 1 }] },
        });
        assert_eq!(decode::<Request>(&encode(&request).unwrap()).unwrap(), request);
        let reply = Reply::Done(Done { errno: 22, writes: vec![block], ..Default::default() });
        assert_eq!(decode::<Reply>(&encode(&reply).unwrap()).unwrap(), reply);
    }

    #[test]
    fn trailing_bytes_are_refused() {
        let mut bytes = encode(&Request::Hello { version: 1 }).unwrap();
        bytes.push(0);
        assert!(matches!(decode::<Request>(&bytes), Err(DecodeError::Trailing)));
        let numbered = [vec![0; 8], bytes].concat();
        assert!(matches!(decode_numbered::<Request>(&numbered), Err(DecodeError::Trailing)));
    }

    #[test]
    fn numbers_survive_the_wire() {
        for number in [0, 7, u64::MAX] {
            let bytes = encode_numbered(number, &Request::Identify).unwrap();
            assert_eq!(decode_numbered(&bytes).unwrap(), (number, Request::Identify));
        }
        let refused = encode(&Reply::Failed { errno: 16 }).unwrap();
        assert!(matches!(decode_numbered::<Reply>(&refused), Err(DecodeError::Unnumbered)));
    }

    #[test]
    fn a_hello_is_the_same_in_all_versions() {
        assert_eq!(encode(&Request::Hello { version: 4 }).unwrap(), [0, 4]);
        assert_eq!(encode(&Reply::Failed { errno: 71 }).unwrap(), [5, 0x8e, 1]);
    }
}
