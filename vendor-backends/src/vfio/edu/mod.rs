//! QEMU's `edu` as a DMA engine that several vGPUs share: the template of an accelerator without help for sharing.
//!
//! ```text
//! guest memory ── attach ──► IOMMU: a window of DMA addresses per vGPU, with nothing else in it
//! copy            memory ──DMA──► the device's buffer of 4 KiB ──DMA──► memory
//! ```
//!
//! A guest names addresses of its own address space. The mediator resolves them to memory that the guest has given, and
//! here that is looked up in the guest's window once more: what is not in it never gets to the device, and if something
//! did, the IOMMU would fault it.
//!
//! Factorials are computed by its unit for them, of words that the mediator loads and stores.
//!
//! Windows stay mapped while others have the engine. To unmap one takes the IOMMU longer than a turn lasts (each page is
//! unpinned and pinned again), and the device does nothing by itself: all its addresses come from here. What is saved
//! and switched is the buffer alone, and it is cleared: a copy leaves nothing in it that its vGPU would want back.

mod engine;
mod reach;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mdev_core::abi::program::Factorial;
use mdev_core::gpu::{ClientSpec, GpuCapabilities, GpuDescription};
use mdev_core::ids::VgpuId;
use mdev_core::units::{MIB, PAGE_SIZE};

pub use engine::{BUFFER_LEN, Direction, Edu};

use super::device::{Attached, Device, DeviceError};
use super::host::Address;
use super::window::{Window, Windows};
use crate::mediator::Hardware;
use crate::mediator::hardware::{Attachment, Hold, Pace, Partition};
use crate::mediator::silicon::address_space::Piece;
use crate::mediator::silicon::fault::Fault;
use crate::mediator::wire::Refusal;
use crate::mem::Mapping;

/// Channels that one vGPU may have.
const MAX_CHANNELS: u32 = 16;
/// A tenth of a second for each of: clear, load, store.
const GRAIN: Duration = Duration::from_millis(400);
/// Factorials between two looks at the time: each is an access or three to registers.
const WORDS: usize = 256;
/// Shorter than any transfer: only proportions matter, and the largest of them has to fit below the longest slice.
const SLICE: Duration = Duration::from_millis(5);

/// What [`EduEngine::staging`] has: bytes that come from the mediator, and zeros.
const BYTES: u64 = 0;
const ZEROS: u64 = PAGE_SIZE;

/// One `edu`, shared.
pub struct EduEngine {
    description: GpuDescription,
    engine: Mutex<Engine>,
    windows: Arc<Mutex<Windows>>,
    staging: Attached,
    device: Arc<Edu>,
}

/// What its buffer holds.
#[derive(Debug, Default)]
struct Engine {
    /// Whose bytes.
    vgpu: Option<VgpuId>,
    /// Which, where they came from the mediator.
    bytes: Vec<u8>,
}

impl fmt::Debug for EduEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EduEngine").field("device", &self.device).finish_non_exhaustive()
    }
}

impl EduEngine {
    /// Takes a device that is open.
    pub fn new(name: &str, device: Device, window_bytes: Option<u64>) -> Result<Self, DeviceError> {
        let least = device.family().dma_bits.unwrap_or(28);
        let address = device.address();
        let device = Arc::new(Edu::new(device)?);
        let bits = reach::bits(&device, least)?;
        let window_bytes = window_bytes.unwrap_or_else(|| Windows::usual_len(bits));
        let windows = match &device.device().dma_ranges()?[..] {
            // A kernel that does not tell.
            [] => Windows::new(bits, window_bytes),
            ranges => Windows::within(ranges, bits, window_bytes),
        };
        if windows.count() == 0 {
            return Err(DeviceError::NoWindows { bits, mib: window_bytes / MIB });
        }
        let own = windows
            .mediators(2 * PAGE_SIZE)
            .ok_or(DeviceError::Broken { what: "edu", how: "has no room for DMA addresses" })?;
        let staging = device.device().attach(own)?;
        let description = describe(name, address, windows.count(), window_bytes);
        let (count, mib) = (windows.count(), window_bytes / MIB);
        log::info!("{address} uses {bits} bits of DMA addresses: {count} windows of {mib} MiB");
        let engine = Mutex::default();
        let windows = Arc::new(Mutex::new(windows));
        Ok(Self { description, engine, windows, staging, device })
    }

    /// Clears the buffer, where another vGPU's bytes are in it.
    fn switch_to(&self, engine: &mut Engine, vgpu: VgpuId) -> Result<(), DeviceError> {
        if engine.vgpu.replace(vgpu) != Some(vgpu) {
            engine.bytes.clear();
            let zeros = self.staging.window;
            self.device.copy(Direction::ToDevice, &zeros, ZEROS, 0, BUFFER_LEN)?;
        }
        Ok(())
    }

    /// A place in a vGPU's window, or nothing: the device is told of no other.
    fn own(&self, vgpu: VgpuId, piece: &Piece<'_>) -> Result<(Window, u64), Fault> {
        let window = lock(&self.windows).of(vgpu);
        let own = window.zip(piece.bus).and_then(|(window, bus)| {
            let offset = bus.checked_sub(window.iova)?;
            window.translate(offset, piece.len).ok()?;
            Some((window, offset))
        });
        own.ok_or_else(|| {
            log::error!("vGPU {vgpu}: a transfer of memory that is not in its window");
            refused()
        })
    }

    fn store(&self, (window, offset): (Window, u64), len: u64) -> Result<(), DeviceError> {
        self.device.copy(Direction::FromDevice, &window, offset, 0, len)
    }
}

fn describe(name: &str, address: Address, windows: u32, window_bytes: u64) -> GpuDescription {
    GpuDescription {
        parent: name.to_owned(),
        model: "EDU".into(),
        name: format!("edu DMA engine at {address}"),
        vram_bytes: 0,
        capabilities: GpuCapabilities::COPY
            | GpuCapabilities::COMPUTE
            | GpuCapabilities::FACTORIAL
            | GpuCapabilities::DOORBELL_MAPPED
            | GpuCapabilities::NEED_WAKEUP
            | GpuCapabilities::PREEMPTION
            | GpuCapabilities::BUDGETS
            | GpuCapabilities::QUOTAS
            | GpuCapabilities::CHANNEL_FAULTS
            | GpuCapabilities::EXACT_SLICES,
        max_vgpus: windows,
        max_channels: MAX_CHANNELS,
        max_import_bytes: window_bytes,
        default_timeslice: SLICE,
        // Each transfer of a page ends, or the device is lost; how many of them a copy has is its guest's own business.
        hang_timeout: None,
    }
}

impl Hardware for EduEngine {
    fn describe(&self) -> &GpuDescription {
        &self.description
    }

    /// It has no memory to be partitioned: its claim is a window.
    fn partition(&self, spec: &ClientSpec) -> Result<Partition, Refusal> {
        if spec.vram_bytes != 0
            || spec.framebuffer_bytes != 0
            || spec.max_import_bytes > self.description.max_import_bytes
        {
            return Err(Refusal::Spec);
        }
        lock(&self.windows).take(spec.vgpu).map_err(|_| Refusal::VgpuLimit)?;
        let claim = Claim { windows: Arc::clone(&self.windows), vgpu: spec.vgpu };
        Ok(Partition { memory: None, hold: Box::new(claim) })
    }

    fn pace(&self) -> Pace {
        let grain_ns = GRAIN.as_nanos() as u64;
        Pace {
            chunk: BUFFER_LEN,
            piece: BUFFER_LEN,
            words: WORDS,
            grain_ns,
            turn_ns: grain_ns,
            on_cpu: false,
        }
    }

    fn attach(&self, vgpu: VgpuId, memory: &Arc<Mapping>) -> Result<Option<Attachment>, Refusal> {
        let (window, iova) =
            lock(&self.windows).place(vgpu, memory.len()).ok_or(Refusal::ImportLimit)?;
        let place = Place { windows: Arc::clone(&self.windows), window, iova };
        let attached = self.device.device().attach_memory(iova, Arc::clone(memory));
        let attached = attached.map_err(|error| {
            log::warn!("vGPU {vgpu}: {error}");
            Refusal::ImportLimit
        })?;
        let hold = Box::new(Import { _attached: attached, _place: place });
        Ok(Some(Attachment { address: iova, hold }))
    }

    fn copy(
        &self,
        vgpu: VgpuId,
        from: Piece<'_>,
        to: Piece<'_>,
        _streaming: bool,
    ) -> Result<(), Fault> {
        let len = to.len;
        let (source, target) = (self.own(vgpu, &Piece { len, ..from })?, self.own(vgpu, &to)?);
        let mut engine = lock(&self.engine);
        engine.bytes.clear();
        let done = self.switch_to(&mut engine, vgpu).and_then(|()| {
            self.device.copy(Direction::ToDevice, &source.0, source.1, 0, len)?;
            self.store(target, len)
        });
        done.map_err(|error| lost(&error))
    }

    /// Bytes that the mediator makes go the same way, from its own window.
    fn write(&self, vgpu: VgpuId, to: Piece<'_>, bytes: &[u8]) -> Result<(), Fault> {
        let len = bytes.len() as u64;
        if len > BUFFER_LEN {
            return Err(refused());
        }
        let target = self.own(vgpu, &Piece { len, ..to })?;
        let mut engine = lock(&self.engine);
        let done = self.switch_to(&mut engine, vgpu).and_then(|()| {
            // A fill stores the same bytes again and again.
            if engine.bytes != bytes {
                engine.bytes.clear();
                let staging = &self.staging;
                let _ = staging.memory.write(BYTES, bytes);
                self.device.copy(Direction::ToDevice, &staging.window, BYTES, 0, len)?;
                engine.bytes.extend_from_slice(bytes);
            }
            self.store(target, len)
        });
        done.map_err(|error| lost(&error))
    }

    /// By its unit, one word after the other. What is 0 for certain it would compute for seconds, deaf to everybody else.
    fn factorials(&self, words: &mut [u32]) {
        let _engine = lock(&self.engine);
        for word in words {
            *word = match *word {
                Factorial::ZERO_FROM.. => 0,
                n => self.device.factorial(n).unwrap_or_else(|error| lost(&error)),
            };
        }
    }
}

fn refused() -> Fault {
    Fault::class(mdev_core::abi::copy::LAUNCH_DMA)
}

/// A device that does not answer is lost, and its owner with it: all its vGPUs learn that, and the next owner resets it.
fn lost(error: &DeviceError) -> ! {
    log::error!("The device is lost: {error}");
    std::process::exit(1);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A vGPU's window.
#[derive(Debug)]
struct Claim {
    windows: Arc<Mutex<Windows>>,
    vgpu: VgpuId,
}

impl Hold for Claim {}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(&self.windows).give_back(self.vgpu);
    }
}

/// A place in a window.
#[derive(Debug)]
struct Place {
    windows: Arc<Mutex<Windows>>,
    window: Window,
    iova: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.windows).give_back_place(self.window, self.iova);
    }
}

/// Guest memory in a window: the IOMMU forgets it first, and then its place is free.
#[derive(Debug)]
struct Import {
    _attached: Attached,
    _place: Place,
}

impl Hold for Import {}
