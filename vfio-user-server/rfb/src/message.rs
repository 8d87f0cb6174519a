//! Parser of client messages.
//!
//! Every length is checked before data is awaited or stored. Clipboard text is discarded, because
//! the server does not support the guest's clipboard.

use crate::pixels::{BadFormat, PixelFormat};

/// Longest message that is buffered, in bytes. Longer data is skipped.
pub const MAX_MESSAGE: usize = 4 + 4 * MAX_ENCODINGS;

/// Limit of encodings in a message. A few dozen exist.
const MAX_ENCODINGS: usize = 1024;

/// Longest clipboard text that is skipped, in bytes.
const MAX_TEXT: u32 = 1 << 20;

/// Client message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Pixel format for updates.
    SetPixelFormat(PixelFormat),
    /// Supported encodings, in order of preference.
    SetEncodings(Vec<i32>),
    /// Request for an update. The requested rectangle is ignored: an update contains all changes.
    UpdateRequest {
        /// Whether only changes are requested.
        incremental: bool,
    },
    /// Key event with a keysym.
    Key {
        /// Whether the key is pressed; false: released.
        down: bool,
        /// X11 keysym.
        keysym: u32,
    },
    /// Key event with a scan code (QEMU's extension).
    ScanCode {
        /// Whether the key is pressed; false: released.
        down: bool,
        /// PC scan code, with 0x80 for the prefix 0xe0.
        code: u32,
    },
    /// Pointer event.
    Pointer {
        /// Held buttons, as bits.
        buttons: u8,
        /// Horizontal position, in pixels.
        x: u16,
        /// Vertical position, in pixels.
        y: u16,
    },
    /// Number of following bytes to skip.
    Skip(usize),
}

/// Protocol violation of a viewer, which ends the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// Unknown message type.
    #[error("The viewer sent a message of unknown type {0}")]
    Type(u8),
    /// Unknown type of QEMU's extension.
    #[error("The viewer sent an extended message of unknown type {0}")]
    Extended(u8),
    /// Too many encodings.
    #[error("The viewer lists {0} encodings; the limit is {MAX_ENCODINGS}")]
    Encodings(u16),
    /// Clipboard text that is too long.
    #[error("The viewer's clipboard has {0} bytes; the limit is {MAX_TEXT}")]
    Text(u32),
    /// Unsupported pixel format.
    #[error(transparent)]
    Format(#[from] BadFormat),
}

/// Parses the message at the beginning of `bytes` and returns it with its length; `None` while it
/// is incomplete.
pub fn parse(bytes: &[u8]) -> Result<Option<(Message, usize)>, Violation> {
    let Some((kind, rest)) = bytes.split_first() else { return Ok(None) };
    Ok(match kind {
        0 => match rest.first_chunk::<19>() {
            Some([_, _, _, format @ ..]) => {
                Some((Message::SetPixelFormat(PixelFormat::parse(format)?), 20))
            }
            None => None,
        },
        2 => encodings(rest)?,
        3 => rest.first_chunk::<9>().map(|[incremental, ..]| {
            (Message::UpdateRequest { incremental: *incremental != 0 }, 10)
        }),
        4 => rest.first_chunk::<7>().map(|[down, _, _, keysym @ ..]| {
            (Message::Key { down: *down != 0, keysym: u32::from_be_bytes(*keysym) }, 8)
        }),
        5 => rest.first_chunk::<5>().map(|[buttons, x0, x1, y0, y1]| {
            let (x, y) = (u16::from_be_bytes([*x0, *x1]), u16::from_be_bytes([*y0, *y1]));
            (Message::Pointer { buttons: *buttons, x, y }, 6)
        }),
        6 => match rest.first_chunk::<7>() {
            Some([_, _, _, length @ ..]) => match u32::from_be_bytes(*length) {
                long if long > MAX_TEXT => return Err(Violation::Text(long)),
                length => Some((Message::Skip(length as usize), 8)),
            },
            None => None,
        },
        255 => qemu(rest)?,
        other => return Err(Violation::Type(*other)),
    })
}

fn encodings(rest: &[u8]) -> Result<Option<(Message, usize)>, Violation> {
    let Some(([_, high, low], list)) = rest.split_first_chunk::<3>() else { return Ok(None) };
    let count = u16::from_be_bytes([*high, *low]);
    if usize::from(count) > MAX_ENCODINGS {
        return Err(Violation::Encodings(count));
    }
    let length = 4 * usize::from(count);
    Ok(list.get(..length).map(|list| {
        let (numbers, _) = list.as_chunks::<4>();
        let numbers = numbers.iter().map(|number| i32::from_be_bytes(*number)).collect();
        (Message::SetEncodings(numbers), 4 + length)
    }))
}

fn qemu(rest: &[u8]) -> Result<Option<(Message, usize)>, Violation> {
    match rest.first() {
        None => return Ok(None),
        Some(0) => {}
        Some(other) => return Err(Violation::Extended(*other)),
    }
    Ok(rest.first_chunk::<11>().map(|[_, high, low, _, _, _, _, code @ ..]| {
        let down = u16::from_be_bytes([*high, *low]) != 0;
        (Message::ScanCode { down, code: u32::from_be_bytes(*code) }, 12)
    }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_are_parsed_as_in_the_rfc() {
        let parsed = |bytes: &[u8]| parse(bytes).unwrap().unwrap();
        let encodings = [2, 0, 0, 2, 0, 0, 0, 16, 0xff, 0xff, 0xff, 0x21];
        assert_eq!(parsed(&encodings), (Message::SetEncodings(vec![16, -223]), 12));
        let update = [3, 1, 0, 0, 0, 0, 7, 128, 4, 176];
        assert_eq!(parsed(&update), (Message::UpdateRequest { incremental: true }, 10));
        let key = [4, 1, 0, 0, 0, 0, 0xff, 0x0d];
        assert_eq!(parsed(&key), (Message::Key { down: true, keysym: 0xff0d }, 8));
        let pointer = [5, 1, 1, 0, 0, 2];
        assert_eq!(parsed(&pointer), (Message::Pointer { buttons: 1, x: 256, y: 2 }, 6));
        assert_eq!(parsed(&[6, 0, 0, 0, 0, 0, 0, 5, b'h']), (Message::Skip(5), 8));
        let place = [255, 0, 0, 1, 0, 0, 0, 0x61, 0, 0, 0, 30];
        assert_eq!(parsed(&place), (Message::ScanCode { down: true, code: 30 }, 12));
        let mut format = vec![0, 0, 0, 0];
        format.extend(PixelFormat::XRGB.bytes());
        assert_eq!(parsed(&format), (Message::SetPixelFormat(PixelFormat::XRGB), 20));
    }

    #[test]
    fn violations_are_reported() {
        assert_eq!(parse(&[1]), Err(Violation::Type(1)));
        assert_eq!(parse(&[255, 1]), Err(Violation::Extended(1)));
        assert_eq!(parse(&[2, 0, 4, 1]), Err(Violation::Encodings(1025)));
        assert_eq!(parse(&[6, 0, 0, 0, 0, 0x10, 0, 1]), Err(Violation::Text((1 << 20) + 1)));
        let mut palette = vec![0; 4];
        palette.extend(PixelFormat::XRGB.bytes());
        palette[7] = 0;
        assert!(matches!(parse(&palette), Err(Violation::Format(_))));
        let message = |bytes: &[u8]| parse(bytes).unwrap_err().to_string();
        assert_eq!(message(&[1]), "The viewer sent a message of unknown type 1");
        assert_eq!(message(&[255, 1]), "The viewer sent an extended message of unknown type 1");
        assert_eq!(message(&[2, 0, 4, 1]), "The viewer lists 1025 encodings; the limit is 1024");
        let text = message(&[6, 0, 0, 0, 0, 0x10, 0, 1]);
        assert_eq!(text, "The viewer's clipboard has 1048577 bytes; the limit is 1048576");
        assert_eq!(
            message(&palette),
            "The viewer wants a palette; only true colours are supported"
        );
    }

    proptest! {
        /// A parsed message is within the given bytes, and an incomplete one is at most
        /// [`MAX_MESSAGE`] long.
        #[test]
        fn any_bytes_parse_without_panic_or_unbounded_wait(
            bytes in proptest::collection::vec(any::<u8>(), 0..64),
            first in prop_oneof![0_u8..8, Just(255)],
        ) {
            let mut bytes = bytes;
            bytes.insert(0, first);
            match parse(&bytes) {
                Ok(Some((_, length))) => prop_assert!(length <= bytes.len()),
                Ok(None) => {
                    bytes.resize(MAX_MESSAGE, 0);
                    prop_assert!(parse(&bytes) != Ok(None), "more bytes than the limit are awaited");
                }
                Err(_) => {}
            }
        }

        /// Messages do not depend on the boundaries of reads.
        #[test]
        fn boundaries_of_reads_do_not_matter(
            down: bool, keysym: u32, x: u16, y: u16, buttons: u8,
            list in proptest::collection::vec(any::<i32>(), 0..40),
        ) {
            let mut stream = vec![4, u8::from(down), 0, 0];
            stream.extend(keysym.to_be_bytes());
            stream.extend([2, 0]);
            stream.extend((list.len() as u16).to_be_bytes());
            stream.extend(list.iter().flat_map(|number| number.to_be_bytes()));
            stream.extend([5, buttons]);
            stream.extend([x.to_be_bytes(), y.to_be_bytes()].concat());
            let (mut pending, mut found) = (Vec::new(), Vec::new());
            for byte in stream {
                pending.push(byte);
                while let Some((message, length)) = parse(&pending).unwrap() {
                    pending.drain(..length);
                    found.push(message);
                }
            }
            prop_assert!(pending.is_empty());
            let expected = [
                Message::Key { down, keysym },
                Message::SetEncodings(list),
                Message::Pointer { buttons, x, y },
            ];
            prop_assert_eq!(found, expected);
        }
    }
}
