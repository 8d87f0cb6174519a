//! Decoder of pushbuffers: method headers and their data.

use mdev_core::abi::host::{DMA_NOP, MethodHeader, SecOp};

use crate::mediator::fault::Fault;

/// A method and its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Call {
    /// Subchannel, 0 to 7.
    pub subchannel: u8,
    /// Byte offset of the method.
    pub method: u32,
    /// Data of the method.
    pub data: u32,
}

/// Meaning of a word of a pushbuffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded {
    /// A header, or a word without effect: no method yet.
    Header,
    /// A method to execute.
    Call(Call),
    /// The rest of the segment is skipped.
    EndSegment,
}

/// State between two words.
#[derive(Clone, Copy, Debug, Default)]
pub struct Decoder {
    header: Option<MethodHeader>,
}

impl Decoder {
    /// Returns the header whose data follows.
    pub fn header(self) -> Option<MethodHeader> {
        self.header
    }

    /// Returns the decoder in the midst of the data of a header, or `None` if no pushbuffer leads
    /// to this state.
    pub fn within(header: Option<MethodHeader>) -> Option<Self> {
        let valid = header.is_none_or(|header| {
            let data = matches!(header.op, SecOp::Inc | SecOp::NonInc | SecOp::OneInc);
            let encodable = MethodHeader::decode(header.encode()) == Some(header);
            data && encodable && header.count > 0
        });
        valid.then_some(Self { header })
    }

    /// Decodes the next word.
    pub fn decode(&mut self, word: u32) -> Result<Decoded, Fault> {
        let Some(header) = &mut self.header else {
            if word == DMA_NOP {
                return Ok(Decoded::Header);
            }
            let header = MethodHeader::decode(word).ok_or(Fault::host(word))?;
            let MethodHeader { op, subchannel, method, count } = header;
            return Ok(match op {
                SecOp::Immediate => Decoded::Call(Call { subchannel, method, data: count }),
                SecOp::EndSegment => Decoded::EndSegment,
                SecOp::Inc | SecOp::NonInc | SecOp::OneInc => {
                    self.header = (count > 0).then_some(header);
                    Decoded::Header
                }
            });
        };
        let MethodHeader { op, subchannel, method, .. } = *header;
        match op {
            SecOp::Inc => header.method = (method + 4) & 0x3fff,
            SecOp::OneInc => {
                header.method = (method + 4) & 0x3fff;
                header.op = SecOp::NonInc;
            }
            SecOp::NonInc | SecOp::Immediate | SecOp::EndSegment => {}
        }
        header.count -= 1;
        if header.count == 0 {
            self.header = None;
        }
        Ok(Decoded::Call(Call { subchannel, method, data: word }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn decode(words: &[u32]) -> Vec<(u32, u32)> {
        let mut decoder = Decoder::default();
        let calls = words.iter().filter_map(|word| match decoder.decode(*word).unwrap() {
            Decoded::Call(call) => Some((call.method, call.data)),
            Decoded::Header | Decoded::EndSegment => None,
        });
        calls.collect()
    }

    fn header(op: SecOp, method: u32, count: u32) -> u32 {
        MethodHeader { op, subchannel: 4, method, count }.encode()
    }

    #[test]
    fn headers_address_their_data() {
        assert_eq!(decode(&[header(SecOp::Inc, 0x400, 2), 7, 8]), [(0x400, 7), (0x404, 8)]);
        assert_eq!(decode(&[header(SecOp::NonInc, 0x400, 2), 7, 8]), [(0x400, 7), (0x400, 8)]);
        let once = [header(SecOp::OneInc, 0x400, 3), 7, 8, 9];
        assert_eq!(decode(&once), [(0x400, 7), (0x404, 8), (0x404, 9)]);
        assert_eq!(decode(&[header(SecOp::Immediate, 0x110, 5)]), [(0x110, 5)]);
        assert_eq!(
            decode(&[header(SecOp::Inc, 0x400, 0), header(SecOp::Immediate, 8, 1)]),
            [(8, 1)]
        );
        // Zeros are no headers, and may be data.
        assert_eq!(decode(&[0, 0, header(SecOp::Inc, 0x400, 1), 0, 0]), [(0x400, 0)]);
    }

    proptest! {
        #[test]
        fn all_words_decode_or_fault(words in proptest::collection::vec(any::<u32>(), 0..100)) {
            let mut decoder = Decoder::default();
            for word in words {
                if let Ok(Decoded::Call(call)) = decoder.decode(word) {
                    prop_assert!(call.subchannel < 8 && call.method < 0x4000 && call.method % 4 == 0);
                }
            }
        }
    }
}
