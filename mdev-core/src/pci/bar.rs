//! Base address registers.

/// What a BAR decodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarKind {
    /// Display framebuffer: the start of video memory.
    Framebuffer,
    /// Doorbell page.
    Doorbell,
    /// Display registers.
    Display,
    /// Control registers.
    Control,
    /// All of video memory.
    Vram,
}

/// How wide the address is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BarWidth {
    /// 32 bits.
    Bits32,
    /// 64 bits: takes the next register too.
    Bits64,
}

/// A memory BAR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Its (first) register, 0 to 5.
    pub index: u8,
    /// What it decodes.
    pub kind: BarKind,
    /// Length in bytes, a power of two, at least 4 KiB.
    pub size: u64,
    /// How wide the address is.
    pub width: BarWidth,
    /// Reads have no side effects.
    pub prefetchable: bool,
}

impl Bar {
    /// Low bits of the register, which say what kind of BAR it is.
    pub const fn flags(&self) -> u32 {
        let width = match self.width {
            BarWidth::Bits32 => 0,
            BarWidth::Bits64 => 0b100,
        };
        width | if self.prefetchable { 0b1000 } else { 0 }
    }

    /// The address bits that a guest can set; sizing reads them back.
    pub const fn address_mask(&self) -> u64 {
        !(self.size - 1)
    }
}
