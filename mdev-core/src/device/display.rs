//! Registers of the Bochs display adapter (BAR 2), in QEMU's layout.
//!
//! The guest's in-tree driver programs them (`bochs-drm` on Linux). As in DISPI, an invalid value
//! leaves the register unchanged, and a driver can read the register back.

use super::journal::JournaledDisplay;
use super::{DisplayLimits, Scanout, edid};
use crate::units::{KIB, MIB};
use pci_registers::{Bank, BankState, RestoreError, Row, Width, Write};

/// Length of BAR 2 in bytes.
pub(super) const BAR_BYTES: u64 = 4 * KIB;
/// Space for EDID blocks before the VGA ports.
const EDID_BYTES: u16 = 0x400;
/// Offset of I/O port 0x3c0.
const VGA: u64 = 0x400;
/// Offset of DISPI index 0.
const DISPI: u64 = 0x500;
/// Offset of QEMU's extension registers.
const EXTENSION: u64 = 0x600;
/// Length of the extension registers in bytes.
const EXTENSION_BYTES: u32 = 8;
/// Unit of the video memory register.
const MEMORY_UNIT: u64 = 64 * KIB;
/// Maximum size of the framebuffer: a 32-bit BAR that firmware can place.
pub(super) const MAX_FRAMEBUFFER: u64 = 256 * MIB;

/// Bits of the ENABLE register.
mod enable {
    pub const ENABLED: u32 = 0x01;
    pub const GET_CAPS: u32 = 0x02;
    pub const NO_CLEAR: u32 = 0x80;
    /// Stored bits, including the 8-bit DAC and the linear framebuffer.
    pub const WRITABLE: u32 = ENABLED | GET_CAPS | 0x20 | 0x40 | NO_CLEAR;
}

const LITTLE_ENDIAN: u32 = 0x1e1e_1e1e;
const BIG_ENDIAN: u32 = 0xbebe_bebe;
/// Bit of the attribute index that connects the screen to video memory.
const ATTRIBUTE_UNBLANK: u32 = 0x20;
/// Retrace bits of the input status register.
const RETRACE: u32 = 0x09;

/// Display register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DisplayReg {
    Edid,
    Attribute,
    AttributeData,
    MiscWrite,
    PaletteMask,
    PaletteIndex,
    PaletteData,
    MiscRead,
    InputStatus,
    Id,
    XRes,
    YRes,
    Bpp,
    Enable,
    Bank,
    VirtWidth,
    VirtHeight,
    XOffset,
    YOffset,
    VideoMemory,
    ExtensionSize,
    ByteOrder,
}

/// Side effects of a write to the display registers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct DisplayEffect {
    /// A mode was set.
    pub enabled: bool,
    /// Clear this number of bytes from the start of the framebuffer.
    pub clear: Option<u64>,
}

/// Display head.
#[derive(Debug)]
pub(super) struct Display {
    bank: Bank<DisplayReg>,
    limits: DisplayLimits,
    framebuffer: u64,
    /// The next write to the attribute port is data.
    attribute_data: bool,
    retrace: u32,
}

impl Display {
    /// Returns a head with these limits and this size of the framebuffer in bytes.
    pub fn new(limits: DisplayLimits, framebuffer: u64) -> Self {
        let mut bank = Bank::new(BAR_BYTES, rows());
        bank.define_bytes(DisplayReg::Edid, &edid::block(limits));
        bank.define(DisplayReg::VideoMemory, (framebuffer / MEMORY_UNIT) as u32);
        Self { bank, limits, framebuffer, attribute_data: false, retrace: 0 }
    }

    /// Returns the state for the adopting process.
    pub fn journaled(&self) -> JournaledDisplay<'_> {
        let Self { bank, attribute_data, retrace, .. } = self;
        JournaledDisplay {
            registers: bank.image().into(),
            attribute_data: *attribute_data,
            retrace: *retrace,
        }
    }

    /// Adopts a state of another process.
    pub fn adopt(&mut self, state: &JournaledDisplay<'_>) {
        self.bank.set_image(&state.registers);
        self.attribute_data = state.attribute_data;
        self.retrace = state.retrace;
    }

    /// Returns the bank, for documentation.
    pub fn bank(&self) -> &Bank<DisplayReg> {
        &self.bank
    }

    /// Reads bytes of BAR 2.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        let mode = Mode::of(&self.bank);
        let caps = self.bank.get(DisplayReg::Enable) & enable::GET_CAPS != 0;
        let Self { bank, limits, framebuffer, attribute_data, retrace } = self;
        bank.read(offset, data, |id, value| match id {
            DisplayReg::XRes if caps => limits.max_width,
            DisplayReg::YRes if caps => limits.max_height,
            DisplayReg::Bpp if caps => 32,
            DisplayReg::VirtHeight => {
                framebuffer.checked_div(mode.stride()).unwrap_or(0).min(0xffff) as u32
            }
            DisplayReg::InputStatus => {
                *attribute_data = false;
                *retrace ^= RETRACE;
                *retrace
            }
            _ => value,
        });
    }

    /// Writes bytes of BAR 2.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> DisplayEffect {
        let mut effect = DisplayEffect::default();
        let Self { bank, limits, framebuffer, attribute_data, .. } = self;
        bank.write(offset, data, |bank, id, write| {
            let refuse = |bank: &mut Bank<_>| bank.set(id, write.old);
            match id {
                DisplayReg::Attribute => {
                    if *attribute_data {
                        refuse(bank);
                    }
                    *attribute_data = !*attribute_data;
                }
                DisplayReg::MiscWrite => bank.set(DisplayReg::MiscRead, write.new),
                DisplayReg::Id if !(0xb0c0..=0xb0c5).contains(&write.new) => refuse(bank),
                DisplayReg::XRes if write.new > limits.max_width => refuse(bank),
                DisplayReg::YRes if write.new > limits.max_height => refuse(bank),
                DisplayReg::Bpp if !matches!(write.new, 0 | 8 | 15 | 16 | 24 | 32) => refuse(bank),
                DisplayReg::XRes | DisplayReg::YRes | DisplayReg::Bpp => {
                    let mode = Mode::of(bank);
                    if mode.enabled && !mode.fits(*framebuffer) {
                        refuse(bank);
                    }
                }
                DisplayReg::Enable => {
                    let set = set_mode(bank, write, *framebuffer);
                    effect.enabled |= set.enabled;
                    effect.clear = set.clear.or(effect.clear);
                }
                DisplayReg::ByteOrder if !matches!(write.new, LITTLE_ENDIAN | BIG_ENDIAN) => {
                    refuse(bank);
                }
                // Stored only, or read-only. Drivers set panning in several writes, so scanout()
                // checks it as a whole.
                DisplayReg::VirtWidth
                | DisplayReg::XOffset
                | DisplayReg::YOffset
                | DisplayReg::Id
                | DisplayReg::ByteOrder
                | DisplayReg::Bank
                | DisplayReg::PaletteMask
                | DisplayReg::PaletteIndex
                | DisplayReg::PaletteData
                | DisplayReg::Edid
                | DisplayReg::AttributeData
                | DisplayReg::MiscRead
                | DisplayReg::InputStatus
                | DisplayReg::VirtHeight
                | DisplayReg::VideoMemory
                | DisplayReg::ExtensionSize => {}
            }
        });
        effect
    }

    /// Returns the picture inside the framebuffer. Panning beyond the framebuffer is ignored.
    pub fn scanout(&self) -> Scanout {
        let mode = Mode::of(&self.bank);
        let blank = self.bank.get(DisplayReg::Attribute) & ATTRIBUTE_UNBLANK == 0;
        if blank || !mode.enabled || !mode.fits(self.framebuffer) {
            return Scanout::default();
        }
        let (x, y) = (self.bank.get(DisplayReg::XOffset), self.bank.get(DisplayReg::YOffset));
        let across = u64::from(x) * mode.pixel_bytes();
        let down = u64::from(y) * mode.stride();
        let fits = |offset: &u64| offset + mode.picture_bytes() <= self.framebuffer;
        let offset = [across + down, across].into_iter().find(fits).unwrap_or(0);
        Scanout {
            enabled: true,
            width: mode.width,
            height: mode.height,
            stride: mode.stride() as u32,
            bits_per_pixel: mode.bits,
            offset,
            big_endian: self.bank.get(DisplayReg::ByteOrder) == BIG_ENDIAN,
        }
    }

    /// Resets the registers to power-on values: no mode, blank.
    pub fn reset(&mut self) {
        self.bank.reset();
        self.attribute_data = false;
    }

    /// Returns the saved registers.
    pub fn save(&self) -> BankState {
        self.bank.save()
    }

    /// Checks a saved state: each value must be reachable by a guest.
    pub fn check(&self, state: &BankState) -> Result<(), RestoreError> {
        let mut copy = Self::new(self.limits, self.framebuffer);
        copy.restore(state)
    }

    /// Restores a saved state by the writes of a guest.
    pub fn restore(&mut self, state: &BankState) -> Result<(), RestoreError> {
        self.bank.check(state)?;
        self.reset();
        // ENABLE resets the panning, so it is written after the mode and before all other
        // registers.
        let rows: Vec<_> = self.bank.rows().iter().filter(|row| row.saved).copied().collect();
        let early = |id| matches!(id, DisplayReg::XRes | DisplayReg::YRes | DisplayReg::Bpp);
        let rank = |id| if early(id) { 0 } else { u8::from(id != DisplayReg::Enable) + 1 };
        let mut ordered = rows.clone();
        ordered.sort_by_key(|row| rank(row.id));
        for row in ordered {
            let value = state.0.get(row.name).copied().unwrap_or_default();
            let bytes = value.to_le_bytes();
            self.write(row.offset, &bytes[..row.width.bytes() as usize]);
        }
        self.attribute_data = false;
        for row in rows {
            let value = state.0.get(row.name).copied().unwrap_or_default();
            if self.bank.get(row.id) != value {
                return Err(RestoreError::Impossible { name: row.name, value });
            }
        }
        Ok(())
    }
}

/// Sets the mode after a write to ENABLE, unless the mode does not fit.
fn set_mode(bank: &mut Bank<DisplayReg>, write: Write, framebuffer: u64) -> DisplayEffect {
    let mut effect = DisplayEffect::default();
    if write.new & enable::ENABLED == 0 {
        return effect;
    }
    if write.old & enable::ENABLED == 0 {
        bank.set(DisplayReg::VirtWidth, bank.get(DisplayReg::XRes));
        bank.set(DisplayReg::XOffset, 0);
        bank.set(DisplayReg::YOffset, 0);
        let mode = Mode::of(bank);
        if !mode.fits(framebuffer) {
            bank.set(DisplayReg::Enable, write.new & !enable::ENABLED);
            return effect;
        }
        effect.enabled = true;
        effect.clear = (write.new & enable::NO_CLEAR == 0).then_some(mode.picture_bytes());
    }
    effect
}

/// Mode in the registers.
#[derive(Clone, Copy, Debug)]
struct Mode {
    enabled: bool,
    width: u32,
    height: u32,
    bits: u32,
    virtual_width: u32,
}

impl Mode {
    fn of(bank: &Bank<DisplayReg>) -> Self {
        let width = bank.get(DisplayReg::XRes);
        Self {
            enabled: bank.get(DisplayReg::Enable) & enable::ENABLED != 0,
            width,
            height: bank.get(DisplayReg::YRes),
            bits: match bank.get(DisplayReg::Bpp) {
                0 => 8,
                bits => bits,
            },
            virtual_width: bank.get(DisplayReg::VirtWidth).max(width),
        }
    }

    fn pixel_bytes(&self) -> u64 {
        u64::from(self.bits.div_ceil(8))
    }

    fn stride(&self) -> u64 {
        u64::from(self.virtual_width) * self.pixel_bytes()
    }

    /// Returns the size of the picture in bytes.
    fn picture_bytes(&self) -> u64 {
        let rows = u64::from(self.height.saturating_sub(1));
        rows * self.stride() + u64::from(self.width) * self.pixel_bytes()
    }

    fn fits(&self, framebuffer: u64) -> bool {
        self.width > 0 && self.height > 0 && self.picture_bytes() <= framebuffer
    }
}

fn rows() -> Vec<Row<DisplayReg>> {
    use DisplayReg as R;
    use Width::{Bytes, W8, W16, W32};
    let port = |port: u64| VGA + port - 0x3c0;
    let dispi = |index: u64| DISPI + 2 * index;
    vec![
        Row::ro(R::Edid, "EDID", 0, Bytes(EDID_BYTES), 0, "One EDID 1.4 block, then zeros"),
        Row::rw(
            R::Attribute,
            "VGA_ATTRIBUTE",
            port(0x3c0),
            W8,
            0,
            0xff,
            "Port 3c0: index and data (ignored) alternate; index bit 5: 0 blanks the screen",
        ),
        Row::ro(R::AttributeData, "VGA_ATTRIBUTE_DATA", port(0x3c1), W8, 0, "Port 3c1"),
        Row::rw(R::MiscWrite, "VGA_MISC", port(0x3c2), W8, 0, 0xff, "Port 3c2: stored only")
            .unsaved(),
        Row::wo(R::PaletteMask, "VGA_DAC_MASK", port(0x3c6), W8, "Port 3c6: ignored"),
        Row::wo(R::PaletteIndex, "VGA_DAC_INDEX", port(0x3c8), W8, "Port 3c8: ignored"),
        Row::wo(R::PaletteData, "VGA_DAC_DATA", port(0x3c9), W8, "Port 3c9: ignored"),
        Row::ro(R::MiscRead, "VGA_MISC_READ", port(0x3cc), W8, 0, "Port 3cc: value of port 3c2"),
        Row::ro(
            R::InputStatus,
            "VGA_INPUT_STATUS",
            port(0x3da),
            W8,
            0,
            "Port 3da: retrace bits 0 and 3 change with each read; the next write to 3c0 is an index",
        ),
        Row::rw(R::Id, "DISPI_ID", dispi(0), W16, 0xb0c5, 0xffff, "b0c0 to b0c5"),
        Row::rw(R::XRes, "DISPI_XRES", dispi(1), W16, 0, 0xffff, "Width, at most the type's"),
        Row::rw(R::YRes, "DISPI_YRES", dispi(2), W16, 0, 0xffff, "Height, at most the type's"),
        Row::rw(R::Bpp, "DISPI_BPP", dispi(3), W16, 0, 0xff, "0 (means 8), 8, 15, 16, 24, 32"),
        Row::rw(
            R::Enable,
            "DISPI_ENABLE",
            dispi(4),
            W16,
            0,
            enable::WRITABLE,
            "01 mode set, 02 XRES/YRES/BPP read as maxima, 20 8-bit DAC, 40 linear, 80 do not clear",
        ),
        Row::rw(R::Bank, "DISPI_BANK", dispi(5), W16, 0, 0xffff, "Stored only").unsaved(),
        Row::rw(
            R::VirtWidth,
            "DISPI_VIRT_WIDTH",
            dispi(6),
            W16,
            0,
            0xffff,
            "Pixels per row, at least XRES; setting a mode sets it to XRES",
        ),
        Row::ro(R::VirtHeight, "DISPI_VIRT_HEIGHT", dispi(7), W16, 0, "Rows of the framebuffer"),
        Row::rw(R::XOffset, "DISPI_X_OFFSET", dispi(8), W16, 0, 0xffff, "First pixel shown"),
        Row::rw(R::YOffset, "DISPI_Y_OFFSET", dispi(9), W16, 0, 0xffff, "First row shown"),
        Row::ro(
            R::VideoMemory,
            "DISPI_VIDEO_MEMORY",
            dispi(10),
            W16,
            0,
            "Framebuffer (BAR 0) in units of 64 KiB",
        ),
        Row::ro(R::ExtensionSize, "QEXT_SIZE", EXTENSION, W32, EXTENSION_BYTES, "Bytes from here"),
        Row::rw(
            R::ByteOrder,
            "QEXT_ENDIAN",
            EXTENSION + 4,
            W32,
            LITTLE_ENDIAN,
            u32::MAX,
            "1e1e1e1e little-endian pixels, bebebebe big-endian",
        ),
    ]
}
