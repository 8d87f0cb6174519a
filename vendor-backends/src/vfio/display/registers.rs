//! The adapter's own registers, which no guest ever reaches.

use std::fmt;
use std::time::{Duration, Instant};

use super::mode::Mode;
use crate::vfio::device::{Device, DeviceError};

/// BAR of the registers.
const BAR: u8 = 2;

/// VGA ports, where 0x3c0 is at 0x400.
mod vga {
    pub const ATTRIBUTE: u64 = 0x400;
    pub const MISC: u64 = 0x402;
    pub const MISC_READ: u64 = 0x40c;
    pub const PALETTE_INDEX: u64 = 0x408;
    pub const PALETTE_DATA: u64 = 0x409;
    pub const STATUS: u64 = 0x41a;
    /// The attribute index that connects the screen to memory.
    pub const UNBLANK: u8 = 0x20;
    /// Ports as they are with colour.
    pub const COLOUR: u8 = 1;
    /// The window at 0xa0000.
    pub const MEMORY: u8 = 2;
}

/// Mode registers.
mod dispi {
    const BASE: u64 = 0x500;
    pub const ID: u64 = BASE;
    pub const WIDTH: u64 = BASE + 2;
    pub const HEIGHT: u64 = BASE + 4;
    pub const BITS: u64 = BASE + 6;
    pub const ENABLE: u64 = BASE + 8;
    pub const ROW: u64 = BASE + 12;
    pub const X: u64 = BASE + 16;
    pub const Y: u64 = BASE + 18;
    pub const MEMORY: u64 = BASE + 20;
    /// Enabled, with linear memory, and what is in memory left there: others' pictures are.
    pub const ON: u16 = 1 << 0 | 1 << 6 | 1 << 7;
}

/// Length of what follows, and the order of bytes.
const EXTENSION: u64 = 0x600;
const BYTE_ORDER: u64 = 0x604;
const LITTLE: u32 = 0x1e1e_1e1e;
const BIG: u32 = 0xbebe_bebe;

/// Registers that can be read and written.
pub trait Registers: fmt::Debug + Send {
    /// Reads.
    fn read(&self, at: u64, bytes: &mut [u8]) -> Result<(), DeviceError>;
    /// Writes.
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

/// One adapter.
#[derive(Debug)]
pub struct Adapter<R> {
    registers: R,
    shown: Shown,
    dark: Dark,
}

/// How the screen is dark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Dark {
    /// VGA disconnects it from memory.
    Blank,
    /// There is no VGA: it shows this, which is black. `None` until that is known.
    Black(Option<Mode>),
}

/// What an adapter's registers say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shown {
    /// What somebody before has left there, or half of something.
    Unknown,
    Dark,
    Picture(Mode),
}

impl<R: Registers> Adapter<R> {
    /// Takes one, makes its screen dark if it has VGA, and says how much memory it has.
    pub fn new(registers: R) -> Result<(Self, u64), DeviceError> {
        let mut adapter = Self { registers, shown: Shown::Unknown, dark: Dark::Black(None) };
        if !(0xb0c0..=0xb0cf).contains(&adapter.load(dispi::ID)?) {
            return Err(broken("does not say that it is one"));
        }
        let memory = u64::from(adapter.load(dispi::MEMORY)?) << 16;
        if !adapter.has_vga()? {
            return Ok((adapter, memory));
        }
        adapter.dark = Dark::Blank;
        adapter.show(None)?;
        // Modes of 8 bits have no palette of their own here: they are grey, as in every picture of them.
        adapter.registers.write(vga::PALETTE_INDEX, &[0])?;
        for level in 0..=255_u8 {
            for _ in 0..3 {
                adapter.registers.write(vga::PALETTE_DATA, &[level >> 2])?;
            }
        }
        Ok((adapter, memory))
    }

    /// Whether it needs a black picture to be dark.
    pub fn needs_black(&self) -> bool {
        self.dark != Dark::Blank
    }

    /// Gives it one, which it shows from now on until there is another.
    pub fn set_black(&mut self, black: Mode) -> Result<(), DeviceError> {
        self.dark = Dark::Black(Some(black));
        self.show(None).map(drop)
    }

    /// Whether VGA's registers are there: what is written can be read.
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

    /// Shows a picture, or nothing; how long that took.
    pub fn show(&mut self, mode: Option<Mode>) -> Result<Duration, DeviceError> {
        let start = Instant::now();
        let wanted = mode.map_or(Shown::Dark, Shown::Picture);
        if self.shown == wanted {
            return Ok(Duration::ZERO);
        }
        let before = std::mem::replace(&mut self.shown, Shown::Unknown);
        match mode {
            None => self.go_dark(before)?,
            Some(mode) => self.light(mode, before)?,
        }
        self.shown = wanted;
        Ok(start.elapsed())
    }

    fn go_dark(&self, before: Shown) -> Result<(), DeviceError> {
        match self.dark {
            Dark::Black(Some(black)) => self.light(black, before),
            Dark::Blank | Dark::Black(None) => self.blank(),
        }
    }

    fn blank(&self) -> Result<(), DeviceError> {
        self.attribute(0)?;
        self.store(dispi::ENABLE, 0)
    }

    fn light(&self, mode: Mode, before: Shown) -> Result<(), DeviceError> {
        let shape = |mode: Mode| (mode.width, mode.height, mode.bits, mode.big_endian);
        // Another place in memory needs no other mode, and shows at once.
        let place = [(dispi::ROW, mode.row), (dispi::X, mode.x), (dispi::Y, mode.y)];
        if matches!(before, Shown::Picture(before) if shape(before) == shape(mode)) {
            self.store_all(&place)?;
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
            // For a mode that is on: to set one takes them back.
            self.store_all(&place)?;
            let order = if mode.big_endian { BIG } else { LITTLE };
            let mut extension = [0; 4];
            self.registers.read(EXTENSION, &mut extension)?;
            if (8..4096).contains(&u32::from_le_bytes(extension)) {
                self.registers.write(BYTE_ORDER, &order.to_le_bytes())?;
            }
            self.attribute(vga::UNBLANK)?;
        }
        for (register, value) in
            [(dispi::WIDTH, mode.width), (dispi::HEIGHT, mode.height)].into_iter().chain(place)
        {
            if self.load(register)? != value {
                self.blank()?;
                return Err(broken("cannot show that mode"));
            }
        }
        Ok(())
    }

    /// Writes the attribute index, which shares its port with data.
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

fn broken(how: &'static str) -> DeviceError {
    DeviceError::Broken { what: "display adapter", how }
}
