//! The registers of `edu`, and one transfer after the other.

use std::hint;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmm_sys_util::eventfd::EventFd;

use crate::mem::Mapping;
use crate::vfio::device::{Device, DeviceError};
use crate::vfio::window::Window;

mod reg {
    pub const IDENTIFICATION: u64 = 0x00;
    pub const FACTORIAL: u64 = 0x08;
    pub const STATUS: u64 = 0x20;
    pub const INTERRUPT_STATUS: u64 = 0x24;
    pub const INTERRUPT_ACKNOWLEDGE: u64 = 0x64;
    pub const DMA_SOURCE: u64 = 0x80;
    pub const DMA_TARGET: u64 = 0x88;
    pub const DMA_COUNT: u64 = 0x90;
    pub const DMA_COMMAND: u64 = 0x98;
}

/// Where the device's own buffer is, and how long.
pub const BUFFER: u64 = 0x4_0000;
/// Bytes of it.
pub const BUFFER_LEN: u64 = 0x1000;

const COMPUTING: u32 = 1 << 0;
const START: u32 = 1 << 0;
const FROM_DEVICE: u32 = 1 << 1;
const INTERRUPT: u32 = 1 << 2;

/// How long one operation may take. A transfer takes a tenth of a second, by design.
const PATIENCE: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(2);
/// What takes microseconds is looked at so often before anybody sleeps, and for nothing less than that is it given up.
const LOOKS: u32 = 2000;

/// Which way a transfer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From memory to the device's buffer.
    ToDevice,
    /// From the device's buffer to memory.
    FromDevice,
}

/// One `edu`.
#[derive(Debug)]
pub struct Edu {
    device: Device,
    /// BAR 0: its addresses of 64 bits have to be written in one access, which the kernel's file does not promise.
    registers: Arc<Mapping>,
    done: EventFd,
}

impl Edu {
    /// Takes one that is open.
    pub fn new(device: Device) -> Result<Self, DeviceError> {
        let [done] = <[EventFd; 1]>::try_from(device.interrupts(1)?)
            .map_err(|_| broken("has no interrupt"))?;
        let registers = device.registers(0)?;
        let edu = Self { device, registers, done };
        if edu.load(reg::IDENTIFICATION)? & 0xff != 0xed {
            return Err(broken("does not say that it is one"));
        }
        edu.wait(reg::DMA_COMMAND, START)?;
        Ok(edu)
    }

    /// The device itself.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// `n!`, modulo 2^32. It multiplies `n` times, and cannot be stopped: some seconds for the largest.
    pub fn factorial(&self, n: u32) -> Result<u32, DeviceError> {
        self.store(reg::FACTORIAL, n)?;
        self.wait(reg::STATUS, COMPUTING)?;
        self.load(reg::FACTORIAL)
    }

    /// Copies `len` bytes between a vGPU's memory, from `address` on, and the device's buffer, from `at` on; returns
    /// when the device has said that it is done.
    pub fn copy(
        &self,
        direction: Direction,
        window: &Window,
        address: u64,
        at: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        let memory = window.translate(address, len)?;
        let buffer = Window { iova: BUFFER, len: BUFFER_LEN }.translate(at, len)?;
        self.transfer(direction, memory, buffer, len)
    }

    /// The transfer itself, with addresses as the device takes them.
    pub fn transfer(
        &self,
        direction: Direction,
        memory: u64,
        buffer: u64,
        len: u64,
    ) -> Result<(), DeviceError> {
        let (source, target, from) = match direction {
            Direction::ToDevice => (memory, buffer, 0),
            Direction::FromDevice => (buffer, memory, FROM_DEVICE),
        };
        for (register, value) in
            [(reg::DMA_SOURCE, source), (reg::DMA_TARGET, target), (reg::DMA_COUNT, len)]
        {
            self.registers.store_u64(register, value).ok_or_else(gone)?;
        }
        let _ = self.done.read();
        self.store(reg::DMA_COMMAND, START | from | INTERRUPT)?;
        let deadline = Instant::now() + PATIENCE;
        while self.done.read().is_err() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(broken("did not interrupt at the end of a transfer"));
            }
            // SAFETY: the descriptor is the event's, which lives as long as what is borrowed.
            let fd = unsafe { BorrowedFd::borrow_raw(self.done.as_raw_fd()) };
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            let _ = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], timeout);
        }
        let raised = self.load(reg::INTERRUPT_STATUS)?;
        self.store(reg::INTERRUPT_ACKNOWLEDGE, raised)?;
        self.wait(reg::DMA_COMMAND, START)
    }

    fn wait(&self, register: u64, bit: u32) -> Result<(), DeviceError> {
        let deadline = Instant::now() + PATIENCE;
        let mut looks = 0;
        while self.load(register)? & bit != 0 {
            looks += 1;
            if looks < LOOKS {
                hint::spin_loop();
            } else if Instant::now() > deadline && looks > 2 * LOOKS {
                return Err(broken("does not end what it was told to do"));
            } else {
                thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    fn load(&self, register: u64) -> Result<u32, DeviceError> {
        let value = self.registers.load_u32(register).filter(|_| !self.registers.poisoned());
        value.map(u32::from_le).ok_or_else(gone)
    }

    fn store(&self, register: u64, value: u32) -> Result<(), DeviceError> {
        self.registers.store_u32(register, value.to_le()).ok_or_else(gone)
    }
}

/// Its registers cannot be reached any more.
fn gone() -> DeviceError {
    broken("does not answer")
}

fn broken(how: &'static str) -> DeviceError {
    DeviceError::Broken { what: "edu", how }
}
