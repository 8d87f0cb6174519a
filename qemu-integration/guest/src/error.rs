//! Errors of the guest runtime, each described in one line.

use std::io;
use std::time::Duration;

use mdev_core::abi::mailbox::Status;
use mdev_core::abi::notifier;

/// Error of the guest runtime.
#[derive(Debug, thiserror::Error)]
pub enum GuestError {
    /// No vGPU is present in this machine.
    #[error(
        "No vGPU found: no PCI function has Tessera's control registers (BAR 3); is it attached?"
    )]
    NoDevice,
    /// Another process has the vGPU open.
    #[error("The vGPU {address} is in use by {user}; wait for its end, or end it")]
    Busy {
        /// PCI address.
        address: String,
        /// The other process, with its name if it is known.
        user: String,
    },
    /// A kernel driver has the vGPU.
    #[error(
        "The vGPU {address} belongs to the kernel driver {driver}; unbind that driver first: \
         echo {address} > /sys/bus/pci/drivers/{driver}/unbind"
    )]
    Driver {
        /// PCI address.
        address: String,
        /// Name of the driver.
        driver: String,
    },
    /// The vGPU has a display and no framebuffer.
    #[error(
        "The vGPU {0} has no framebuffer: load its display driver (`modprobe bochs`), or give \
         --width and --height"
    )]
    NoFramebuffer(String),
    /// The control interface has an unsupported major version.
    #[error("The vGPU's interface is version {major}.{minor}; this program speaks version 1")]
    Version {
        /// Major version.
        major: u32,
        /// Minor version.
        minor: u32,
    },
    /// The GPU does not answer.
    #[error("The GPU is lost: restart the vGPU")]
    Lost,
    /// The device refused a request.
    #[error("{request} was refused: {status:?}")]
    Refused {
        /// Name of the request.
        request: &'static str,
        /// Status of the response.
        status: Status,
    },
    /// The channel has faulted.
    #[error("The channel faulted: {} (code {code}, at {info:#x})", describe(*code))]
    Channel {
        /// Error code of [`notifier`].
        code: u32,
        /// Faulting address, or the invalid method or entry.
        info: u64,
    },
    /// The work did not finish in time, and the channel reports no error.
    #[error("{what} did not finish within {after:?}, and the channel reports no error")]
    Timeout {
        /// Description of the awaited work.
        what: &'static str,
        /// Timeout.
        after: Duration,
    },
    /// A resource is exhausted.
    #[error("Out of {what}: {asked} bytes do not fit")]
    Exhausted {
        /// Name of the resource.
        what: &'static str,
        /// Requested amount in bytes.
        asked: u64,
    },
    /// An argument is invalid.
    #[error("Invalid argument: {0}")]
    Invalid(String),
    /// The vGPU lacks a capability.
    #[error("This vGPU has no {0}")]
    Unsupported(&'static str),
    /// The vGPU has only built-in kernels, and this kernel is not one of them.
    #[error("This vGPU has no kernel {0}")]
    NoKernel(&'static str),
    /// The GPU's result differs from the CPU's.
    #[error("Wrong result: {0}")]
    Wrong(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    Os {
        /// Description of the operation.
        what: String,
        /// Error of the operating system.
        source: io::Error,
    },
}

impl GuestError {
    /// Returns a function for `map_err` that adds a description of the operation.
    pub fn os<E: Into<io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Self {
        let what = what.into();
        move |source| Self::Os { what, source: source.into() }
    }
}

fn describe(code: u32) -> &'static str {
    match code {
        notifier::IDLE_TIMEOUT => "a kernel or transfer exceeded the hang limit",
        notifier::SEMAPHORE_TIMEOUT => "a semaphore wait exceeded the hang limit",
        notifier::GR_ERROR => "an unknown method or a bad launch descriptor",
        notifier::MMU_FAULT => "access to an unmapped address",
        notifier::PBDMA_ERROR => "a bad pushbuffer, ring entry or host method",
        notifier::RESET_CHANNEL => "reset by the host",
        notifier::CTXSW_TIMEOUT => "the channel did not yield the engine in time",
        _ => "an unknown error",
    }
}
