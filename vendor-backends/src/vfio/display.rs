//! A display adapter with a linear framebuffer, which several vGPUs share.
//!
//! ```text
//! guest ──stores──► its partition of video memory, mapped without traps
//! guest ──traps───► its mode registers, emulated by the worker ──► scanout ──┐
//! vgpuctl focus, rotation ────────────────────────────────► focused vGPU ────┴──► adapter registers
//! ```
//!
//! * [`memory`]: video memory in partitions
//! * [`mode`]: a guest's mode, checked and in the adapter's units
//! * [`screen`]: the focused vGPU and the rotation
//! * [`registers`]: the adapter's registers, which no guest can access
//!
//! The adapter has no engine, so its vGPUs have no channels. The mediator checks each scanout
//! against the vGPU's partition again: a compromised worker can show only its own vGPU's memory,
//! and only while that vGPU has the focus.

pub mod memory;
pub mod mode;
pub mod registers;
pub mod screen;

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use mdev_core::device::Scanout;
use mdev_core::gpu::{ClientSpec, GpuCapabilities, GpuDescription, ScreenStatus};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;

use self::memory::{Memory, MemoryError, Partition};
use self::mode::Mode;
use self::registers::Adapter;
use self::screen::Screen;
use super::device::{Device, DeviceError};
use crate::mediator::Hardware;
use crate::mediator::hardware::{self, PartitionMemory, Reservation};
use crate::mediator::wire::Refusal;
use host_inventory::PciHost;

/// Smallest partition in bytes.
const MIN_PARTITION: u64 = MIB;

/// Scanout of the reserved black memory, shown when an adapter without VGA must be dark. It fits
/// into [`MIN_PARTITION`].
const BLACK: Scanout = Scanout {
    enabled: true,
    width: 640,
    height: 400,
    stride: 640 * 4,
    bits_per_pixel: 32,
    offset: 0,
    big_endian: false,
};

/// A display adapter that vGPUs share.
#[derive(Debug)]
pub struct DisplayAdapter {
    description: GpuDescription,
    memory: Arc<Memory>,
    shared: Arc<Shared>,
}

/// State that the rotation thread shares with the adapter.
#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// Notified when the rotation starts or stops.
    rotation_changed: Condvar,
}

#[derive(Debug)]
struct Inner {
    screen: Screen,
    adapter: Adapter<Device>,
    partitions: BTreeMap<VgpuId, Weak<Partition>>,
    /// Time of the last warning that a guest can cause.
    last_warning: Option<Instant>,
}

impl DisplayAdapter {
    /// Initializes an open device. Turns the screen dark.
    pub fn new(name: &str, device: Device, host: &PciHost) -> Result<Self, DeviceError> {
        let (address, bar) = (device.address(), device.bar_len(0));
        let (mut adapter, reported) = Adapter::new(device)?;
        let all = reported.min(bar) / MIN_PARTITION * MIN_PARTITION;
        let black = if adapter.needs_black() { MIN_PARTITION } else { 0 };
        let len = all.saturating_sub(black);
        if len == 0 {
            return Err(DeviceError::Broken {
                family: "display adapter",
                fault: "has no video memory",
            });
        }
        let refused = |error| match error {
            // /sys as a whole is read-only in the service's sandbox.
            MemoryError::Io { source, .. } if source.raw_os_error() == Some(libc::EROFS) => {
                DeviceError::ReadOnly(address)
            }
            MemoryError::Io { source, .. } => DeviceError::Io { what: "map video memory", source },
            MemoryError::Full { .. } => DeviceError::Broken {
                family: "display adapter",
                fault: "has too little video memory",
            },
        };
        let memory = Memory::open(&host.folder(address), len).map_err(refused)?;
        if black > 0 {
            let range = memory::Range { offset: len, len: black };
            memory.clear_unallocated(range).map_err(refused)?;
            let mode = Mode::of(&BLACK, range).ok().flatten();
            let fault = "has no room for black memory";
            let mode = mode.ok_or(DeviceError::Broken { family: "display adapter", fault })?;
            adapter.set_black(mode)?;
        }
        let description = GpuDescription {
            parent: name.to_owned(),
            model: "BOCHS".into(),
            name: format!("Display adapter at {address}"),
            vram_bytes: len,
            // BAR 0 covers the whole partition, so BAR 4 would map the same memory again.
            capabilities: GpuCapabilities::FRAMEBUFFER | GpuCapabilities::SCANOUT,
            max_vgpus: u32::try_from(len / MIN_PARTITION).unwrap_or(u32::MAX),
            max_channels: 0,
            max_import_bytes: 0,
            default_timeslice: Duration::from_millis(2),
            hang_timeout: None,
        };
        let (screen, partitions) = (Screen::default(), BTreeMap::new());
        let inner = Mutex::new(Inner { screen, adapter, partitions, last_warning: None });
        let shared = Arc::new(Shared { inner, rotation_changed: Condvar::new() });
        Ok(Self { description, memory, shared })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Advances the rotation at each deadline until the adapter is dropped.
    fn rotate(shared: &Weak<Self>) {
        /// Longest time until the thread sees that the adapter was dropped.
        const DROP_CHECK_INTERVAL: Duration = Duration::from_secs(5);
        while let Some(shared) = shared.upgrade() {
            let mut inner = shared.lock();
            let now = Instant::now();
            if inner.screen.deadline().is_some_and(|at| at <= now) {
                inner.screen.advance(now);
                inner.refresh();
            }
            let next = inner.screen.deadline().map(|at| at.saturating_duration_since(now));
            let wait = next.unwrap_or(DROP_CHECK_INTERVAL).min(DROP_CHECK_INTERVAL);
            drop(shared.rotation_changed.wait_timeout(inner, wait));
        }
    }
}

impl Inner {
    /// Programs the adapter to show the focused vGPU. Returns how long programming took.
    fn refresh(&mut self) -> Duration {
        let picture = self.screen.picture();
        match (self.adapter.show(picture), picture) {
            (Ok(took), _) => return took,
            (Err(error), Some(mode)) => {
                self.warn_limited(format_args!("Cannot show {mode} on the screen: {error}"));
            }
            (Err(error), None) => {
                self.warn_limited(format_args!("Cannot turn the screen dark: {error}"));
            }
        }
        Duration::ZERO
    }

    /// Logs a warning that a guest can cause, rate-limited.
    fn warn_limited(&mut self, line: fmt::Arguments<'_>) {
        const INTERVAL: Duration = Duration::from_secs(10);
        let now = Instant::now();
        if self.last_warning.is_none_or(|last| now.duration_since(last) > INTERVAL) {
            self.last_warning = Some(now);
            log::warn!("{line}");
        } else {
            log::debug!("{line}");
        }
    }
}

impl Hardware for DisplayAdapter {
    fn describe(&self) -> &GpuDescription {
        &self.description
    }

    fn partition(&self, spec: &ClientSpec) -> Result<hardware::Partition, Refusal> {
        if spec.framebuffer_bytes > spec.vram_bytes
            || !spec.vram_bytes.is_multiple_of(MIN_PARTITION)
        {
            return Err(Refusal::Spec);
        }
        let partition = self.memory.take(spec.vgpu, spec.vram_bytes).map_err(|error| {
            log::warn!("vGPU {}: {error}", spec.vgpu);
            let mib = |bytes: u64| u32::try_from(bytes / MIB).unwrap_or(u32::MAX);
            match error {
                MemoryError::Full { wanted, outlived } => {
                    Refusal::Fragmented { wanted_mib: mib(wanted), outlived_mib: mib(outlived) }
                }
                MemoryError::Io { source, .. } => source.into(),
            }
        })?;
        let partition = Arc::new(partition);
        let range = partition.range();
        let memory = PartitionMemory {
            mapping: partition.map().map_err(|error| {
                log::warn!("vGPU {}: {error}", spec.vgpu);
                Refusal::Spec
            })?,
            fd: partition.file()?,
            offset: range.offset,
        };
        let mut inner = self.shared.lock();
        inner.partitions.insert(spec.vgpu, Arc::downgrade(&partition));
        inner.screen.add(spec.vgpu, range);
        inner.refresh();
        let head = Head { vgpu: spec.vgpu, shared: Arc::clone(&self.shared), partition };
        Ok(hardware::Partition { memory: Some(memory), reservation: Box::new(head) })
    }

    fn forget(&self, vgpu: VgpuId) {
        self.memory.forget(vgpu);
    }

    fn files(&self) -> Vec<PathBuf> {
        vec![self.memory.path().to_owned()]
    }

    fn start(&self) {
        let shared = Arc::downgrade(&self.shared);
        let builder = thread::Builder::new().name("gpu-screen".into()).stack_size(256 << 10);
        if let Err(error) = builder.spawn(move || Shared::rotate(&shared)) {
            log::error!("Cannot start the rotation thread of the screen: {error}");
        }
    }

    fn set_scanout(&self, vgpu: VgpuId, scanout: &Scanout) -> Result<(), Refusal> {
        let mut inner = self.shared.lock();
        if let Err(error) = inner.screen.set(vgpu, scanout) {
            inner.warn_limited(format_args!("Cannot show vGPU {vgpu} on the screen: {error}"));
        }
        inner.refresh();
        Ok(())
    }

    fn focus(&self, vgpu: VgpuId) -> Result<Duration, Refusal> {
        let mut inner = self.shared.lock();
        if !inner.screen.focus(vgpu) {
            return Err(Refusal::NoVgpu);
        }
        Ok(inner.refresh())
    }

    fn rotate(&self, every: Option<Duration>) -> Result<(), Refusal> {
        self.shared.lock().screen.rotate(every, Instant::now());
        self.shared.rotation_changed.notify_all();
        Ok(())
    }

    fn screen(&self) -> Result<ScreenStatus, Refusal> {
        Ok(self.shared.lock().screen.status())
    }

    fn scrub(&self, vgpu: VgpuId) -> Result<(), Refusal> {
        let partition = self.shared.lock().partitions.get(&vgpu).and_then(Weak::upgrade);
        let partition = partition.ok_or(Refusal::NoVgpu)?;
        partition.clear().map_err(|error| {
            log::warn!("vGPU {vgpu}: {error}");
            Refusal::Spec
        })
    }
}

/// A vGPU's place on the adapter, released when dropped.
#[derive(Debug)]
struct Head {
    vgpu: VgpuId,
    shared: Arc<Shared>,
    partition: Arc<Partition>,
}

impl Reservation for Head {}

impl Drop for Head {
    fn drop(&mut self) {
        let mut inner = self.shared.lock();
        // The vGPU may have been admitted again before the old partition is dropped.
        let own = inner.partitions.get(&self.vgpu);
        if own.is_some_and(|own| own.as_ptr() == Arc::as_ptr(&self.partition)) {
            inner.partitions.remove(&self.vgpu);
            // Show another vGPU before this partition is cleared.
            inner.screen.remove(self.vgpu);
            inner.refresh();
        }
    }
}
