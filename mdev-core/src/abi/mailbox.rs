//! Mailbox: a page of guest RAM with one request at a time.
//!
//! The guest fills the page and writes its address to `MAILBOX_LO/HI` and any value to
//! `MAILBOX_DOORBELL`. When that write completes, the page contains `status` and the reply. An
//! invalid request fails with a status and does not affect the device.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Length of the page in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Offset of the payload.
pub const PAYLOAD: usize = size_of::<Header>();
/// Maximum number of entries of a [`MapGuest`] request.
pub const MAX_SCATTER: usize =
    (PAGE_BYTES - PAYLOAD - size_of::<MapGuest>()) / size_of::<Scatter>();

/// Header at the start of the page.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Header {
    /// Number of an [`Opcode`].
    pub opcode: u32,
    /// Out: number of a [`Status`].
    pub status: u32,
    /// Size of the request's payload in bytes.
    pub request_bytes: u32,
    /// Out: size of the reply's payload in bytes.
    pub reply_bytes: u32,
    /// Unused by the device, for the guest's own use.
    pub cookie: u64,
    /// Zero.
    pub reserved: u64,
}

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Opcode {
    /// No payload; reply [`Info`].
    GetInfo = 1,
    /// [`MapGuest`] and its [`Scatter`] list; no reply payload.
    MapGuest = 2,
    /// [`MapVram`]; no reply payload.
    MapVram = 3,
    /// [`Unmap`]; no reply payload.
    Unmap = 4,
    /// [`ChannelCreate`]; reply [`ChannelCreated`].
    ChannelCreate = 5,
    /// [`ChannelName`]; reply [`ChannelState`].
    ChannelQuery = 6,
    /// [`ChannelName`]; no reply payload.
    ChannelDestroy = 7,
    /// No payload. Destroys all channels and mappings.
    Reset = 8,
}

impl Opcode {
    /// Returns the opcode with this number.
    pub const fn from_number(number: u32) -> Option<Self> {
        Some(match number {
            1 => Self::GetInfo,
            2 => Self::MapGuest,
            3 => Self::MapVram,
            4 => Self::Unmap,
            5 => Self::ChannelCreate,
            6 => Self::ChannelQuery,
            7 => Self::ChannelDestroy,
            8 => Self::Reset,
            _ => return None,
        })
    }
}

/// Result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// No such opcode.
    UnknownOpcode = 1,
    /// A field has a value that is never valid, or the payload has the wrong length.
    Invalid = 2,
    /// An address or length outside guest memory, video memory or the GPU's address space.
    OutOfRange = 3,
    /// The GPU virtual address is mapped already.
    Overlap = 4,
    /// No such channel or mapping.
    NotFound = 5,
    /// A limit of the vGPU type is reached.
    Limit = 6,
    /// The vGPU does not support the operation.
    Unsupported = 7,
    /// The GPU is lost.
    DeviceLost = 8,
    /// The mailbox address is not in guest memory that the device can access (only in
    /// `MAILBOX_STATUS`).
    BadMailbox = 9,
    /// The host failed. Its log has the cause.
    Internal = 10,
}

impl Status {
    /// Returns the status with this number; [`Status::Internal`] for unknown numbers.
    pub const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Ok,
            1 => Self::UnknownOpcode,
            2 => Self::Invalid,
            3 => Self::OutOfRange,
            4 => Self::Overlap,
            5 => Self::NotFound,
            6 => Self::Limit,
            7 => Self::Unsupported,
            8 => Self::DeviceLost,
            9 => Self::BadMailbox,
            _ => Self::Internal,
        }
    }
}

/// Reply of `GetInfo`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Info {
    /// Video memory in bytes.
    pub vram_bytes: u64,
    /// First GPU virtual address for mappings.
    pub va_start: u64,
    /// End of the range of GPU virtual addresses (exclusive).
    pub va_end: u64,
    /// Frequency of semaphore timestamps in Hz.
    pub timestamp_hz: u64,
    /// [`super::control::Features`].
    pub features: u32,
    /// Maximum number of channels.
    pub max_channels: u32,
    /// Number of interrupt vectors.
    pub vectors: u32,
    /// Maximum number of GPFIFO entries.
    pub max_gpfifo_entries: u32,
    /// Numbers of the host, copy and compute class, 0 for an absent class.
    pub classes: [u32; 3],
    /// Zero.
    pub reserved: u32,
}

/// First GPU virtual address for mappings. Hardware reserves the 4 GiB below it.
pub const VA_START: u64 = 0x2_0000_0000;
/// End of GPU virtual addresses (exclusive): rings and QMDs have 40-bit addresses.
pub const VA_END: u64 = 1 << 40;
/// Maximum number of GPFIFO entries.
pub const MAX_GPFIFO_ENTRIES: u32 = 1 << 16;

/// Bit of `flags` in [`MapGuest`] and [`MapVram`]: read-only for the GPU.
pub const MAP_READ_ONLY: u32 = 1 << 0;

/// `MapGuest`: maps ranges of guest memory at consecutive GPU virtual addresses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct MapGuest {
    /// GPU virtual address, page-aligned.
    pub va: u64,
    /// 0 or [`MAP_READ_ONLY`].
    pub flags: u32,
    /// Number of [`Scatter`] entries that follow, 1 to [`MAX_SCATTER`].
    pub count: u32,
}

/// Range of guest-physical memory.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Scatter {
    /// Start, page-aligned.
    pub address: u64,
    /// Bytes, page-aligned, not zero.
    pub length: u64,
}

/// `MapVram`: maps video memory.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct MapVram {
    /// GPU virtual address, page-aligned.
    pub va: u64,
    /// Byte offset into video memory, page-aligned.
    pub offset: u64,
    /// Bytes, page-aligned, not zero.
    pub length: u64,
    /// 0 or [`MAP_READ_ONLY`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// `Unmap`: unmaps a range of which every page is mapped.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Unmap {
    /// Start, page-aligned.
    pub va: u64,
    /// Bytes, page-aligned, not zero.
    pub length: u64,
}

/// `ChannelCreate`: creates a channel.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ChannelCreate {
    /// [`ENGINE_COPY`] or [`ENGINE_COMPUTE`].
    pub engine: u32,
    /// Number of GPFIFO entries, a power of two from 2 to [`MAX_GPFIFO_ENTRIES`].
    pub gpfifo_entries: u32,
    /// GPU virtual address of the GPFIFO, 8-byte aligned.
    pub gpfifo_va: u64,
    /// Guest-physical address, or offset into video memory, of the USERD; 512-byte aligned.
    pub userd: u64,
    /// [`USERD_GUEST`] or [`USERD_VRAM`].
    pub userd_aperture: u32,
    /// Interrupt vector of non-stall interrupts.
    pub vector: u32,
    /// GPU virtual address of the preamble, 4-byte aligned.
    ///
    /// The preamble is a pushbuffer that gives a new channel the state which this one's driver has
    /// given it, such as bound classes and memory windows. A vGPU of hardware executes it when it
    /// is restored. It must stay mapped as long as the channel exists. The driver also counts in
    /// [`PROGRESS`](super::userd::PROGRESS).
    pub preamble_va: u64,
    /// Length of the preamble in 32-bit words; 0 if there is none. A vGPU of hardware with a
    /// channel without a preamble cannot be saved.
    pub preamble_dwords: u32,
    /// Zero.
    pub reserved: u32,
}

impl ChannelCreate {
    /// Length of the request of drivers that know no preamble, in bytes. The rest counts as zero.
    pub const SHORT_BYTES: usize = 32;
}

/// Engine of a channel for copies.
pub const ENGINE_COPY: u32 = 0;
/// Engine of a channel for compute and copies.
pub const ENGINE_COMPUTE: u32 = 1;
/// The USERD is in guest RAM.
pub const USERD_GUEST: u32 = 0;
/// The USERD is in video memory.
pub const USERD_VRAM: u32 = 1;

/// Reply of `ChannelCreate`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ChannelCreated {
    /// Id of the channel in requests.
    pub channel: u32,
    /// Token of the channel for the doorbell.
    pub token: u32,
}

/// Payload of `ChannelQuery` and `ChannelDestroy`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ChannelName {
    /// Id from [`ChannelCreated`].
    pub channel: u32,
    /// Zero.
    pub reserved: u32,
}

/// Reply of `ChannelQuery`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ChannelState {
    /// 0, or a code of [`super::notifier`]: the channel has failed and can only be destroyed.
    pub error: u32,
    /// Ring position.
    pub gp_get: u32,
    /// Faulting GPU virtual address, or the invalid method or entry.
    pub error_info: u64,
    /// Engine time, in nanoseconds.
    pub engine_ns: u64,
}
