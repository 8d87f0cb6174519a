//! Guest interface of a vGPU, shared by the device model, the emulation and the guest runtime.
//!
//! Control registers and mailbox are specific to Tessera and versioned by [`control::VERSION`]. The
//! doorbell, channels and classes are NVIDIA's host interface, from the public class headers
//! (clc86f.h, clc8b5.h, clcbc0.h, clcbc0qmd.h), so that one guest runtime drives the software GPU
//! and an H100.

pub mod compute;
pub mod control;
pub mod copy;
pub mod host;
pub mod mailbox;
pub mod program;
pub mod qmd;
pub mod queue;

/// Doorbell page (BAR 1), in the layout of class `HOPPER_USERMODE_A` (c661).
pub mod doorbell {
    /// `NVC661_NOTIFY_CHANNEL_PENDING`: 32-bit write of a channel's token.
    pub const TOKEN: u64 = 0x90;
    /// Size of the unprivileged page in bytes.
    pub const PAGE_BYTES: u64 = 0x1_0000;
}

/// USERD: the 512-byte block with the ring positions of the guest and the host engine
/// (`Nvc86fControl`).
pub mod userd {
    /// Length and alignment, in bytes.
    pub const BYTES: u64 = 512;
    /// `GPGet`: the next entry that the engine fetches. Written by the engine.
    pub const GP_GET: u64 = 0x88;
    /// `GPPut`: the entry after the last queued entry. Written by the guest.
    pub const GP_PUT: u64 = 0x8c;
    /// Non-zero while the reader of `GP_PUT` sleeps and needs a write to
    /// [`super::control::reg::WAKE`] for new work.
    ///
    /// A guest writes `GP_PUT`, executes a full fence, rings the doorbell, and then reads this
    /// word. Hardware never sets this word, which is in a reserved part of `Nvc86fControl`; a
    /// worker that polls doorbells sets it.
    pub const NEED_WAKEUP: u64 = 0x1f0;
    /// Number of entries that are completed since the channel was created, modulo 2^32. Written by
    /// the GPU: a driver that names a [preamble](super::mailbox::ChannelCreate::preamble_va) ends
    /// each entry with a release of a semaphore here, once the entry's work is done. In a reserved
    /// part of `Nvc86fControl`.
    pub const PROGRESS: u64 = 0x1f4;
}

/// Codes of the error notifier (`nverror.h`).
pub mod notifier {
    /// `ROBUST_CHANNEL_FIFO_ERROR_IDLE_TIMEOUT`: a kernel or transfer exceeded the vGPU's
    /// `hang_timeout`.
    pub const IDLE_TIMEOUT: u32 = 8;
    /// `ROBUST_CHANNEL_GR_ERROR_SW_METHOD`: an invalid method or QMD.
    pub const GR_ERROR: u32 = 13;
    /// `ROBUST_CHANNEL_GR_SEMAPHORE_TIMEOUT`: a wait for a semaphore exceeded the vGPU's
    /// `acquire_timeout`.
    pub const SEMAPHORE_TIMEOUT: u32 = 24;
    /// `ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT`: an address is not mapped, or not writable.
    pub const MMU_FAULT: u32 = 31;
    /// `ROBUST_CHANNEL_PBDMA_ERROR`: an invalid pushbuffer, GPFIFO entry or host method.
    pub const PBDMA_ERROR: u32 = 32;
    /// `ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR`: the channel was reset by the host.
    pub const RESET_CHANNEL: u32 = 43;
    /// `ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR`: the channel did not release the engine in time.
    pub const CTXSW_TIMEOUT: u32 = 109;
}
