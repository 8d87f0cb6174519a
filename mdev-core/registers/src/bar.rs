//! Base address registers (PCI Local Bus 3.0, section 6.2.5.1).

/// Width of a BAR's address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarWidth {
    /// 32 bits.
    Bits32,
    /// 64 bits: the BAR takes two registers.
    Bits64,
}

/// A memory BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Number of the (first) register, 0 to 5.
    pub index: u8,
    /// One-line description for register tables.
    pub doc: &'static str,
    /// Length in bytes: a power of two, at least 16.
    pub size: u64,
    /// Width of the address.
    pub width: BarWidth,
    /// True if reads have no side effects.
    pub prefetchable: bool,
}

impl Bar {
    /// Returns a 32-bit BAR for registers, whose reads may have side effects.
    pub const fn registers(index: u8, doc: &'static str, size: u64) -> Self {
        Self { index, doc, size, width: BarWidth::Bits32, prefetchable: false }
    }

    /// Returns the low bits of the register, which encode the kind of BAR.
    pub const fn flags(&self) -> u32 {
        let width = match self.width {
            BarWidth::Bits32 => 0,
            BarWidth::Bits64 => 0b100,
        };
        width | if self.prefetchable { 0b1000 } else { 0 }
    }

    /// Returns the address bits that a guest can set. Sizing reads them back.
    pub const fn address_mask(&self) -> u64 {
        !(self.size - 1)
    }

    /// Returns the number of registers that the BAR takes.
    pub const fn registers_taken(&self) -> u8 {
        match self.width {
            BarWidth::Bits32 => 1,
            BarWidth::Bits64 => 2,
        }
    }
}
