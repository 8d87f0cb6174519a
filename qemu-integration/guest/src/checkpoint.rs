//! Checkpoints of the VM's CUDA programs, so that the VM can be saved with its vGPU.
//!
//! NVIDIA's libcuda carries them out in the programs: it waits for their work, copies their video
//! memory into their own memory, and releases all that they have at the driver. Calls of CUDA wait
//! from then on. [`Tool`] is the program that asks libcuda for it.
//!
//! * [`users`]: processes that use the vGPU
//! * [`agent`]: requests of the host

pub mod agent;
pub mod users;

use std::fmt;
use std::path::PathBuf;
use std::process::Command;

use mdev_core::untrusted::one_line;

pub use self::users::Process;

/// Default path of the tool.
pub const DEFAULT_TOOL: &str = "/usr/lib/tessera/vgpu-checkpoint";
/// Longest time that the work of a process may take to end, in ms.
const LOCK_LIMIT_MS: u32 = 10_000;
/// Longest reason of the tool, in characters.
const MAX_REASON: usize = 300;

/// Step of a checkpoint of a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Calls of CUDA wait from now on, and work that was submitted ends.
    Lock,
    /// The state moves into the process' memory.
    Checkpoint,
    /// The state moves back.
    Restore,
    /// Calls of CUDA continue.
    Unlock,
}

impl Step {
    /// Returns the name in the tool's command line.
    const fn name(self) -> &'static str {
        match self {
            Self::Lock => "lock",
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Unlock => "unlock",
        }
    }
}

/// Process that cannot be checkpointed or restored.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{process}: {step} failed: {reason}")]
pub struct Refusal {
    /// The process.
    pub process: Process,
    /// The step that failed.
    pub step: Step,
    /// Reason, in one line.
    pub reason: String,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Asks libcuda in a process for a step.
pub trait Steps: fmt::Debug {
    /// Carries a step out. An error is a reason in one line.
    fn step(&self, step: Step, pid: u32) -> Result<(), String>;
}

/// Program with the command line of NVIDIA's `cuda-checkpoint`.
#[derive(Clone, Debug)]
pub struct Tool(pub PathBuf);

impl Steps for Tool {
    fn step(&self, step: Step, pid: u32) -> Result<(), String> {
        let mut command = Command::new(&self.0);
        command.args(["--action", step.name(), "--pid", &pid.to_string()]);
        if step == Step::Lock {
            command.args(["--timeout", &LOCK_LIMIT_MS.to_string()]);
        }
        let output = command.output();
        let output = output.map_err(|error| format!("{}: {error}", self.0.display()))?;
        if output.status.success() {
            return Ok(());
        }
        let text = [output.stdout, output.stderr].concat();
        let text = String::from_utf8_lossy(&text);
        let last = text.lines().map(str::trim).rfind(|line| !line.is_empty());
        Err(last.map_or_else(|| output.status.to_string(), |line| one_line(line, MAX_REASON)))
    }
}

/// Checkpoints processes: all of them, or none.
///
/// # Errors
///
/// Fails with the process that cannot be checkpointed. All of them continue then.
pub fn checkpoint(steps: &dyn Steps, processes: &[Process]) -> Result<(), Refusal> {
    let refuse = |process: &Process, step, reason| {
        let process = process.clone();
        Refusal { process, step, reason }
    };
    for (at, process) in processes.iter().enumerate() {
        if let Err(reason) = steps.step(Step::Lock, process.pid) {
            for locked in &processes[..at] {
                let _ = steps.step(Step::Unlock, locked.pid);
            }
            return Err(refuse(process, Step::Lock, reason));
        }
    }
    for (at, process) in processes.iter().enumerate() {
        if let Err(reason) = steps.step(Step::Checkpoint, process.pid) {
            restore(steps, &processes[..at]);
            for locked in &processes[at..] {
                let _ = steps.step(Step::Unlock, locked.pid);
            }
            return Err(refuse(process, Step::Checkpoint, reason));
        }
    }
    Ok(())
}

/// Restores processes that were checkpointed. Returns those that cannot be.
pub fn restore(steps: &dyn Steps, processes: &[Process]) -> Vec<Refusal> {
    let restore = |process: &Process| {
        [Step::Restore, Step::Unlock].into_iter().find_map(|step| {
            let reason = steps.step(step, process.pid).err()?;
            Some(Refusal { process: process.clone(), step, reason })
        })
    };
    processes.iter().filter_map(restore).collect()
}

#[cfg(test)]
mod tests;
