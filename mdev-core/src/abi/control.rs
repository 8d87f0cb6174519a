//! BAR 3: the control registers, 32 bits each. Wider values are read as two registers, low half first.

use bitflags::bitflags;

/// Value of [`reg::MAGIC`]: "TSRA".
pub const MAGIC: u32 = 0x4152_5354;
/// Value of [`reg::VERSION`]: major in the upper half, minor in the lower. A guest refuses another major.
pub const VERSION: u32 = 0x0001_0000;
/// Length of BAR 3 in bytes.
pub const BAR_BYTES: u64 = 16 * 1024;
/// Interrupt vectors of a vGPU. A guest that is granted fewer takes the remainder of its division.
pub const VECTORS: u32 = 4;

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
    /// RW1C: what is pending, in [`crate::gpu::Pending`]'s bits.
    pub const INTR_STATUS: u64 = 0x010;
    /// RW: which pending bits interrupt.
    pub const INTR_ENABLE: u64 = 0x014;
    /// RO: video memory, bytes, low half; the high half follows.
    pub const VRAM_BYTES_LO: u64 = 0x018;
    /// RO: video memory, bytes, high half.
    pub const VRAM_BYTES_HI: u64 = 0x01c;
    /// RW: guest-physical address of the mailbox page (page-aligned), low half.
    pub const MAILBOX_LO: u64 = 0x020;
    /// RW: its high half.
    pub const MAILBOX_HI: u64 = 0x024;
    /// WO: any write executes the request in the mailbox page; it is answered when the write completes.
    pub const MAILBOX_DOORBELL: u64 = 0x028;
    /// RO: status of the last request ([`super::super::mailbox::Status`]), also where the page could not be reached.
    pub const MAILBOX_STATUS: u64 = 0x02c;
    /// WO: a channel's token: wakes a sleeping silicon ([`super::super::userd::NEED_WAKEUP`]).
    pub const WAKE: u64 = 0x030;
    /// RO: channels this vGPU may have.
    pub const MAX_CHANNELS: u64 = 0x034;
    /// RO: trapped wake and doorbell writes since reset: what an exit-free guest keeps at zero.
    pub const TRAPPED_DOORBELLS: u64 = 0x038;
    /// RO: the type's name, NUL-padded, 64 bytes.
    pub const TYPE_NAME: u64 = 0x100;
    /// Length of [`TYPE_NAME`].
    pub const TYPE_NAME_BYTES: u64 = 64;
    /// RO: the vGPU's UUID, 16 bytes, as RFC 9562 orders them.
    pub const UUID: u64 = 0x140;
    /// RO: the GPU's name, NUL-padded, 64 bytes.
    pub const GPU_NAME: u64 = 0x180;
    /// Length of [`GPU_NAME`].
    pub const GPU_NAME_BYTES: u64 = 64;
}

bitflags! {
    /// What the vGPU has.
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
        /// Check NEED_WAKEUP after each doorbell.
        const NEED_WAKEUP = 1 << 4;
        /// Programs are blobs of [`super::program`], which has all but the factorial. Without this and `FACTORIAL`, they are
        /// machine code of the GPU.
        const SOFT_PROGRAMS = 1 << 5;
        /// BAR 4 is there and mapped.
        const VRAM_APERTURE = 1 << 6;
        /// There is a factorial unit: the kernel [`super::program::Kernel::Factorial`], whose program is a blob too.
        const FACTORIAL = 1 << 7;
    }
}

bitflags! {
    /// How the vGPU is.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Status: u32 {
        /// Ready for requests.
        const READY = 1 << 0;
        /// The GPU is lost; every request gets `DeviceLost` until the vGPU is started anew.
        const LOST = 1 << 1;
    }
}
