//! What can go wrong, each in one line.

use std::io;
use std::time::Duration;

use mdev_core::abi::mailbox::Status;
use mdev_core::abi::notifier;

/// Why something did not work.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// There is no vGPU in this machine.
    #[error(
        "No vGPU found: no PCI function has Tessera's control registers (BAR 3); is it attached?"
    )]
    NoDevice,
    /// Something else drives it.
    #[error("The vGPU {0} is in use by another process")]
    Busy(String),
    /// The control interface has another major version.
    #[error("The vGPU's interface is version {major}.{minor}; this program speaks version 1")]
    Version {
        /// Upper half of the register.
        major: u32,
        /// Lower half.
        minor: u32,
    },
    /// The GPU does not answer.
    #[error("The GPU is lost: the vGPU has to be started anew")]
    Lost,
    /// The device refused a request.
    #[error("{request} was refused: {status:?}")]
    Refused {
        /// What was asked.
        request: &'static str,
        /// The answer.
        status: Status,
    },
    /// The channel is dead.
    #[error("The channel faulted: {} (code {code}, at {info:#x})", describe(*code))]
    Channel {
        /// A code of [`notifier`].
        code: u32,
        /// Faulting address, or the bad method or entry.
        info: u64,
    },
    /// Nothing happened in time, and the channel reports no error.
    #[error("{what} did not finish within {after:?}, and the channel reports no error")]
    Timeout {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        after: Duration,
    },
    /// There is not enough of something.
    #[error("Out of {what}: {asked} bytes do not fit")]
    Exhausted {
        /// Of what.
        what: &'static str,
        /// How much was asked for.
        asked: u64,
    },
    /// An argument that cannot work.
    #[error("Invalid argument: {0}")]
    Invalid(String),
    /// The vGPU cannot do it.
    #[error("This vGPU has no {0}")]
    Unsupported(&'static str),
    /// It has named programs, and not this one.
    #[error("This vGPU has no kernel {0}")]
    NoKernel(&'static str),
    /// The GPU computed something else than the CPU.
    #[error("Wrong result: {0}")]
    Wrong(String),
    /// The operating system refused.
    #[error("{what}: {source}")]
    Os {
        /// What was tried.
        what: String,
        /// Why not.
        source: io::Error,
    },
}

impl GuestError {
    /// For `map_err`: says what was tried.
    pub fn os<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Os { what, source: source.into() }
    }
}

fn describe(code: u32) -> &'static str {
    match code {
        notifier::IDLE_TIMEOUT => "one kernel or transfer ran longer than it may",
        notifier::SEMAPHORE_TIMEOUT => "it waited for a semaphore longer than it may",
        notifier::GR_ERROR => "an unknown method or a bad launch descriptor",
        notifier::MMU_FAULT => "an address that is not mapped",
        notifier::PBDMA_ERROR => "a bad pushbuffer, ring entry or host method",
        notifier::RESET_CHANNEL => "it was reset by the host",
        notifier::CTXSW_TIMEOUT => "it did not give up the engine in time",
        _ => "an unknown error",
    }
}
