//! One register, declared.

/// How wide a register is.
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
    /// Length in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::W8 => 1,
            Self::W16 => 2,
            Self::W32 => 4,
            Self::Bytes(len) => len as u64,
        }
    }

    /// All bits of a register this wide; none for a block.
    pub const fn mask(self) -> u32 {
        match self {
            Self::W8 => 0xff,
            Self::W16 => 0xffff,
            Self::W32 => u32::MAX,
            Self::Bytes(_) => 0,
        }
    }
}

/// What a guest may do with a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Writes are ignored.
    ReadOnly,
    /// Bits of the writable mask are stored.
    ReadWrite,
    /// Reads give zero; a write acts.
    WriteOnly,
    /// Writing one clears bits of the write-one-to-clear mask.
    WriteOneToClear,
}

impl Access {
    /// As tables of registers abbreviate it.
    pub const fn abbreviation(self) -> &'static str {
        match self {
            Self::ReadOnly => "RO",
            Self::ReadWrite => "RW",
            Self::WriteOnly => "WO",
            Self::WriteOneToClear => "RW1C",
        }
    }
}

/// One register.
#[derive(Clone, Copy, Debug)]
pub struct Row<R> {
    /// What handlers match on.
    pub id: R,
    /// Its name in tables and in saved state.
    pub name: &'static str,
    /// Byte offset.
    pub offset: u64,
    /// How wide it is.
    pub width: Width,
    /// What a guest may do with it.
    pub access: Access,
    /// Value after reset.
    pub reset: u32,
    /// Bits that a write stores.
    pub writable: u32,
    /// Bits that writing one clears.
    pub w1c: u32,
    /// Whether it is part of the saved state.
    pub saved: bool,
    /// What it is for: one line.
    pub doc: &'static str,
}

impl<R> Row<R> {
    /// A read-only register.
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

    /// A register that stores what is written to the bits of `writable`. Saved.
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

    /// A register that acts when written.
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

    /// A register in which writing one clears the bits of `w1c`. Saved.
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

    /// The same register, not saved.
    #[must_use]
    pub const fn unsaved(mut self) -> Self {
        self.saved = false;
        self
    }

    /// The same register, `base` bytes further on.
    #[must_use]
    pub const fn at(mut self, base: u64) -> Self {
        self.offset += base;
        self
    }

    /// First offset past it.
    pub const fn end(&self) -> u64 {
        self.offset + self.width.bytes()
    }
}
