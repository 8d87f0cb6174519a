//! A running process that makes the system calls of a test: it plays a process that a guest has
//! compromised, with its own sandbox, user and descriptors.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

/// Machine code of the instruction `syscall`.
const SYSCALL: [u8; 2] = [0x0f, 0x05];
/// Attempts to find the process inside a system call.
const ATTEMPTS: u32 = 100;
/// Distance of the memory for arguments from the top of the stack.
const SCRATCH: u64 = 0x8000;

/// First thread of a process, stopped between two system calls. Dropping it lets the thread
/// continue where it was.
#[derive(Debug)]
pub struct Captured {
    pid: Pid,
    registers: libc::user_regs_struct,
    memory: File,
}

impl Captured {
    /// Stops a process. Returns `None` if this process may not trace it: only root may trace a
    /// process in vgpud's sandbox.
    pub fn new(pid: u32) -> Result<Option<Self>> {
        let pid = Pid::from_raw(pid.cast_signed());
        for _ in 0..ATTEMPTS {
            match ptrace::attach(pid) {
                Err(Errno::EPERM | Errno::EACCES) => return Ok(None),
                attached => attached.context("Cannot attach")?,
            }
            stopped_by(pid, Signal::SIGSTOP)?;
            let memory = File::options().read(true).write(true).open(format!("/proc/{pid}/mem"))?;
            let registers = ptrace::getregs(pid)?;
            let mut before = [0; 2];
            memory.read_exact_at(&mut before, registers.rip - 2)?;
            if before == SYSCALL {
                return Ok(Some(Self { pid, registers, memory }));
            }
            ptrace::detach(pid, None)?;
            std::thread::sleep(Duration::from_millis(10));
        }
        bail!("Process {pid} was never found in a system call")
    }

    /// Makes the process call the kernel. Returns the result, or an error number below 0.
    pub fn call(&mut self, number: i64, arguments: &[u64]) -> Result<i64> {
        let mut registers = self.registers;
        // The instruction that the process is in is executed again.
        registers.rip -= 2;
        registers.rax = number.cast_unsigned();
        // The interrupted call is not restarted.
        registers.orig_rax = u64::MAX;
        let places = [
            &mut registers.rdi,
            &mut registers.rsi,
            &mut registers.rdx,
            &mut registers.r10,
            &mut registers.r8,
            &mut registers.r9,
        ];
        for (place, argument) in places.into_iter().zip(arguments) {
            *place = *argument;
        }
        ptrace::setregs(self.pid, registers)?;
        ptrace::step(self.pid, None)?;
        stopped_by(self.pid, Signal::SIGTRAP)?;
        Ok(ptrace::getregs(self.pid)?.rax.cast_signed())
    }

    /// Writes an argument to memory of the process, `offset` bytes into at most 4096, and returns
    /// its address.
    pub fn put(&self, offset: u64, bytes: &[u8]) -> Result<u64> {
        let address = self.scratch() + offset;
        self.memory.write_all_at(bytes, address)?;
        Ok(address)
    }

    /// Reads memory of the process.
    pub fn get<const N: usize>(&self, address: u64) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.memory.read_exact_at(&mut bytes, address)?;
        Ok(bytes)
    }

    fn scratch(&self) -> u64 {
        (self.registers.rsp - SCRATCH) & !0xfff
    }
}

impl Drop for Captured {
    fn drop(&mut self) {
        // The process may have ended.
        let _ = ptrace::setregs(self.pid, self.registers);
        let _ = ptrace::detach(self.pid, None);
    }
}

fn stopped_by(pid: Pid, expected: Signal) -> Result<()> {
    match waitpid(pid, Some(WaitPidFlag::__WALL))? {
        WaitStatus::Stopped(_, signal) => {
            ensure!(signal == expected, "Process {pid} got {signal} instead of {expected}");
            Ok(())
        }
        other => bail!("Process {pid} has ended: {other:?}"),
    }
}
