//! Control registers (BAR 3), 32 bits each. A wider value is two registers, the low half first.

use bitflags::bitflags;

/// Value of [`reg::MAGIC`]: "TSRA".
pub const MAGIC: u32 = 0x4152_5354;
/// Value of [`reg::VERSION`]: major version in the upper half, minor in the lower. A guest refuses
/// an unknown major version.
pub const VERSION: u32 = 0x0001_0002;
/// Length of BAR 3 in bytes.
pub const BAR_BYTES: u64 = 16 * 1024;
/// Interrupt vectors of a vGPU. A guest with fewer MSI messages uses the vector number modulo their
/// number.
pub const VECTORS: u32 = 4;

/// First minor version with [`reg::CHECKPOINT_REQUEST`] and the registers after it.
pub const MINOR_CHECKPOINT: u32 = 2;
/// Bit of [`reg::CHECKPOINT_REQUEST`]: the guest is to checkpoint its programs.
pub const CHECKPOINT_WANTED: u32 = 1 << 0;
/// Limit of the reason of a refusal, in bytes.
pub const CHECKPOINT_REASON_BYTES: usize = 128;

/// Answer of the guest in [`reg::CHECKPOINT_STATE`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum CheckpointState {
    /// No agent waits for requests.
    None = 0,
    /// An agent waits for requests, or carries one out.
    Ready = 1,
    /// No program uses the vGPU, and the control queue is off.
    Done = 2,
    /// The programs continue, for the reason that was written before.
    Refused = 3,
}

/// Byte offsets.
pub mod reg {
    /// RO: [`super::MAGIC`].
    pub const MAGIC: u64 = 0x000;
    /// RO: [`super::VERSION`].
    pub const VERSION: u64 = 0x004;
    /// RO: [`super::Features`].
    pub const FEATURES: u64 = 0x008;
    /// RO: [`super::Status`].
    pub const STATUS: u64 = 0x00c;
    /// RW1C: pending conditions, bits of [`crate::gpu::Pending`].
    pub const INTR_STATUS: u64 = 0x010;
    /// RW: conditions that interrupt, bits of [`crate::gpu::Pending`].
    pub const INTR_ENABLE: u64 = 0x014;
    /// RO: size of video memory in bytes, low half.
    pub const VRAM_BYTES_LO: u64 = 0x018;
    /// RO: size of video memory in bytes, high half.
    pub const VRAM_BYTES_HI: u64 = 0x01c;
    /// RW: guest-physical address of the mailbox page (page-aligned), low half.
    pub const MAILBOX_LO: u64 = 0x020;
    /// RW: guest-physical address of the mailbox page, high half.
    pub const MAILBOX_HI: u64 = 0x024;
    /// WO: any write executes the request in the mailbox page. The reply is complete when the write
    /// completes.
    pub const MAILBOX_DOORBELL: u64 = 0x028;
    /// RO: status of the last request ([`super::super::mailbox::Status`]), also if the page was not
    /// accessible.
    pub const MAILBOX_STATUS: u64 = 0x02c;
    /// WO: token of a channel. Wakes a sleeping engine ([`super::super::userd::NEED_WAKEUP`]).
    pub const WAKE: u64 = 0x030;
    /// RO: maximum number of channels.
    pub const MAX_CHANNELS: u64 = 0x034;
    /// RO: trapped wake and doorbell writes since reset. Zero for a guest without exits.
    pub const TRAPPED_DOORBELLS: u64 = 0x038;
    /// RO: [`super::super::queue::VERSION`], or 0 without a control queue.
    pub const QUEUE_VERSION: u64 = 0x040;
    /// RO: [`super::super::queue::status`].
    pub const QUEUE_STATUS: u64 = 0x044;
    /// RW: guest-physical address of the queue (page-aligned), low half.
    pub const QUEUE_BASE_LO: u64 = 0x048;
    /// RW: guest-physical address of the queue, high half.
    pub const QUEUE_BASE_HI: u64 = 0x04c;
    /// RW: number of slots of the queue.
    pub const QUEUE_SLOTS: u64 = 0x050;
    /// RW: [`super::super::queue::CONTROL_ENABLE`].
    pub const QUEUE_CONTROL: u64 = 0x054;
    /// WO: any write: the queue has new submissions.
    pub const QUEUE_NOTIFY: u64 = 0x058;
    /// RO: number of the host's request: odd if the guest is to checkpoint its programs
    /// ([`super::CHECKPOINT_WANTED`]), even if it is to restore them. Each change raises
    /// [`Pending::QUEUE`](crate::gpu::Pending::QUEUE).
    pub const CHECKPOINT_REQUEST: u64 = 0x05c;
    /// RW: [`super::CheckpointState`].
    pub const CHECKPOINT_STATE: u64 = 0x060;
    /// WO: the next four bytes of the reason of a refusal, in UTF-8, padded with zeros.
    pub const CHECKPOINT_REASON: u64 = 0x064;
    /// RO: name of the type, NUL-padded, 64 bytes.
    pub const TYPE_NAME: u64 = 0x100;
    /// Length of [`TYPE_NAME`].
    pub const TYPE_NAME_BYTES: u64 = 64;
    /// RO: UUID of the vGPU, 16 bytes, in the byte order of RFC 9562.
    pub const UUID: u64 = 0x140;
    /// RO: name of the GPU, NUL-padded, 64 bytes.
    pub const GPU_NAME: u64 = 0x180;
    /// Length of [`GPU_NAME`].
    pub const GPU_NAME_BYTES: u64 = 64;
}

bitflags! {
    /// Features of a vGPU.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Features: u32 {
        /// A display head (BAR 0 and BAR 2).
        const DISPLAY = 1 << 0;
        /// Copy channels.
        const COPY = 1 << 1;
        /// Compute channels.
        const COMPUTE = 1 << 2;
        /// BAR 1 is mapped; otherwise each doorbell write is trapped.
        const DOORBELL_MAPPED = 1 << 3;
        /// The guest has to check NEED_WAKEUP after each doorbell.
        const NEED_WAKEUP = 1 << 4;
        /// Programs are blobs of [`super::program`] that name a built-in kernel. Without this and
        /// `FIXED_FUNCTION`, programs are machine code of the GPU.
        const SOFT_PROGRAMS = 1 << 5;
        /// BAR 4 exists and is mapped.
        const VRAM_APERTURE = 1 << 6;
        /// The device has fixed functions, which blobs name
        /// ([`super::program::Kernel::FixedFunction`]).
        const FIXED_FUNCTION = 1 << 7;
        /// A control queue for CUDA programs ([`super::queue`]).
        const QUEUE = 1 << 8;
    }
}

bitflags! {
    /// Status of a vGPU.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Status: u32 {
        /// Ready for requests.
        const READY = 1 << 0;
        /// The GPU is lost. Every request fails with `DeviceLost` until the vGPU is restarted.
        const LOST = 1 << 1;
    }
}
