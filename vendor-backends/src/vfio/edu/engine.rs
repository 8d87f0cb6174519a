//! The registers of `edu`. Runs one operation at a time.

use std::hint;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ipc::mem::Mapping;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use vmm_sys_util::eventfd::EventFd;

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

/// Device address of the device's own buffer.
pub const BUFFER: u64 = 0x4_0000;
/// Length of the buffer in bytes.
pub const BUFFER_LEN: u64 = 0x1000;

const COMPUTING: u32 = 1 << 0;
const START: u32 = 1 << 0;
const FROM_DEVICE: u32 = 1 << 1;
const INTERRUPT: u32 = 1 << 2;

/// Time limit of one operation. A transfer takes 100 ms by design.
const TIMEOUT: Duration = Duration::from_secs(5);
const POLL_INTERVAL: Duration = Duration::from_millis(2);
/// Register reads before sleeping between reads, for operations that take microseconds. An
/// operation times out only after more reads than this, whatever the clock says.
const SPINS: u32 = 2000;

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From memory to the device's buffer.
    ToDevice,
    /// From the device's buffer to memory.
    FromDevice,
}

/// An `edu` device.
#[derive(Debug)]
pub struct Edu {
    device: Device,
    /// BAR 0, mapped: a 64-bit address must be written in one access, which pwrite on the device
    /// file does not guarantee.
    registers: Arc<Mapping>,
    done: EventFd,
}

impl Edu {
    /// Initializes an open device.
    pub fn new(device: Device) -> Result<Self, DeviceError> {
        let [done] = <[EventFd; 1]>::try_from(device.interrupts(1)?)
            .map_err(|_| broken("has no interrupt"))?;
        let registers = device.map_registers(0)?;
        let edu = Self { device, registers, done };
        if edu.load(reg::IDENTIFICATION)? & 0xff != 0xed {
            return Err(broken("has an unknown identification register"));
        }
        edu.wait(reg::DMA_COMMAND, START)?;
        Ok(edu)
    }

    /// Returns the underlying device.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Returns `n!` modulo 2^32. The device multiplies `n` times and cannot be interrupted, which
    /// takes seconds for large `n`.
    pub fn factorial(&self, n: u32) -> Result<u32, DeviceError> {
        self.store(reg::FACTORIAL, n)?;
        self.wait(reg::STATUS, COMPUTING)?;
        self.load(reg::FACTORIAL)
    }

    /// Copies `len` bytes between `address` in a vGPU's window and `at` in the device's buffer.
    /// Returns when the transfer is complete.
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

    /// Runs a transfer between two device addresses.
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
            self.registers.store_u64(register, value).ok_or_else(unreachable_registers)?;
        }
        let _ = self.done.read();
        self.store(reg::DMA_COMMAND, START | from | INTERRUPT)?;
        let deadline = Instant::now() + TIMEOUT;
        while self.done.read().is_err() {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(broken("did not interrupt at the end of a transfer"));
            }
            // SAFETY: the descriptor belongs to the event, which outlives the borrow.
            let fd = unsafe { BorrowedFd::borrow_raw(self.done.as_raw_fd()) };
            let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
            let _ = poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], timeout);
        }
        let raised = self.load(reg::INTERRUPT_STATUS)?;
        self.store(reg::INTERRUPT_ACKNOWLEDGE, raised)?;
        self.wait(reg::DMA_COMMAND, START)
    }

    fn wait(&self, register: u64, bit: u32) -> Result<(), DeviceError> {
        let deadline = Instant::now() + TIMEOUT;
        let mut reads = 0;
        while self.load(register)? & bit != 0 {
            reads += 1;
            if reads < SPINS {
                hint::spin_loop();
            } else if Instant::now() > deadline && reads > 2 * SPINS {
                return Err(broken("did not complete an operation"));
            } else {
                thread::sleep(POLL_INTERVAL);
            }
        }
        Ok(())
    }

    fn load(&self, register: u64) -> Result<u32, DeviceError> {
        let value = self.registers.load_u32(register).filter(|_| !self.registers.poisoned());
        value.map(u32::from_le).ok_or_else(unreachable_registers)
    }

    fn store(&self, register: u64, value: u32) -> Result<(), DeviceError> {
        self.registers.store_u32(register, value.to_le()).ok_or_else(unreachable_registers)
    }
}

/// Error for registers that can no longer be accessed.
fn unreachable_registers() -> DeviceError {
    broken("does not answer")
}

fn broken(fault: &'static str) -> DeviceError {
    DeviceError::Broken { family: "edu", fault }
}
