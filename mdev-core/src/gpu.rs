//! What Tessera needs of a physical GPU, in the words of a GPU driver.
//!
//! Two processes use it from two sides. The manager holds a [`Gpu`]: it admits vGPUs and moves their time slices.
//! A worker holds one [`Client`]: one vGPU's private world, made from the [`Admission`] that the manager got.
//! Dropping either frees all it owns, whatever state it is in.

use std::fmt;
use std::io;
use std::num::NonZeroU32;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use bitflags::bitflags;
use serde::{Deserialize, Serialize};

use crate::device::Scanout;
use crate::ids::{ChannelId, GpuVa, MemoryId, Token, VgpuId};
use crate::sched::Budget;

/// Why a GPU did not do what was asked of it.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// An argument that no GPU could accept.
    #[error("Invalid argument: {0}")]
    Invalid(&'static str),
    /// An address or length outside of what it names.
    #[error("Out of range: {0}")]
    OutOfRange(&'static str),
    /// A GPU virtual address that is mapped already.
    #[error("GPU virtual address {0} is mapped already")]
    Overlap(GpuVa),
    /// No such channel, mapping, memory or vGPU.
    #[error("Not found: {0}")]
    NotFound(&'static str),
    /// A limit of the type, or of the GPU, is reached.
    #[error("Limit reached: {0}")]
    Limit(&'static str),
    /// Enough video memory may be free, but not in one piece.
    #[error("No {wanted_mib} MiB of video memory are free in one piece: {}", whose(*.outlived_mib))]
    Pieces {
        /// MiB that were asked for.
        wanted_mib: u32,
        /// MiB that VMs still have whose vGPUs are gone.
        outlived_mib: u32,
    },
    /// This backend cannot do that.
    #[error("Not supported by this GPU: {0}")]
    Unsupported(&'static str),
    /// The GPU is gone: its process died, or it fell off the bus.
    #[error("The GPU is lost: {0}")]
    Lost(String),
    /// The operating system refused.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Who is in the way of a piece of video memory, and what can be done.
fn whose(outlived_mib: u32) -> String {
    if outlived_mib == 0 {
        return "stop and start others of this GPU, which closes the gaps, or choose a smaller type".into();
    }
    format!(
        "VMs that are still there have {outlived_mib} MiB of vGPUs that were stopped under them; shut these VMs down"
    )
}

bitflags! {
    /// What a backend offers; a type that needs more is not offered on it.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct GpuCapabilities: u32 {
        /// A CPU may map the partition's video memory (BAR 4).
        const VRAM_APERTURE = 1 << 0;
        /// The start of video memory can be scanned out (BAR 0, a display head).
        const FRAMEBUFFER = 1 << 1;
        /// Copy-class channels.
        const COPY = 1 << 2;
        /// Compute-class channels.
        const COMPUTE = 1 << 3;
        /// The doorbell page may be mapped into the guest.
        const DOORBELL_MAPPED = 1 << 4;
        /// Idle channels must be woken by a trapped write (see [`crate::abi::userd::NEED_WAKEUP`]).
        const NEED_WAKEUP = 1 << 5;
        /// A running kernel is preempted within the time slice.
        const PREEMPTION = 1 << 6;
        /// The silicon holds groups to budgets of engine time ([`Gpu::set_budget`]).
        const BUDGETS = 1 << 7;
        /// It keeps [`Quotas`].
        const QUOTAS = 1 << 8;
        /// It runs the named programs of [`crate::abi::program`] but for the factorial. Without that and [`Self::FACTORIAL`],
        /// programs are machine code of the GPU.
        const SOFT_PROGRAMS = 1 << 9;
        /// A channel that faults takes no other with it. Without this, those of the same vGPU and [`EngineKind`] end too.
        const CHANNEL_FAULTS = 1 << 10;
        /// It has a physical screen, on which one vGPU at a time is seen ([`Gpu::focus`]).
        const SCANOUT = 1 << 11;
        /// Slices alone make shares exact, since what a turn is too long is charged to the next ones; and turns are so long
        /// that a reading of the counters says nothing about shares.
        const EXACT_SLICES = 1 << 12;
        /// It has a factorial unit: the named program [`crate::abi::program::Kernel::Factorial`].
        const FACTORIAL = 1 << 13;
    }
}

/// One physical GPU, as its backend describes it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuDescription {
    /// The parent's name: `soft0`, or a PCI address.
    pub parent: String,
    /// The model, as it begins the names of its types: `SOFT`, `H100`.
    pub model: String,
    /// For people: "Tessera software GPU".
    pub name: String,
    /// Video memory that vGPUs may share, in bytes.
    pub vram_bytes: u64,
    /// What it can do.
    pub capabilities: GpuCapabilities,
    /// vGPUs that it can have, whatever their sizes.
    pub max_vgpus: u32,
    /// Channels that one vGPU may have.
    pub max_channels: u32,
    /// Bytes of guest memory that one vGPU may import.
    pub max_import_bytes: u64,
    /// Default time slice of a channel group.
    pub default_timeslice: Duration,
    /// Engine time after which one kernel or transfer has hung, unless a quota says otherwise; `None` where each ends by
    /// itself, or does not count as hung however long it takes.
    pub hang_timeout: Option<Duration>,
}

/// What a vGPU is admitted with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClientSpec {
    /// Whose it is.
    pub vgpu: VgpuId,
    /// Its partition of video memory, in bytes, a multiple of 1 MiB; 0 on a GPU that has none.
    pub vram_bytes: u64,
    /// Length of the framebuffer aperture in bytes, or 0 without a display head.
    pub framebuffer_bytes: u64,
    /// Channels it may have.
    pub max_channels: u32,
    /// Bytes of guest memory that it may import.
    pub max_import_bytes: u64,
}

/// The right to be one client of a GPU, handed by the manager to the worker it starts.
#[derive(Debug)]
pub struct Admission {
    /// Which backend opens it (`soft`, `nvidia`, `vfio`).
    pub backend: &'static str,
    /// What was granted.
    pub spec: ClientSpec,
    /// The connection to the GPU, where there is one to pass.
    pub fd: Option<OwnedFd>,
}

/// Time and work of one vGPU, counted by the silicon since the vGPU was admitted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Engine time used, in nanoseconds.
    pub engine_ns: u64,
    /// Of that, copies and the methods that led to them, in nanoseconds.
    pub copy_ns: u64,
    /// Of that, kernels and the methods that led to them, in nanoseconds.
    pub compute_ns: u64,
    /// Time spent runnable and waiting for the engine, in nanoseconds, whatever the reason.
    pub wait_ns: u64,
    /// Of that, time with a closed gate or a [`Budget`] used up, in nanoseconds.
    pub gated_ns: u64,
    /// Times a gate was closed or a budget used up while there was work.
    pub gate_closings: u64,
    /// Engine time used after that, until the engine was given up: what gates and budgets cost the others.
    pub gate_cost_ns: u64,
    /// GPFIFO entries completed.
    pub submissions: u64,
    /// Doorbells taken by polling, without an exit.
    pub polled_doorbells: u64,
    /// Wake-ups that needed a trapped write.
    pub wakeups: u64,
    /// Times the group was switched out with work left.
    pub preemptions: u64,
    /// Times it gave up the engine later than its slice, gate or budget said, beyond the grain of preemption.
    pub slice_overruns: u64,
    /// By how much, together, in nanoseconds.
    pub overrun_ns: u64,
    /// Time in which the host ran something else on the engine's core during its turns. Charged to nobody.
    pub stolen_ns: u64,
    /// Channel faults, hangs among them.
    pub faults: u64,
    /// Channels that were reset because they hung.
    pub hang_resets: u64,
    /// Submissions that [`Quotas::submissions_per_second`] held back.
    pub throttled: u64,
    /// True while the group has work (queued or running).
    pub runnable: bool,
    /// Guest memory imported, in bytes.
    pub imported_bytes: u64,
    /// Channels that exist.
    pub channels: u32,
}

impl Usage {
    /// Engine time that was for neither copies nor kernels: semaphores, and methods that launched nothing.
    pub fn host_ns(&self) -> u64 {
        self.engine_ns.saturating_sub(self.copy_ns).saturating_sub(self.compute_ns)
    }
}

/// What a vGPU may have besides engine time. `None`: as much as it was admitted with, or no limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quotas {
    /// GPFIFO entries per second, over any time longer than 50 ms; more of them wait in the ring.
    pub submissions_per_second: Option<NonZeroU32>,
    /// Channels at a time, if less than [`ClientSpec::max_channels`]. Those that exist stay.
    pub max_channels: Option<u32>,
    /// Bytes of guest memory imported, if less than [`ClientSpec::max_import_bytes`]. What is imported stays.
    pub max_import_bytes: Option<u64>,
    /// Engine time that one kernel or transfer may use: beyond it, its channel is reset as hung.
    ///
    /// Engine time, not wall time: a neighbour's load brings nobody nearer to it.
    pub hang_timeout: Option<Duration>,
    /// How long a channel may wait for a semaphore: beyond it, the channel is reset as hung.
    pub acquire_timeout: Option<Duration>,
}

impl Quotas {
    /// Engine time of one kernel or transfer, where nothing else was said.
    ///
    /// The software GPU preempts whatever runs, so an endless kernel uses up nothing but its own vGPU's share. The limit
    /// is there so that its guest is told, and is far beyond what a kernel that ends takes.
    pub const DEFAULT_HANG_TIMEOUT: Duration = Duration::from_secs(60);
    /// Shortest time after which something may count as hung.
    pub const SHORTEST_TIMEOUT: Duration = Duration::from_millis(10);
    /// Longest such time.
    pub const LONGEST_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            submissions_per_second: None,
            max_channels: None,
            max_import_bytes: None,
            hang_timeout: Some(Self::DEFAULT_HANG_TIMEOUT),
            // To wait costs nothing, and may be what a guest wants.
            acquire_timeout: None,
        }
    }
}

/// The manager's side of one physical GPU.
pub trait Gpu: Send + fmt::Debug {
    /// What it is; constant for its lifetime.
    fn describe(&self) -> &GpuDescription;

    /// Makes room for one vGPU. The partition is freed when the admission's connection closes, or by [`Gpu::evict`].
    fn admit(&mut self, spec: &ClientSpec) -> Result<Admission, GpuError>;

    /// Counts a vGPU in that an earlier manager admitted and whose worker still runs. Where the backend gives orders
    /// through the worker, this is its end of the new connection, for [`Client::attach_manager`].
    fn readmit(&mut self, _spec: &ClientSpec) -> Result<Option<OwnedFd>, GpuError> {
        Ok(None)
    }

    /// Takes everything back from a vGPU, whatever it is doing.
    fn evict(&mut self, vgpu: VgpuId) -> Result<(), GpuError>;

    /// The vGPU is stopped, and nothing that was its own is kept for it: one whose worker died comes back for that.
    fn forget(&mut self, _vgpu: VgpuId) -> Result<(), GpuError> {
        Ok(())
    }

    /// Sets the runlist's time slice for the vGPU's channel groups. In force from its next slice on.
    fn set_timeslice(&mut self, vgpu: VgpuId, slice: Duration) -> Result<(), GpuError>;

    /// Opens or closes the vGPU's gate: a closed group keeps its work and gets no engine time.
    fn set_gate(&mut self, vgpu: VgpuId, open: bool) -> Result<(), GpuError>;

    /// Holds the vGPU's channel groups to so much engine time in each period ([`crate::sched::Meter`]), or to none.
    /// In force at once. Only where it has [`GpuCapabilities::BUDGETS`]: elsewhere caps are held with gates.
    fn set_budget(&mut self, _vgpu: VgpuId, _budget: Option<Budget>) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("budgets of engine time"))
    }

    /// Sets the vGPU's quotas, in force at once. For GPUs with [`GpuCapabilities::QUOTAS`].
    fn set_quotas(&mut self, _vgpu: VgpuId, _quotas: &Quotas) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("quotas"))
    }

    /// Resets the vGPU's channel groups: every channel is faulted and told so.
    fn reset_group(&mut self, vgpu: VgpuId) -> Result<(), GpuError>;

    /// What every admitted vGPU has used so far, and when that was read in nanoseconds of `CLOCK_MONOTONIC`.
    fn usage(&mut self) -> Result<UsageReport, GpuError>;

    /// Puts a vGPU on the physical screen, where it stays until another one is put there or it is gone: a rotation ends.
    /// How long it took to program the screen. For GPUs with [`GpuCapabilities::SCANOUT`].
    fn focus(&mut self, _vgpu: VgpuId) -> Result<Duration, GpuError> {
        Err(GpuError::Unsupported("a physical screen"))
    }

    /// Shows the vGPUs on the physical screen in turn, each for so long, or ends that. Those without a picture are
    /// passed over.
    fn rotate(&mut self, _every: Option<Duration>) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("a physical screen"))
    }

    /// Who is on the physical screen.
    fn screen(&mut self) -> Result<PhysicalScreen, GpuError> {
        Err(GpuError::Unsupported("a physical screen"))
    }
}

/// How a GPU's physical screen is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhysicalScreen {
    /// Who is on it. It is dark while nobody is, or while that vGPU has no picture.
    pub focus: Option<VgpuId>,
    /// How long each is shown, while they take turns.
    pub rotation: Option<Duration>,
}

/// One reading of all counters, taken at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageReport {
    /// `CLOCK_MONOTONIC` in nanoseconds.
    pub now_ns: u64,
    /// Each admitted vGPU.
    pub vgpus: Vec<(VgpuId, Usage)>,
}

/// Which memory an address is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Backing {
    /// Imported guest memory, from `offset` bytes into it.
    Guest {
        /// Which import.
        memory: MemoryId,
        /// Byte offset into it.
        offset: u64,
    },
    /// The vGPU's video memory, from `offset` bytes into the partition.
    Vram {
        /// Byte offset into the partition.
        offset: u64,
    },
}

/// What a channel may submit to. The host class is always there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EngineKind {
    /// Copy class only ([`crate::abi::copy`]).
    Copy,
    /// Compute and copy classes ([`crate::abi::compute`]).
    Compute,
}

/// A channel to be made. Everything in it was checked for range by the control interface, and is checked again by
/// the silicon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelSpec {
    /// What it submits to.
    pub engine: EngineKind,
    /// Where the GPFIFO is, in the GPU virtual address space (40 bits, 8-byte aligned).
    pub gpfifo: GpuVa,
    /// Entries in the GPFIFO, a power of two, 2 to 65536.
    pub gpfifo_entries: u32,
    /// Where the 512-byte USERD is, 512-byte aligned.
    pub userd: Backing,
    /// Interrupt vector of its non-stall interrupts.
    pub vector: u32,
}

/// A channel that was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelHandle {
    /// Its id.
    pub id: ChannelId,
    /// What the guest writes to the doorbell.
    pub token: Token,
}

/// How a channel is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelStatus {
    /// 0, or the error notifier's code (`ROBUST_CHANNEL_*` numbers: see [`crate::abi::notifier`]).
    pub error: u32,
    /// Details of the error: the faulting GPU virtual address or the bad method.
    pub error_info: u64,
    /// GPFIFO entries consumed so far, modulo the ring.
    pub gp_get: u32,
    /// Engine time used, in nanoseconds.
    pub engine_ns: u64,
}

/// Memory that a guest may map: a range of a file.
///
/// Whoever is handed the file can map all of it that the file lets them. Where others' memory is in the same file,
/// nothing but the hypervisor keeps a guest to its range.
#[derive(Debug)]
pub struct Aperture {
    /// The file to hand out.
    pub fd: OwnedFd,
    /// Where in the file it begins, in whole pages.
    pub offset: u64,
    /// Exact length in bytes.
    pub len: u64,
}

/// What a guest may map of its client.
#[derive(Debug)]
pub struct Apertures {
    /// The video memory partition (BAR 4).
    pub vram: Option<Aperture>,
    /// The doorbell page (BAR 1).
    pub doorbell: Option<Aperture>,
    /// The framebuffer: the start of the same video memory (BAR 0).
    pub framebuffer: Option<Aperture>,
}

/// Guest memory to be imported: a file range that the guest sees at `iova`.
#[derive(Debug)]
pub struct GuestRam<'a> {
    /// The file.
    pub fd: BorrowedFd<'a>,
    /// Byte offset into the file, page-aligned.
    pub offset: u64,
    /// Length in bytes, page-aligned.
    pub len: u64,
    /// False where the guest may only read it.
    pub writable: bool,
}

bitflags! {
    /// Conditions that the silicon raises for a client, in [`crate::abi::control::reg::INTR_STATUS`]'s layout.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
    pub struct Pending: u32 {
        /// A channel's non-stall interrupt.
        const NONSTALL = 1 << 0;
        /// A channel faulted: query the channels.
        const CHANNEL_ERROR = 1 << 1;
        /// The GPU is lost.
        const DEVICE_LOST = 1 << 2;
    }
}

/// One vGPU's private world on a GPU: a partition, one address space, its channels.
pub trait Client: Send + fmt::Debug {
    /// What it was granted.
    fn spec(&self) -> &ClientSpec;

    /// What the GPU is.
    fn gpu(&self) -> &GpuDescription;

    /// What the guest may map.
    fn apertures(&self) -> &Apertures;

    /// Makes guest memory usable by this client's address space.
    fn import(&mut self, ram: GuestRam<'_>) -> Result<MemoryId, GpuError>;

    /// Takes guest memory away again. Whatever was mapped from it is unmapped; no access is in flight afterwards.
    fn release(&mut self, memory: MemoryId) -> Result<(), GpuError>;

    /// Maps `len` bytes of `backing` at `va` (all page-aligned).
    fn map(
        &mut self,
        va: GpuVa,
        len: u64,
        backing: Backing,
        writable: bool,
    ) -> Result<(), GpuError>;

    /// Unmaps every page of a range; pages that are not mapped are an error, and then nothing changes.
    fn unmap(&mut self, va: GpuVa, len: u64) -> Result<(), GpuError>;

    /// Makes a channel and schedules it.
    fn create_channel(&mut self, spec: &ChannelSpec) -> Result<ChannelHandle, GpuError>;

    /// Ends a channel, whatever it is doing.
    fn destroy_channel(&mut self, id: ChannelId) -> Result<(), GpuError>;

    /// How a channel is.
    fn query_channel(&mut self, id: ChannelId) -> Result<ChannelStatus, GpuError>;

    /// Wakes the silicon for a channel after a trapped doorbell or wake write. Does not wait.
    fn wake(&mut self, token: Token) -> Result<(), GpuError>;

    /// An eventfd whose signal does what [`Client::wake`] does for all channels, for a hypervisor to signal by itself.
    /// Whoever has it may do anything to it: that harms this client alone.
    fn wake_event(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// A descriptor that polls readable whenever [`Client::take_pending`] may have something new, which makes it quiet.
    ///
    /// The worker watches it, without reading from it, and raises the guest's interrupt.
    fn event(&self) -> BorrowedFd<'_>;

    /// Lets the silicon signal the guest's interrupt `vector` itself, with no worker on the way; `None` stops that.
    fn set_interrupt(&mut self, vector: u32, event: Option<BorrowedFd<'_>>)
    -> Result<(), GpuError>;

    /// Takes (and clears) what has been raised since the last call.
    fn take_pending(&mut self) -> Pending;

    /// Destroys all channels and mappings; imports and video memory stay. (Function-level reset, guest reboot.)
    fn reset(&mut self) -> Result<(), GpuError>;

    /// What this client has used.
    fn usage(&mut self) -> Result<Usage, GpuError>;

    /// Notes what the guest's display registers show, whenever that changes: it is what the physical screen shows while
    /// this vGPU is on it. Offsets count from the start of the partition. Waits for no more than the screen's registers.
    fn set_scanout(&mut self, _scanout: &Scanout) -> Result<(), GpuError> {
        Ok(())
    }

    /// Makes video memory zeros: its VM is gone. Asked for only where its file takes no holes.
    fn scrub(&mut self) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("scrubbing video memory"))
    }

    /// Starts the threads of a backend that has some. Called once, after the process has given up what it does not need:
    /// threads that were there before would have kept it.
    fn start(&mut self) -> Result<(), GpuError> {
        Ok(())
    }

    /// Takes the connection of a new manager, from its [`Gpu::readmit`].
    fn attach_manager(&mut self, _fd: OwnedFd) -> Result<(), GpuError> {
        Err(GpuError::Unsupported("orders through the worker"))
    }
}
