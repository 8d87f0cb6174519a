//! The adapter's own registers, which no guest can access.

use std::fmt;
use std::time::{Duration, Instant};

use super::mode::Mode;
use crate::vfio::device::{Device, DeviceError};

/// BAR number of the registers.
const BAR: u8 = 2;

/// VGA ports; port 0x3c0 is at offset 0x400.
mod vga {
    pub const ATTRIBUTE: u64 = 0x400;
    pub const MISC: u64 = 0x402;
    pub const MISC_READ: u64 = 0x40c;
    pub const PALETTE_INDEX: u64 = 0x408;
    pub const PALETTE_DATA: u64 = 0x409;
    pub const STATUS: u64 = 0x41a;
    /// Attribute index bit that enables the display.
    pub const UNBLANK: u8 = 0x20;
    /// I/O address select: ports at their colour addresses.
    pub const COLOUR: u8 = 1;
    /// Enables the memory window at 0xa0000.
    pub const MEMORY: u8 = 2;
}

/// Bochs DISPI mode registers.
mod dispi {
    const BASE: u64 = 0x500;
    pub const ID: u64 = BASE;
    pub const WIDTH: u64 = BASE + 2;
    pub const HEIGHT: u64 = BASE + 4;
    pub const BITS: u64 = BASE + 6;
    pub const ENABLE: u64 = BASE + 8;
    pub const VIRTUAL_WIDTH: u64 = BASE + 12;
    pub const X: u64 = BASE + 16;
    pub const Y: u64 = BASE + 18;
    pub const MEMORY: u64 = BASE + 20;
    /// Enabled, linear framebuffer, memory not cleared: it holds other vGPUs' pictures.
    pub const ON: u16 = 1 << 0 | 1 << 6 | 1 << 7;
}

/// Length of the extension registers, and the byte order register.
const EXTENSION: u64 = 0x600;
const BYTE_ORDER: u64 = 0x604;
const LITTLE: u32 = 0x1e1e_1e1e;
const BIG: u32 = 0xbebe_bebe;

/// Register access.
pub trait Registers: fmt::Debug + Send {
    /// Reads registers at `at`.
    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;
    /// Writes registers at `at`.
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DeviceError>;
}

impl Registers for Device {
    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        self.load_bytes(BAR, at, bytes)
    }

    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.store(BAR, at, bytes)
    }
}

/// A display adapter.
#[derive(Debug)]
pub struct Adapter<R> {
    registers: R,
    shown: Shown,
    dark: Dark,
}

/// How the adapter makes the screen dark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dark {
    /// VGA blanks the screen.
    Blank,
    /// Without VGA, the adapter shows black memory; `None` until that memory is known.
    Black(Option<Mode>),
}

/// State of the adapter's registers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// Left by a previous user, or partially programmed.
    Unknown,
    Dark,
    Picture(Mode),
}

impl<R: Registers> Adapter<R> {
    /// Initializes the adapter, makes the screen dark if the adapter has VGA, and returns the video
    /// memory in bytes.
    pub fn new(registers: R) -> Result<(Self, u64), DeviceError> {
        let mut adapter = Self { registers, shown: Shown::Unknown, dark: Dark::Black(None) };
        if !(0xb0c0..=0xb0cf).contains(&adapter.load(dispi::ID)?) {
            return Err(broken("has an unknown identification register"));
        }
        let memory = u64::from(adapter.load(dispi::MEMORY)?) << 16;
        if !adapter.has_vga()? {
            return Ok((adapter, memory));
        }
        adapter.dark = Dark::Blank;
        adapter.show(None)?;
        // The palette of 8-bit modes is a grey ramp, as in Tessera's pictures of these modes.
        adapter.registers.write(vga::PALETTE_INDEX, &[0])?;
        for level in 0..=255_u8 {
            for _ in 0..3 {
                adapter.registers.write(vga::PALETTE_DATA, &[level >> 2])?;
            }
        }
        Ok((adapter, memory))
    }

    /// Returns whether the adapter needs black memory to be dark.
    pub fn needs_black(&self) -> bool {
        self.dark != Dark::Blank
    }

    /// Sets the mode of the black memory and shows it.
    pub fn set_black(&mut self, black: Mode) -> Result<(), DeviceError> {
        self.dark = Dark::Black(Some(black));
        self.show(None).map(drop)
    }

    /// Detects VGA registers by reading back written values.
    fn has_vga(&self) -> Result<bool, DeviceError> {
        for value in [vga::COLOUR | vga::MEMORY, vga::COLOUR] {
            let mut read = [0];
            self.registers.write(vga::MISC, &[value])?;
            self.registers.read(vga::MISC_READ, &mut read)?;
            if read != [value] {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Shows a mode, or makes the screen dark. Returns how long programming took.
    pub fn show(&mut self, mode: Option<Mode>) -> Result<Duration, DeviceError> {
        let start = Instant::now();
        let wanted = mode.map_or(Shown::Dark, Shown::Picture);
        if self.shown == wanted {
            return Ok(Duration::ZERO);
        }
        let before = std::mem::replace(&mut self.shown, Shown::Unknown);
        match mode {
            None => self.set_dark(before)?,
            Some(mode) => self.set_mode(mode, before)?,
        }
        self.shown = wanted;
        Ok(start.elapsed())
    }

    fn set_dark(&self, before: Shown) -> Result<(), DeviceError> {
        match self.dark {
            Dark::Black(Some(black)) => self.set_mode(black, before),
            Dark::Blank | Dark::Black(None) => self.blank(),
        }
    }

    fn blank(&self) -> Result<(), DeviceError> {
        self.attribute(0)?;
        self.store(dispi::ENABLE, 0)
    }

    fn set_mode(&self, mode: Mode, before: Shown) -> Result<(), DeviceError> {
        let shape = |mode: Mode| (mode.width, mode.height, mode.bits, mode.big_endian);
        // Only the offset changes: no mode set is needed, and the new picture shows at once.
        let offsets = [(dispi::VIRTUAL_WIDTH, mode.stride), (dispi::X, mode.x), (dispi::Y, mode.y)];
        if matches!(before, Shown::Picture(before) if shape(before) == shape(mode)) {
            self.store_all(&offsets)?;
        } else {
            self.attribute(0)?;
            self.store(dispi::ENABLE, 0)?;
            let modes = [
                (dispi::WIDTH, mode.width),
                (dispi::HEIGHT, mode.height),
                (dispi::BITS, mode.bits),
                (dispi::ENABLE, dispi::ON),
            ];
            self.store_all(&modes)?;
            // Setting a mode resets the offsets, so they follow.
            self.store_all(&offsets)?;
            let order = if mode.big_endian { BIG } else { LITTLE };
            let mut extension = [0; 4];
            self.registers.read(EXTENSION, &mut extension)?;
            if (8..4096).contains(&u32::from_le_bytes(extension)) {
                self.registers.write(BYTE_ORDER, &order.to_le_bytes())?;
            }
            self.attribute(vga::UNBLANK)?;
        }
        for (register, value) in
            [(dispi::WIDTH, mode.width), (dispi::HEIGHT, mode.height)].into_iter().chain(offsets)
        {
            if self.load(register)? != value {
                self.blank()?;
                return Err(broken("rejected a mode"));
            }
        }
        Ok(())
    }

    /// Writes the attribute index. The index shares its port with data; reading the status selects
    /// the index.
    fn attribute(&self, index: u8) -> Result<(), DeviceError> {
        if self.dark != Dark::Blank {
            return Ok(());
        }
        self.registers.write(vga::MISC, &[vga::COLOUR])?;
        self.registers.read(vga::STATUS, &mut [0])?;
        self.registers.write(vga::ATTRIBUTE, &[index])
    }

    fn store_all(&self, all: &[(u64, u16)]) -> Result<(), DeviceError> {
        all.iter().try_for_each(|(register, value)| self.store(*register, *value))
    }

    fn load(&self, register: u64) -> Result<u16, DeviceError> {
        let mut bytes = [0; 2];
        self.registers.read(register, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    fn store(&self, register: u64, value: u16) -> Result<(), DeviceError> {
        self.registers.write(register, &value.to_le_bytes())
    }
}

fn broken(fault: &'static str) -> DeviceError {
    DeviceError::Broken { family: "display adapter", fault }
}
