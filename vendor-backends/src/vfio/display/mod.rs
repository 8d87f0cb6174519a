//! A display adapter with a linear framebuffer, which several vGPUs share.
//!
//! ```text
//! guest ──stores──► its partition of video memory, mapped: nobody is told, nothing is trapped
//! guest ──trapped─► its own mode registers (the worker) ──► what it shows ──┐
//! vgpuctl focus, turns ────────────────────────────────────► who is seen ───┴──► the adapter's registers
//! ```
//!
//! * [`memory`]: video memory in partitions
//! * [`mode`]: a guest's mode, checked and in the adapter's units
//! * [`screen`]: who is seen
//! * [`registers`]: what no guest reaches
//!
//! There is no engine: a vGPU of it has no channels. What a worker says is checked here once more, against the partition
//! of its vGPU, so that one which was taken over can show nothing but its own memory, and that only in its turn.

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
use mdev_core::gpu::{ClientSpec, GpuCapabilities, GpuDescription, PhysicalScreen};
use mdev_core::ids::VgpuId;
use mdev_core::units::MIB;

use self::memory::{Memory, MemoryError, Partition};
use self::mode::Mode;
use self::registers::Adapter;
use self::screen::Screen;
use super::device::{Device, DeviceError};
use super::host::Host;
use crate::mediator::Hardware;
use crate::mediator::hardware::{self, Hold, PartitionMemory};
use crate::mediator::wire::Refusal;

/// The smallest partition that is given out.
const SMALLEST: u64 = MIB;

/// What an adapter without VGA shows when it is dark: memory that is nobody's, of the same length as a small partition.
const BLACK: Scanout = Scanout {
    enabled: true,
    width: 640,
    height: 400,
    stride: 640 * 4,
    bits_per_pixel: 32,
    offset: 0,
    big_endian: false,
};

/// One adapter, shared.
#[derive(Debug)]
pub struct DisplayAdapter {
    description: GpuDescription,
    memory: Arc<Memory>,
    shared: Arc<Shared>,
}

/// What the thread that ends turns has too.
#[derive(Debug)]
struct Shared {
    inner: Mutex<Inner>,
    /// Signalled when turns begin or end.
    turns: Condvar,
}

#[derive(Debug)]
struct Inner {
    screen: Screen,
    adapter: Adapter<Device>,
    partitions: BTreeMap<VgpuId, Weak<Partition>>,
    /// When something that a guest can cause was last said aloud.
    said: Option<Instant>,
}

impl DisplayAdapter {
    /// Takes a device that is open. Its screen is dark from here on.
    pub fn new(name: &str, device: Device, host: &Host) -> Result<Self, DeviceError> {
        let (address, bar) = (device.address(), device.bar_len(0));
        let (mut adapter, told) = Adapter::new(device)?;
        let all = told.min(bar) / SMALLEST * SMALLEST;
        let black = if adapter.needs_black() { SMALLEST } else { 0 };
        let len = all.saturating_sub(black);
        if len == 0 {
            return Err(DeviceError::Broken {
                what: "display adapter",
                how: "has no video memory",
            });
        }
        let refused = |error| match error {
            // The whole of /sys, where a service may not write to it.
            MemoryError::Io { source, .. } if source.raw_os_error() == Some(libc::EROFS) => {
                DeviceError::ReadOnly(address)
            }
            MemoryError::Io { source, .. } => DeviceError::Io { what: "map video memory", source },
            MemoryError::Full { .. } => {
                DeviceError::Broken { what: "display adapter", how: "has too little video memory" }
            }
        };
        let memory = Memory::open(&host.folder(address), len).map_err(refused)?;
        if black > 0 {
            let range = memory::Range { offset: len, len: black };
            memory.blacken(range).map_err(refused)?;
            let mode = Mode::of(&BLACK, range).ok().flatten();
            let how = "has no place for a dark picture";
            let mode = mode.ok_or(DeviceError::Broken { what: "display adapter", how })?;
            adapter.set_black(mode)?;
        }
        let description = GpuDescription {
            parent: name.to_owned(),
            model: "BOCHS".into(),
            name: format!("Display adapter at {address}"),
            vram_bytes: len,
            // BAR 0 is all of a partition; BAR 4 would be the same memory once more.
            capabilities: GpuCapabilities::FRAMEBUFFER | GpuCapabilities::SCANOUT,
            max_vgpus: u32::try_from(len / SMALLEST).unwrap_or(u32::MAX),
            max_channels: 0,
            max_import_bytes: 0,
            default_timeslice: Duration::from_millis(2),
            hang_timeout: None,
        };
        let (screen, partitions) = (Screen::default(), BTreeMap::new());
        let inner = Mutex::new(Inner { screen, adapter, partitions, said: None });
        let shared = Arc::new(Shared { inner, turns: Condvar::new() });
        Ok(Self { description, memory, shared })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends turns when their time is over, for as long as anybody else has this.
    fn take_turns(shared: &Weak<Self>) {
        /// How long it may go unnoticed that nobody has.
        const LOOK: Duration = Duration::from_secs(5);
        while let Some(shared) = shared.upgrade() {
            let mut inner = shared.lock();
            let now = Instant::now();
            if inner.screen.deadline().is_some_and(|at| at <= now) {
                inner.screen.turn(now);
                inner.refresh();
            }
            let next = inner.screen.deadline().map(|at| at.saturating_duration_since(now));
            let wait = next.unwrap_or(LOOK).min(LOOK);
            drop(shared.turns.wait_timeout(inner, wait));
        }
    }
}

impl Inner {
    /// Lets the adapter show what is to be seen now; how long that took.
    fn refresh(&mut self) -> Duration {
        let picture = self.screen.picture();
        match (self.adapter.show(picture), picture) {
            (Ok(took), _) => return took,
            (Err(error), Some(mode)) => {
                self.say(format_args!("The screen stays dark instead of {mode}: {error}"));
            }
            (Err(error), None) => self.say(format_args!("The screen stays lit: {error}")),
        }
        Duration::ZERO
    }

    /// Writes a line that a guest has caused, but not as often as it likes.
    fn say(&mut self, line: fmt::Arguments<'_>) {
        const REST: Duration = Duration::from_secs(10);
        let now = Instant::now();
        if self.said.is_none_or(|said| now.duration_since(said) > REST) {
            self.said = Some(now);
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
        if spec.framebuffer_bytes > spec.vram_bytes || !spec.vram_bytes.is_multiple_of(SMALLEST) {
            return Err(Refusal::Spec);
        }
        let partition = self.memory.take(spec.vgpu, spec.vram_bytes).map_err(|error| {
            log::warn!("vGPU {}: {error}", spec.vgpu);
            let mib = |bytes: u64| u32::try_from(bytes / MIB).unwrap_or(u32::MAX);
            match error {
                MemoryError::Full { wanted, outlived } => {
                    Refusal::Pieces { wanted_mib: mib(wanted), outlived_mib: mib(outlived) }
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
        Ok(hardware::Partition { memory: Some(memory), hold: Box::new(head) })
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
        if let Err(error) = builder.spawn(move || Shared::take_turns(&shared)) {
            log::error!("vGPUs cannot take turns on the screen: {error}");
        }
    }

    fn set_scanout(&self, vgpu: VgpuId, scanout: &Scanout) -> Result<(), Refusal> {
        let mut inner = self.shared.lock();
        if let Err(error) = inner.screen.set(vgpu, scanout) {
            inner.say(format_args!("vGPU {vgpu} is dark on the screen: {error}"));
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
        self.shared.turns.notify_all();
        Ok(())
    }

    fn screen(&self) -> Result<PhysicalScreen, Refusal> {
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

/// A vGPU's place on the adapter, until it is dropped.
#[derive(Debug)]
struct Head {
    vgpu: VgpuId,
    shared: Arc<Shared>,
    partition: Arc<Partition>,
}

impl Hold for Head {}

impl Drop for Head {
    fn drop(&mut self) {
        let mut inner = self.shared.lock();
        // It may have been admitted anew before the old one is gone.
        let own = inner.partitions.get(&self.vgpu);
        if own.is_some_and(|own| own.as_ptr() == Arc::as_ptr(&self.partition)) {
            inner.partitions.remove(&self.vgpu);
            // The screen shows another one before its memory is cleared.
            inner.screen.remove(self.vgpu);
            inner.refresh();
        }
    }
}
