//! The mailbox: one request at a time, in a page of guest RAM.
//!
//! The guest fills the page, writes its address to `MAILBOX_LO/HI` and anything to `MAILBOX_DOORBELL`; when that write
//! completes, `status` and the reply are in the same page. A bad request gets a status, never a dead device.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Length of the page in bytes.
pub const PAGE_BYTES: usize = 4096;
/// Where the payload starts.
pub const PAYLOAD: usize = size_of::<Header>();
/// Most entries of one [`MapGuest`] request.
pub const MAX_SCATTER: usize =
    (PAGE_BYTES - PAYLOAD - size_of::<MapGuest>()) / size_of::<Scatter>();

/// Start of the page.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct Header {
    /// An [`Opcode`].
    pub opcode: u32,
    /// Out: a [`Status`].
    pub status: u32,
    /// Bytes of payload in the request.
    pub request_bytes: u32,
    /// Out: bytes of payload in the reply.
    pub reply_bytes: u32,
    /// Left as it is, for the guest's own use.
    pub cookie: u64,
    /// Zero.
    pub reserved: u64,
}

/// What is asked.
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
    /// No payload: all channels and mappings are gone afterwards.
    Reset = 8,
}

impl Opcode {
    /// The opcode with this number, if there is one.
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

/// How a request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Status {
    /// Done.
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
    /// A limit of the type is reached.
    Limit = 6,
    /// This vGPU cannot do that.
    Unsupported = 7,
    /// The GPU is lost.
    DeviceLost = 8,
    /// The mailbox address is not in guest memory that the device can reach (only in `MAILBOX_STATUS`).
    BadMailbox = 9,
    /// The host failed; its log says why.
    Internal = 10,
}

impl Status {
    /// The status with this number; unknown ones are [`Status::Internal`].
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
    /// First GPU virtual address that may be mapped.
    pub va_start: u64,
    /// First one past the last.
    pub va_end: u64,
    /// Frequency of semaphore timestamps in Hz.
    pub timestamp_hz: u64,
    /// [`super::control::Features`].
    pub features: u32,
    /// Channels this vGPU may have.
    pub max_channels: u32,
    /// Interrupt vectors.
    pub vectors: u32,
    /// Largest GPFIFO, in entries.
    pub max_gpfifo_entries: u32,
    /// Host class, copy class, compute class, 0 where there is none.
    pub classes: [u32; 3],
    /// Zero.
    pub reserved: u32,
}

/// Lowest GPU virtual address a guest may map: hardware keeps the 4 GiB below 4 GiB for itself.
pub const VA_START: u64 = 0x2_0000_0000;
/// First GPU virtual address past the range: rings and QMDs take 40-bit addresses.
pub const VA_END: u64 = 1 << 40;
/// Largest GPFIFO in entries.
pub const MAX_GPFIFO_ENTRIES: u32 = 1 << 16;

/// Bit of `flags` in [`MapGuest`] and [`MapVram`]: the GPU may only read.
pub const MAP_READ_ONLY: u32 = 1 << 0;

/// `MapGuest`: guest pages, one range after the other, at consecutive GPU virtual addresses.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct MapGuest {
    /// Where to map, page-aligned.
    pub va: u64,
    /// [`MAP_READ_ONLY`].
    pub flags: u32,
    /// Entries of [`Scatter`] that follow, 1 to [`MAX_SCATTER`].
    pub count: u32,
}

/// A range of guest-physical memory.
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

/// `MapVram`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct MapVram {
    /// Where to map, page-aligned.
    pub va: u64,
    /// Byte offset into video memory, page-aligned.
    pub offset: u64,
    /// Bytes, page-aligned, not zero.
    pub length: u64,
    /// [`MAP_READ_ONLY`].
    pub flags: u32,
    /// Zero.
    pub reserved: u32,
}

/// `Unmap`: the whole range must be mapped.
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

/// `ChannelCreate`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ChannelCreate {
    /// [`ENGINE_COPY`] or [`ENGINE_COMPUTE`].
    pub engine: u32,
    /// Entries of the GPFIFO, a power of two, 2 to [`MAX_GPFIFO_ENTRIES`].
    pub gpfifo_entries: u32,
    /// GPU virtual address of the GPFIFO, 8-byte aligned.
    pub gpfifo_va: u64,
    /// Guest-physical address, or offset into video memory, of the USERD; 512-byte aligned.
    pub userd: u64,
    /// [`USERD_GUEST`] or [`USERD_VRAM`].
    pub userd_aperture: u32,
    /// Interrupt vector of its non-stall interrupts.
    pub vector: u32,
}

/// A channel for copies.
pub const ENGINE_COPY: u32 = 0;
/// A channel for compute and copies.
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
    /// Names the channel in requests.
    pub channel: u32,
    /// Names it to the doorbell.
    pub token: u32,
}

/// Payload of `ChannelQuery` and `ChannelDestroy`.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout,
)]
#[repr(C)]
pub struct ChannelName {
    /// From [`ChannelCreated`].
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
    /// 0, or a code of [`super::notifier`]: the channel is dead; destroy it and make another.
    pub error: u32,
    /// Ring position.
    pub gp_get: u32,
    /// Faulting GPU virtual address, or the bad method or entry.
    pub error_info: u64,
    /// Engine time used, in nanoseconds.
    pub engine_ns: u64,
}
