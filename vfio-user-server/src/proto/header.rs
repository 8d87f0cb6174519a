//! The 16 bytes that every message begins with.

use std::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::errno::Errno;

/// Most bytes that one data transfer carries.
pub const MAX_DATA: u32 = 1 << 20;
/// Most bytes of a message: the longest data transfer, its header and its fixed part.
pub const MAX_MESSAGE: usize = MAX_DATA as usize + Header::SIZE + 16;

const TYPE_MASK: u32 = 0xf;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// A message's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Chosen by whoever sends the request, echoed in the reply; it need not be unique.
    pub id: u16,
    /// A [`Command`].
    pub command: u16,
    /// Bytes of the whole message.
    pub size: u32,
    /// Type in bits 0-3, "no reply" in bit 4, "error" in bit 5.
    pub flags: u32,
    /// In a reply with the error flag: an errno.
    pub error: u32,
}

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A request.
    Request,
    /// The answer to one.
    Reply,
}

impl Header {
    /// Bytes.
    pub const SIZE: usize = size_of::<Self>();

    /// The header of a request with a payload of this many bytes.
    pub fn request(id: u16, command: Command, payload: usize) -> Self {
        let size = u32::try_from(Self::SIZE + payload).unwrap_or(u32::MAX);
        Self { id, command: command as u16, size, flags: 0, error: 0 }
    }

    /// The same request, which is not to be answered.
    #[must_use]
    pub const fn posted(mut self) -> Self {
        self.flags |= NO_REPLY;
        self
    }

    /// The header of the reply to this request, with a payload of this many bytes.
    #[must_use]
    pub fn reply(&self, payload: usize) -> Self {
        let size = u32::try_from(Self::SIZE + payload).unwrap_or(u32::MAX);
        Self { size, flags: TYPE_REPLY, error: 0, ..*self }
    }

    /// The reply to this request, where it failed: nothing follows.
    #[must_use]
    pub fn error_reply(&self, errno: Errno) -> Self {
        Self { flags: TYPE_REPLY | ERROR, error: errno.raw().unsigned_abs(), ..self.reply(0) }
    }

    /// What the message is; `None` for types that do not exist.
    pub const fn kind(&self) -> Option<Kind> {
        match self.flags & TYPE_MASK {
            0 => Some(Kind::Request),
            TYPE_REPLY => Some(Kind::Reply),
            _ => None,
        }
    }

    /// The sender does not want an answer.
    pub const fn wants_no_reply(&self) -> bool {
        self.flags & NO_REPLY != 0
    }

    /// The errno of an error reply, which may be 0 from other servers.
    pub const fn failure(&self) -> Option<u32> {
        if self.flags & ERROR != 0 { Some(self.error) } else { None }
    }

    /// Whether a message can have the size that the header says.
    pub const fn size_is_possible(&self) -> bool {
        let size = self.size as usize;
        size >= Self::SIZE && size <= MAX_MESSAGE
    }
}

macro_rules! commands {
    ($($name:ident = $value:literal, $what:literal;)*) => {
        /// What a message asks for.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Command { $(#[doc = $what] $name = $value,)* }

        impl Command {
            /// Every command there is.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// The command with this number.
            pub const fn from_raw(raw: u16) -> Option<Self> {
                match raw {
                    $($value => Some(Self::$name),)*
                    _ => None,
                }
            }
        }
    };
}

commands! {
    Version = 1, "Agree on a version and capabilities: always the first.";
    DmaMap = 2, "The device may access memory.";
    DmaUnmap = 3, "It no longer may.";
    GetInfo = 4, "What the device is.";
    GetRegionInfo = 5, "What a region is, and how it is mapped.";
    GetRegionIoFds = 6, "Which writes to a region may come as signals.";
    GetIrqInfo = 7, "Which interrupts there are.";
    SetIrqs = 8, "Configure, mask or raise interrupts.";
    RegionRead = 9, "Read from a region.";
    RegionWrite = 10, "Write to a region.";
    DmaRead = 11, "From the server: read the client's memory.";
    DmaWrite = 12, "From the server: write the client's memory.";
    Reset = 13, "Reset the device.";
    DirtyPages = 14, "Superseded; nobody answers it any more.";
    RegionWriteMulti = 15, "Several small writes at once.";
    Feature = 16, "Probe, read or set an optional feature.";
    MigDataRead = 17, "Read the device's state.";
    MigDataWrite = 18, "Write the device's state.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn has_the_layout_of_the_specification() {
        let header = Header::request(0x0102, Command::RegionRead, 16);
        let expected: [&[u8]; 5] = [
            &0x0102_u16.to_ne_bytes(),
            &9_u16.to_ne_bytes(),
            &32_u32.to_ne_bytes(),
            &0_u32.to_ne_bytes(),
            &0_u32.to_ne_bytes(),
        ];
        assert_eq!(header.as_bytes(), expected.concat());
        assert_eq!(header.posted().flags, 0x10);
        assert_eq!(header.posted().reply(4), Header { size: 20, flags: 1, ..header });
        let failed = header.error_reply(Errno::EINVAL);
        assert_eq!(failed, Header { size: 16, flags: 0x21, error: 22, ..header });
        assert_eq!((failed.kind(), failed.failure()), (Some(Kind::Reply), Some(22)));
    }

    #[test]
    fn commands_have_their_numbers() {
        for raw in 0..=u16::MAX {
            let command = Command::from_raw(raw);
            assert_eq!(command.is_some(), (1..=18).contains(&raw), "{raw}");
            assert!(command.is_none_or(|command| command as u16 == raw));
        }
    }
}
