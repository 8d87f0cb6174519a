//! Declaration of a register.

/// Width of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// 8 bits.
    W8,
    /// 16 bits.
    W16,
    /// 32 bits.
    W32,
    /// A read-only block of bytes.
    Bytes(u16),
}

impl Width {
    /// Returns the length in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::W8 => 1,
            Self::W16 => 2,
            Self::W32 => 4,
            Self::Bytes(len) => len as u64,
        }
    }

    /// Returns the mask of all bits of a register; 0 for a block.
    pub const fn mask(self) -> u32 {
        match self {
            Self::W8 => 0xff,
            Self::W16 => 0xffff,
            Self::W32 => u32::MAX,
            Self::Bytes(_) => 0,
        }
    }
}

/// Access of a guest to a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Writes are ignored.
    ReadOnly,
    /// Bits of the writable mask are stored.
    ReadWrite,
    /// Reads return zero; writes trigger an action.
    WriteOnly,
    /// Writing one clears bits of the write-one-to-clear mask.
    WriteOneToClear,
}

impl Access {
    /// Returns the abbreviation for register tables.
    pub const fn abbreviation(self) -> &'static str {
        match self {
            Self::ReadOnly => "RO",
            Self::ReadWrite => "RW",
            Self::WriteOnly => "WO",
            Self::WriteOneToClear => "RW1C",
        }
    }
}

/// Declaration of a register.
#[derive(Clone, Copy, Debug)]
pub struct Row<R> {
    /// Identifier that handlers match on.
    pub id: R,
    /// Name in register tables and saved state.
    pub name: &'static str,
    /// Byte offset.
    pub offset: u64,
    /// Width.
    pub width: Width,
    /// Access of a guest.
    pub access: Access,
    /// Value after reset.
    pub reset: u32,
    /// Mask of the bits that a write stores.
    pub writable: u32,
    /// Mask of the bits that writing one clears.
    pub w1c: u32,
    /// True if the register is part of the saved state.
    pub saved: bool,
    /// One-line description for register tables.
    pub doc: &'static str,
}

impl<R> Row<R> {
    /// Returns a read-only register, not saved.
    pub const fn ro(
        id: R,
        name: &'static str,
        offset: u64,
        width: Width,
        reset: u32,
        doc: &'static str,
    ) -> Self {
        let access = Access::ReadOnly;
        Self { id, name, offset, width, access, reset, writable: 0, w1c: 0, saved: false, doc }
    }

    /// Returns a saved register whose `writable` bits store writes.
    pub const fn rw(
        id: R,
        name: &'static str,
        offset: u64,
        width: Width,
        reset: u32,
        writable: u32,
        doc: &'static str,
    ) -> Self {
        let access = Access::ReadWrite;
        Self { id, name, offset, width, access, reset, writable, w1c: 0, saved: true, doc }
    }

    /// Returns a write-only register, whose writes trigger an action.
    pub const fn wo(
        id: R,
        name: &'static str,
        offset: u64,
        width: Width,
        doc: &'static str,
    ) -> Self {
        let access = Access::WriteOnly;
        Self { id, name, offset, width, access, reset: 0, writable: 0, w1c: 0, saved: false, doc }
    }

    /// Returns a saved register in which writing one clears the bits of `w1c`.
    pub const fn w1c(
        id: R,
        name: &'static str,
        offset: u64,
        width: Width,
        reset: u32,
        w1c: u32,
        doc: &'static str,
    ) -> Self {
        let access = Access::WriteOneToClear;
        Self { id, name, offset, width, access, reset, writable: 0, w1c, saved: true, doc }
    }

    /// Returns the register without being saved.
    #[must_use]
    pub const fn unsaved(mut self) -> Self {
        self.saved = false;
        self
    }

    /// Returns the register `base` bytes further on.
    #[must_use]
    pub const fn at(mut self, base: u64) -> Self {
        self.offset += base;
        self
    }

    /// Returns the first offset after the register.
    pub const fn end(&self) -> u64 {
        self.offset + self.width.bytes()
    }
}
