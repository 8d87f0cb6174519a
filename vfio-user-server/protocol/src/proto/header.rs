//! Message headers and commands.

use std::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::errno::Errno;

/// Limit of data bytes per message.
pub const MAX_DATA: u32 = 1 << 20;
/// Limit of bytes per message: header, fixed structure and data.
pub const MAX_MESSAGE: usize = MAX_DATA as usize + Header::SIZE + 16;

const TYPE_MASK: u32 = 0xf;
const TYPE_REPLY: u32 = 1;
const NO_REPLY: u32 = 1 << 4;
const ERROR: u32 = 1 << 5;

/// Header of a message, 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Identifier, chosen by the sender of a request and repeated in the reply. Not necessarily
    /// unique.
    pub id: u16,
    /// Number of a [`Command`].
    pub command: u16,
    /// Length of the message in bytes, header included.
    pub size: u32,
    /// Message type in bits 0 to 3, no-reply flag in bit 4, error flag in bit 5.
    pub flags: u32,
    /// Error number, in replies with the error flag.
    pub error: u32,
}

/// Type of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A request.
    Request,
    /// A reply.
    Reply,
}

impl Header {
    /// Length in bytes.
    pub const SIZE: usize = size_of::<Self>();

    /// Returns the header of a request with a payload of this many bytes.
    pub fn request(id: u16, command: Command, payload: usize) -> Self {
        let size = u32::try_from(Self::SIZE + payload).unwrap_or(u32::MAX);
        Self { id, command: command as u16, size, flags: 0, error: 0 }
    }

    /// Returns the header with the no-reply flag set.
    #[must_use]
    pub const fn posted(mut self) -> Self {
        self.flags |= NO_REPLY;
        self
    }

    /// Returns the header of the reply to this request, with a payload of this many bytes.
    #[must_use]
    pub fn reply(&self, payload: usize) -> Self {
        let size = u32::try_from(Self::SIZE + payload).unwrap_or(u32::MAX);
        Self { size, flags: TYPE_REPLY, error: 0, ..*self }
    }

    /// Returns the header of the error reply to this request. Error replies have no payload.
    #[must_use]
    pub fn error_reply(&self, errno: Errno) -> Self {
        Self { flags: TYPE_REPLY | ERROR, error: errno.raw().unsigned_abs(), ..self.reply(0) }
    }

    /// Returns the type of the message, or `None` if it is not defined.
    pub const fn kind(&self) -> Option<Kind> {
        match self.flags & TYPE_MASK {
            0 => Some(Kind::Request),
            TYPE_REPLY => Some(Kind::Reply),
            _ => None,
        }
    }

    /// Returns true if the no-reply flag is set.
    pub const fn wants_no_reply(&self) -> bool {
        self.flags & NO_REPLY != 0
    }

    /// Returns the error number of an error reply. Other implementations may send 0.
    pub const fn failure(&self) -> Option<u32> {
        if self.flags & ERROR != 0 { Some(self.error) } else { None }
    }

    /// Returns true if a message can have the header's size.
    pub const fn has_valid_size(&self) -> bool {
        let size = self.size as usize;
        size >= Self::SIZE && size <= MAX_MESSAGE
    }
}

macro_rules! commands {
    ($($name:ident = $value:literal, $what:literal;)*) => {
        /// Command of a message.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u16)]
        pub enum Command { $(#[doc = $what] $name = $value,)* }

        impl Command {
            /// All commands.
            pub const ALL: &[Self] = &[$(Self::$name,)*];

            /// Returns the command with a number.
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
    Version = 1, "Negotiate version and capabilities. Must be the first message.";
    DmaMap = 2, "Map a range of the client's memory.";
    DmaUnmap = 3, "Unmap ranges of the client's memory.";
    GetInfo = 4, "Get flags and the numbers of regions and interrupt indices.";
    GetRegionInfo = 5, "Get size, flags and mapping of a region.";
    GetRegionIoFds = 6, "Get the ioeventfds of a region.";
    GetIrqInfo = 7, "Get number and flags of the interrupts of an index.";
    SetIrqs = 8, "Configure, mask or raise interrupts.";
    RegionRead = 9, "Read from a region.";
    RegionWrite = 10, "Write to a region.";
    DmaRead = 11, "Read the client's memory. Sent by the server.";
    DmaWrite = 12, "Write the client's memory. Sent by the server.";
    Reset = 13, "Reset the device.";
    DirtyPages = 14, "Get dirty pages. Obsolete and not supported.";
    RegionWriteMulti = 15, "Write up to 8 bytes each to several places.";
    Feature = 16, "Probe, read or set a device feature.";
    MigDataRead = 17, "Read the device's migration data.";
    MigDataWrite = 18, "Write the device's migration data.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_has_the_layout_of_the_specification() {
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
    fn commands_have_the_numbers_of_the_specification() {
        for raw in 0..=u16::MAX {
            let command = Command::from_raw(raw);
            assert_eq!(command.is_some(), (1..=18).contains(&raw), "{raw}");
            assert!(command.is_none_or(|command| command as u16 == raw));
        }
    }
}
