//! What a device's owner, the manager and the workers say to each other: postcard in SOCK_SEQPACKET packets.
//!
//! Each connection is a sequence of one request and one reply, and begins with a hello. Both ends come from one
//! binary, but not always from one build: a manager may adopt an owner that an older one started. So requests, replies and
//! refusals are only added, at the end of their lists, and whoever answers says the older of both versions: from then on
//! neither says what that one does not have. What cannot be done like that, as a change of anything that is said
//! already, raises [`OLDEST`].

use std::io;
use std::time::Duration;

use mdev_core::device::Scanout;
use mdev_core::gpu::{
    Backing, ChannelHandle, ChannelSpec, ChannelStatus, ClientSpec, GpuDescription, GpuError,
    PhysicalScreen, Quotas, Usage, UsageReport,
};
use mdev_core::ids::{ChannelId, GpuVa, MemoryId, VgpuId};
use mdev_core::sched::Budget;
use serde::{Deserialize, Serialize};

/// Bumped with every change of the types in this file, or of those of `mdev_core` that they hold.
pub const VERSION: u32 = 7;

/// The oldest version that is understood.
pub const OLDEST: u32 = 6;

/// The first version with [`AdminRequest::Forget`] and [`Refusal::Pieces`].
pub const WITH_FORGET: u32 = 7;

/// The version of a connection, as whoever answers says it: the older of both.
pub const fn agreed(asked: u32) -> u32 {
    // Who is too old to be understood is told what we are.
    if asked < OLDEST || asked > VERSION { VERSION } else { asked }
}

/// Whether a version that was agreed upon can be spoken here.
pub const fn is_spoken(version: u32) -> bool {
    version >= OLDEST && version <= VERSION
}

/// Byte offset of the 32-bit pending word ([`mdev_core::gpu::Pending`]) in a client's status page.
pub const STATUS_PENDING: usize = 0;
/// Length of a client's status page.
pub const STATUS_BYTES: usize = 4096;

/// What the manager asks, on the admin socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminRequest {
    /// First of all. The first variant for good, so that any two versions understand it.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Makes room for a vGPU: [`AdminReply::Admitted`], with the client's connection attached.
    Admit(ClientSpec),
    /// Takes everything back from one.
    Evict(VgpuId),
    /// Sets a time slice.
    SetTimeslice(VgpuId, Duration),
    /// Opens or closes a gate.
    SetGate(VgpuId, bool),
    /// Faults every channel of a vGPU.
    Reset(VgpuId),
    /// All counters: [`AdminReply::Usage`].
    Usage,
    /// Sets or lifts a budget of engine time.
    SetBudget(VgpuId, Option<Budget>),
    /// Sets quotas.
    SetQuotas(VgpuId, Quotas),
    /// Puts a vGPU on the physical screen: [`AdminReply::Focused`].
    Focus(VgpuId),
    /// Shows each vGPU for so long, in turn, or ends that.
    Rotate(Option<Duration>),
    /// Who is on the screen: [`AdminReply::Screen`].
    Screen,
    /// Nothing is kept any more for a vGPU, which is gone for good. From [`WITH_FORGET`] on.
    Forget(VgpuId),
}

/// What it answers to the manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminReply {
    /// Answer to `Hello`. The first variant for good.
    Hello {
        /// What is spoken from here on: [`agreed`].
        version: u32,
        /// What the GPU is.
        gpu: GpuDescription,
    },
    /// Done, and nothing to tell.
    Done,
    /// Admitted; the connection is attached.
    Admitted,
    /// All counters.
    Usage(UsageReport),
    /// No.
    Refused(Refusal),
    /// On the screen, after so long.
    Focused(Duration),
    /// Who is.
    Screen(PhysicalScreen),
}

/// What a worker asks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientRequest {
    /// First of all: [`ClientReply::Hello`].
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Imports the attached file: [`ClientReply::Imported`].
    Import {
        /// Byte offset into the file.
        offset: u64,
        /// Bytes.
        len: u64,
        /// False where it may only be read.
        writable: bool,
    },
    /// Takes an import away.
    Release(MemoryId),
    /// Maps memory.
    Map {
        /// Where.
        va: GpuVa,
        /// Bytes.
        len: u64,
        /// What.
        backing: Backing,
        /// False where it may only be read.
        writable: bool,
    },
    /// Unmaps memory.
    Unmap {
        /// Where.
        va: GpuVa,
        /// Bytes.
        len: u64,
    },
    /// Makes a channel: [`ClientReply::Created`].
    CreateChannel(ChannelSpec),
    /// Ends a channel.
    DestroyChannel(ChannelId),
    /// How a channel is: [`ClientReply::Status`].
    QueryChannel(ChannelId),
    /// The attached eventfd, or none, for one interrupt vector.
    SetInterrupt(u32),
    /// Destroys all channels and mappings.
    Reset,
    /// What was used: [`ClientReply::Usage`].
    Usage,
    /// What the guest's display registers show now.
    SetScanout(Scanout),
    /// Makes the partition zeros.
    Scrub,
}

/// What it answers to a worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ClientReply {
    /// Answer to `Hello`. Attached, in this order: the doorbell page, the status page, the eventfd that the silicon
    /// signals after a change of the status page, the socket on which any packet wakes the silicon, the eventfd that
    /// wakes it when it is signalled, and the file with the video memory partition, where there is one.
    Hello {
        /// What is spoken from here on: [`agreed`].
        version: u32,
        /// What the GPU is.
        gpu: GpuDescription,
        /// What was granted.
        spec: ClientSpec,
        /// Where the partition begins in its file, where there is one.
        vram_offset: Option<u64>,
    },
    /// Done, and nothing to tell.
    Done,
    /// The id of an import.
    Imported(MemoryId),
    /// A channel that was made.
    Created(ChannelHandle),
    /// How a channel is.
    Status(ChannelStatus),
    /// What was used.
    Usage(Usage),
    /// No.
    Refused(Refusal),
}

/// Descriptors of [`ClientReply::Hello`], the partition aside.
pub const HELLO_FDS: usize = 5;

/// Why not, in a form that fits a packet. The words for it are [`GpuError`]'s.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// A request that makes no sense here, or could not be read.
    Message,
    /// Another version of this protocol.
    Version,
    /// An address or length that is not a multiple of the page size, or zero.
    Alignment,
    /// A descriptor that is missing, or of the wrong kind.
    Descriptor,
    /// A GPFIFO that no GPU could have.
    Gpfifo,
    /// A misplaced USERD.
    Userd,
    /// An interrupt vector that does not exist.
    Vector,
    /// A time slice outside 100 us to 1 s.
    Timeslice,
    /// A budget of engine time that means nothing.
    Budget,
    /// Quotas that mean nothing.
    Quotas,
    /// A [`ClientSpec`] that no GPU could grant.
    Spec,
    /// Outside the GPU's virtual address range.
    VaRange,
    /// Outside the partition, or the imported memory.
    Backing,
    /// Mapped already.
    Overlap(GpuVa),
    /// The memory may only be read.
    ReadOnly,
    /// No such vGPU.
    NoVgpu,
    /// No such import.
    NoMemory,
    /// Not mapped.
    NoMapping,
    /// No such channel.
    NoChannel,
    /// The vGPU is there already.
    VgpuExists,
    /// Video memory.
    VramLimit,
    /// VGPUs.
    VgpuLimit,
    /// Channels.
    ChannelLimit,
    /// Imported bytes, or imports.
    ImportLimit,
    /// Page tables.
    PageTableLimit,
    /// The operating system refused, with this errno.
    Os(i32),
    /// Something that this device does not do.
    Unsupported,
    /// Video memory, which may be free, but not in one piece. From [`WITH_FORGET`] on.
    Pieces {
        /// MiB that were asked for.
        wanted_mib: u32,
        /// MiB that VMs still have whose vGPUs are gone.
        outlived_mib: u32,
    },
}

impl Refusal {
    /// As a version has it.
    #[must_use]
    pub const fn to_version(self, version: u32) -> Self {
        match self {
            Self::Pieces { .. } if version < WITH_FORGET => Self::VramLimit,
            other => other,
        }
    }
}

impl From<Refusal> for GpuError {
    fn from(refusal: Refusal) -> Self {
        use Refusal as R;
        match refusal {
            R::Message => Self::Invalid("request"),
            R::Version => Self::Unsupported("another version of its protocol"),
            R::Alignment => Self::Invalid("address or length is not a whole number of pages"),
            R::Descriptor => {
                Self::Invalid("file descriptor (memory must be a memfd, tmpfs or hugetlbfs file)")
            }
            R::Gpfifo => Self::Invalid("GPFIFO address or entries"),
            R::Userd => Self::Invalid("USERD address"),
            R::Vector => Self::Invalid("interrupt vector"),
            R::Timeslice => Self::Invalid("time slice (100 us to 1 s)"),
            R::Budget => {
                Self::Invalid("budget of engine time (less than its period of 1 to 30 ms)")
            }
            R::Quotas => Self::Invalid("quotas (times out of 10 ms to 1 day)"),
            R::Spec => Self::Invalid("sizes of the vGPU"),
            R::VaRange => Self::OutOfRange("GPU virtual address"),
            R::Backing => Self::OutOfRange("memory to be mapped"),
            R::Overlap(va) => Self::Overlap(va),
            R::ReadOnly => Self::Invalid("writable mapping of memory that may only be read"),
            R::NoVgpu => Self::NotFound("vGPU"),
            R::NoMemory => Self::NotFound("imported memory"),
            R::NoMapping => Self::NotFound("mapping"),
            R::NoChannel => Self::NotFound("channel"),
            R::VgpuExists => Self::Invalid("the vGPU is admitted already"),
            R::VramLimit => Self::Limit("video memory"),
            R::VgpuLimit => Self::Limit("vGPUs"),
            R::ChannelLimit => Self::Limit("channels"),
            R::ImportLimit => Self::Limit("imported guest memory"),
            R::PageTableLimit => Self::Limit("page tables"),
            R::Os(errno) => Self::Io(io::Error::from_raw_os_error(errno)),
            R::Pieces { wanted_mib, outlived_mib } => Self::Pieces { wanted_mib, outlived_mib },
            R::Unsupported => {
                Self::Unsupported("an engine, memory or screen that it does not have")
            }
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Self::Os(error.raw_os_error().unwrap_or(libc::EIO))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seqpacket::{decode, encode};
    use mdev_core::gpu::EngineKind;
    use uuid::Uuid;

    /// A change of these bytes is a change of the protocol: raise [`OLDEST`]. What is new bumps [`VERSION`].
    #[test]
    fn bytes_of_versions_6_and_7() {
        assert_eq!((OLDEST, VERSION), (6, 7));
        let vgpu = VgpuId(Uuid::from_u128(0x0102_0304));
        let admin = [
            (AdminRequest::Hello { version: 6 }, "0006"),
            (
                AdminRequest::Admit(ClientSpec {
                    vgpu,
                    vram_bytes: 1 << 30,
                    framebuffer_bytes: 0,
                    max_channels: 8,
                    max_import_bytes: 1 << 20,
                }),
                "011000000000000000000000000001020304808080800400088080 40",
            ),
            (
                AdminRequest::SetTimeslice(vgpu, Duration::from_micros(1)),
                "03100000000000000000000000000102030400e807",
            ),
            (AdminRequest::Usage, "06"),
            (
                AdminRequest::SetBudget(vgpu, Some(Budget { time_ns: 1, period_ns: 2 })),
                "07 1000000000000000000000000001020304 01 01 02",
            ),
            (
                AdminRequest::SetQuotas(
                    vgpu,
                    Quotas { max_channels: Some(3), ..Quotas::default() },
                ),
                "08 1000000000000000000000000001020304 00 0103 00 013c00 00",
            ),
        ];
        let admin = admin.into_iter().chain([
            (AdminRequest::Focus(vgpu), "09 1000000000000000000000000001020304"),
            (AdminRequest::Rotate(Some(Duration::from_secs(10))), "0a 01 0a 00"),
            (AdminRequest::Screen, "0b"),
            (AdminRequest::Forget(vgpu), "0c 1000000000000000000000000001020304"),
        ]);
        for (message, bytes) in admin {
            assert_eq!(hex(&encode(&message).unwrap()), bytes.replace(' ', ""), "{message:?}");
        }
        let client = [
            (ClientRequest::Import { offset: 0, len: 4096, writable: true }, "0100802001"),
            (
                ClientRequest::Map {
                    va: GpuVa(0x2_0000_0000),
                    len: 4096,
                    backing: Backing::Vram { offset: 0 },
                    writable: false,
                },
                "038080808020802001 0000",
            ),
            (
                ClientRequest::CreateChannel(ChannelSpec {
                    engine: EngineKind::Compute,
                    gpfifo: GpuVa(0x1000),
                    gpfifo_entries: 64,
                    userd: Backing::Guest { memory: MemoryId(3), offset: 512 },
                    vector: 1,
                }),
                "050180204000 0380 0401",
            ),
        ];
        let scanout = Scanout {
            enabled: true,
            width: 640,
            height: 480,
            stride: 2560,
            bits_per_pixel: 32,
            offset: 4096,
            big_endian: false,
        };
        let client = client.into_iter().chain([
            (ClientRequest::SetScanout(scanout), "0b 01 8005 e003 8014 20 8020 00"),
            (ClientRequest::Scrub, "0c"),
        ]);
        for (message, bytes) in client {
            assert_eq!(hex(&encode(&message).unwrap()), bytes.replace(' ', ""), "{message:?}");
        }
        assert_eq!(hex(&encode(&ClientReply::Refused(Refusal::Os(5))).unwrap()), "06190a");
        let pieces = Refusal::Pieces { wanted_mib: 8, outlived_mib: 16 };
        assert_eq!(hex(&encode(&ClientReply::Refused(pieces)).unwrap()), "061b0810");
        assert_eq!((pieces.to_version(6), pieces.to_version(7)), (Refusal::VramLimit, pieces));
        let screen = PhysicalScreen { focus: Some(vgpu), rotation: None };
        let bytes = "06 01 1000000000000000000000000001020304 00";
        assert_eq!(hex(&encode(&AdminReply::Screen(screen)).unwrap()), bytes.replace(' ', ""));
        let usage = Usage { copy_ns: 1, compute_ns: 2, channels: 3, ..Usage::default() };
        let bytes = "05 00 01 02 0000000000000000 0000000000000000 03";
        assert_eq!(hex(&encode(&ClientReply::Usage(usage)).unwrap()), bytes.replace(' ', ""));
    }

    #[test]
    fn the_older_of_both_versions_is_spoken() {
        assert_eq!(
            (agreed(VERSION), agreed(OLDEST), agreed(VERSION + 1)),
            (VERSION, OLDEST, VERSION)
        );
        assert_eq!(agreed(OLDEST - 1), VERSION, "which that one refuses");
        assert!(is_spoken(OLDEST) && is_spoken(VERSION));
        assert!(!is_spoken(OLDEST - 1) && !is_spoken(VERSION + 1));
    }

    #[test]
    fn garbage_is_refused() {
        assert!(decode::<ClientRequest>(&[0xff; 8]).is_err());
        assert!(decode::<AdminRequest>(&[]).is_err());
        assert!(decode::<AdminRequest>(&[6, 0]).is_err(), "trailing byte");
    }

    fn hex(bytes: &[u8]) -> String {
        use std::fmt::Write;
        bytes.iter().fold(String::new(), |mut text, byte| {
            let _ = write!(text, "{byte:02x}");
            text
        })
    }
}
