//! What a guest driver programs. The device model, the silicon and the guest runtime all use these same definitions.
//!
//! Control registers and mailbox are Tessera's own and versioned by [`control::VERSION`]. Everything from the doorbell
//! on is NVIDIA's host interface, as its public class headers give it (clc86f.h, clc8b5.h, clcbc0.h, clcbc0qmd.h), so
//! that one guest runtime drives the software silicon and an H100.

pub mod compute;
pub mod control;
pub mod copy;
pub mod host;
pub mod mailbox;
pub mod program;
pub mod qmd;

/// The doorbell page (BAR 1), as class `HOPPER_USERMODE_A` (c661) lays it out.
pub mod doorbell {
    /// `NVC661_NOTIFY_CHANNEL_PENDING`: a 32-bit write of a channel's token.
    pub const TOKEN: u64 = 0x90;
    /// Bytes of the page that hardware lets anyone map.
    pub const PAGE_BYTES: u64 = 0x1_0000;
}

/// The 512-byte block through which a guest and the host engine exchange ring positions (`Nvc86fControl`).
pub mod userd {
    /// Length and alignment, in bytes.
    pub const BYTES: u64 = 512;
    /// `GPGet`: the next entry the silicon will fetch. Written by the silicon.
    pub const GP_GET: u64 = 0x88;
    /// `GPPut`: the entry after the last one queued. Written by the guest.
    pub const GP_PUT: u64 = 0x8c;
    /// Non-zero while whoever looks at `GP_PUT` sleeps and wants a write to [`super::control::reg::WAKE`] for new work.
    ///
    /// A guest writes `GP_PUT`, executes a full fence, rings the doorbell, and then reads this word. Hardware itself
    /// never sets it (it lies in a reserved part of `Nvc86fControl`); a worker that rings for the guest does.
    pub const NEED_WAKEUP: u64 = 0x1f0;
}

/// Codes of the error notifier, as `nverror.h` numbers them.
pub mod notifier {
    /// `ROBUST_CHANNEL_FIFO_ERROR_IDLE_TIMEOUT`: one kernel or transfer ran longer than the vGPU's `hang_timeout`.
    pub const IDLE_TIMEOUT: u32 = 8;
    /// `ROBUST_CHANNEL_GR_ERROR_SW_METHOD`-like: a method or QMD the class does not have.
    pub const GR_ERROR: u32 = 13;
    /// `ROBUST_CHANNEL_GR_SEMAPHORE_TIMEOUT`: it waited for a semaphore longer than the vGPU's `acquire_timeout`.
    pub const SEMAPHORE_TIMEOUT: u32 = 24;
    /// `ROBUST_CHANNEL_FIFO_ERROR_MMU_ERR_FLT`: an address that is not mapped, or not writable.
    pub const MMU_FAULT: u32 = 31;
    /// `ROBUST_CHANNEL_PBDMA_ERROR`: a pushbuffer, GPFIFO entry or host method that makes no sense.
    pub const PBDMA_ERROR: u32 = 32;
    /// `ROBUST_CHANNEL_RESETCHANNEL_VERIF_ERROR`: the channel was reset from outside.
    pub const RESET_CHANNEL: u32 = 43;
    /// `ROBUST_CHANNEL_CTXSW_TIMEOUT_ERROR`: it did not give up the engine in time.
    pub const CTXSW_TIMEOUT: u32 = 109;
}
