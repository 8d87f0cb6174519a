//! QEMU's `edu` as a DMA engine that several vGPUs share: a template for accelerators without
//! hardware support for sharing.
//!
//! ```text
//! guest memory ── attach ──► IOMMU: a window of DMA addresses per vGPU, with nothing else in it
//! copy            memory ──DMA──► the device's buffer of 4 KiB ──DMA──► memory
//! ```
//!
//! A guest names addresses in its own address space. The mediator resolves them to memory that the
//! guest imported. This module checks the result against the guest's DMA window again, so the
//! device never sees an address outside the window. The IOMMU faults on any such address.
//!
//! The device's factorial unit computes factorials of words that the mediator loads and stores.
//!
//! Windows stay mapped while other vGPUs use the engine: unmapping takes the IOMMU longer than a
//! run on the engine lasts, because each page is unpinned and pinned again. The device starts no
//! transfers by itself and takes all addresses from the mediator. Only the device's buffer is
//! switched between vGPUs. The buffer is cleared and not saved, since a copy leaves no state in it.

mod dma_bits;
mod engine;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ipc::mem::Mapping;
use mdev_core::abi::program::FunctionId;
use mdev_core::gpu::{ClientSpec, GpuCapabilities, GpuDescription};
use mdev_core::ids::VgpuId;
use mdev_core::units::{MIB, PAGE_SIZE};

pub use engine::{BUFFER_LEN, Direction, Edu};

use super::device::{Attached, Device, DeviceError};
use super::window::{Window, Windows};
use crate::mediator::fault::Fault;
use crate::mediator::hardware::{Attachment, MemoryRange, Pace, Partition, Reservation};
use crate::mediator::wire::Refusal;
use crate::mediator::{Hardware, factorial};
use host_inventory::PciAddress;

/// Maximum number of channels of one vGPU.
const MAX_CHANNELS: u32 = 16;
/// Longest preemption latency: 100 ms each for clearing, loading and storing, plus a margin.
const PREEMPTION_LATENCY: Duration = Duration::from_millis(400);
/// Factorials between two checks of the run limit. Each takes one to three register accesses.
const FACTORIALS_PER_CHECK: usize = 256;
/// Default time slice. Shorter than any transfer: only the proportions of slices matter, and the
/// largest slice must stay below the longest allowed one.
const DEFAULT_SLICE: Duration = Duration::from_millis(5);

/// Offsets in [`EduEngine::staging`] of bytes from the mediator and of zeros.
const STAGED_BYTES: u64 = 0;
const STAGED_ZEROS: u64 = PAGE_SIZE;

/// An `edu` device that vGPUs share.
pub struct EduEngine {
    description: GpuDescription,
    buffer: Mutex<Buffer>,
    windows: Arc<Mutex<Windows>>,
    staging: Attached,
    device: Arc<Edu>,
}

/// State of the device's buffer.
#[derive(Debug, Default)]
struct Buffer {
    /// vGPU with data in the buffer.
    vgpu: Option<VgpuId>,
    /// Contents of the buffer, if the mediator wrote them.
    bytes: Vec<u8>,
}

impl fmt::Debug for EduEngine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EduEngine").field("device", &self.device).finish_non_exhaustive()
    }
}

impl EduEngine {
    /// Initializes an open device.
    pub fn new(name: &str, device: Device, window_bytes: Option<u64>) -> Result<Self, DeviceError> {
        let min_bits = device.family().dma_bits.unwrap_or(28);
        let address = device.address();
        let device = Arc::new(Edu::new(device)?);
        let bits = dma_bits::probe(&device, min_bits)?;
        let window_bytes = window_bytes.unwrap_or_else(|| Windows::default_len(bits));
        let windows = match &device.device().dma_ranges()?[..] {
            // The kernel reports no ranges.
            [] => Windows::new(bits, window_bytes),
            ranges => Windows::in_ranges(ranges, bits, window_bytes),
        };
        if windows.count() == 0 {
            return Err(DeviceError::NoWindows { bits, mib: window_bytes / MIB });
        }
        let mediator_window = windows
            .mediator_window(2 * PAGE_SIZE)
            .ok_or(DeviceError::Broken { family: "edu", fault: "has no room for DMA addresses" })?;
        let staging = device.device().attach(mediator_window)?;
        let description = describe(name, address, windows.count(), window_bytes);
        let (count, mib) = (windows.count(), window_bytes / MIB);
        log::info!("{address} uses {bits} DMA address bits: {count} windows of {mib} MiB");
        let buffer = Mutex::default();
        let windows = Arc::new(Mutex::new(windows));
        Ok(Self { description, buffer, windows, staging, device })
    }

    /// Clears the buffer if it holds another vGPU's data.
    fn switch_to(&self, buffer: &mut Buffer, vgpu: VgpuId) -> Result<(), DeviceError> {
        if buffer.vgpu.replace(vgpu) != Some(vgpu) {
            buffer.bytes.clear();
            let zeros = self.staging.window;
            self.device.copy(Direction::ToDevice, &zeros, STAGED_ZEROS, 0, BUFFER_LEN)?;
        }
        Ok(())
    }

    /// Returns the window and offset of a piece, or a fault if the piece is not in the vGPU's
    /// window.
    fn check_window(&self, vgpu: VgpuId, range: &MemoryRange<'_>) -> Result<(Window, u64), Fault> {
        let window = lock(&self.windows).get(vgpu);
        let checked = window.zip(range.bus).and_then(|(window, bus)| {
            let offset = bus.checked_sub(window.iova)?;
            window.translate(offset, range.len).ok()?;
            Some((window, offset))
        });
        checked.ok_or_else(|| {
            log::error!("vGPU {vgpu}: refused a transfer of memory outside its DMA window");
            refused()
        })
    }

    fn store(&self, (window, offset): (Window, u64), len: u64) -> Result<(), DeviceError> {
        self.device.copy(Direction::FromDevice, &window, offset, 0, len)
    }
}

fn describe(name: &str, address: PciAddress, windows: u32, window_bytes: u64) -> GpuDescription {
    GpuDescription {
        parent: name.to_owned(),
        model: "EDU".into(),
        name: format!("edu DMA engine at {address}"),
        vram_bytes: 0,
        capabilities: GpuCapabilities::COPY
            | GpuCapabilities::COMPUTE
            | GpuCapabilities::FIXED_FUNCTION
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
        default_timeslice: DEFAULT_SLICE,
        // Each transfer of a page ends, or the device is lost. The length of a copy is not limited.
        hang_timeout: None,
    }
}

impl Hardware for EduEngine {
    fn describe(&self) -> &GpuDescription {
        &self.description
    }

    /// Reserves a DMA window; the device has no video memory.
    fn partition(&self, spec: &ClientSpec) -> Result<Partition, Refusal> {
        if spec.vram_bytes != 0
            || spec.framebuffer_bytes != 0
            || spec.max_import_bytes > self.description.max_import_bytes
        {
            return Err(Refusal::Spec);
        }
        lock(&self.windows).take(spec.vgpu).map_err(|_| Refusal::VgpuLimit)?;
        let claim = Claim { windows: Arc::clone(&self.windows), vgpu: spec.vgpu };
        Ok(Partition { memory: None, reservation: Box::new(claim) })
    }

    fn pace(&self) -> Pace {
        let preemption_latency_ns = PREEMPTION_LATENCY.as_nanos() as u64;
        Pace {
            chunk_bytes: BUFFER_LEN,
            range_cost: BUFFER_LEN,
            words: FACTORIALS_PER_CHECK,
            preemption_latency_ns,
            max_run_ns: preemption_latency_ns,
            on_cpu: false,
        }
    }

    fn attach(&self, vgpu: VgpuId, memory: &Arc<Mapping>) -> Result<Option<Attachment>, Refusal> {
        let (window, iova) =
            lock(&self.windows).allocate(vgpu, memory.len()).ok_or(Refusal::ImportLimit)?;
        let allocation = Allocation { windows: Arc::clone(&self.windows), window, iova };
        let attached = self.device.device().attach_memory(iova, Arc::clone(memory));
        let attached = attached.map_err(|error| {
            log::warn!("vGPU {vgpu}: {error}");
            Refusal::ImportLimit
        })?;
        let reservation = Box::new(Import { _attached: attached, _allocation: allocation });
        Ok(Some(Attachment { address: iova, reservation }))
    }

    fn copy(
        &self,
        vgpu: VgpuId,
        from: MemoryRange<'_>,
        to: MemoryRange<'_>,
        _streaming: bool,
    ) -> Result<(), Fault> {
        let len = to.len;
        let (source, target) =
            (self.check_window(vgpu, &MemoryRange { len, ..from })?, self.check_window(vgpu, &to)?);
        let mut buffer = lock(&self.buffer);
        buffer.bytes.clear();
        let done = self.switch_to(&mut buffer, vgpu).and_then(|()| {
            self.device.copy(Direction::ToDevice, &source.0, source.1, 0, len)?;
            self.store(target, len)
        });
        done.map_err(|error| exit_lost(&error))
    }

    /// Writes bytes from the mediator's own window through the device's buffer.
    fn write(&self, vgpu: VgpuId, to: MemoryRange<'_>, bytes: &[u8]) -> Result<(), Fault> {
        let len = bytes.len() as u64;
        if len > BUFFER_LEN {
            return Err(refused());
        }
        let target = self.check_window(vgpu, &MemoryRange { len, ..to })?;
        let mut buffer = lock(&self.buffer);
        let done = self.switch_to(&mut buffer, vgpu).and_then(|()| {
            // A fill writes the same bytes repeatedly.
            if buffer.bytes != bytes {
                buffer.bytes.clear();
                let staging = &self.staging;
                let _ = staging.memory.write(STAGED_BYTES, bytes);
                self.device.copy(Direction::ToDevice, &staging.window, STAGED_BYTES, 0, len)?;
                buffer.bytes.extend_from_slice(bytes);
            }
            self.store(target, len)
        });
        done.map_err(|error| exit_lost(&error))
    }

    fn fixed_functions(&self) -> &[FunctionId] {
        &[factorial::FUNCTION]
    }

    /// Computes each factorial with the device's unit, unless the result is known to be 0. The unit
    /// multiplies `n` times and cannot be interrupted: large numbers would take seconds.
    fn apply_fixed_function(&self, _function: FunctionId, words: &mut [u32]) {
        let _buffer = lock(&self.buffer);
        for word in words {
            *word = match *word {
                factorial::FIRST_ZERO.. => 0,
                n => self.device.factorial(n).unwrap_or_else(|error| exit_lost(&error)),
            };
        }
    }
}

fn refused() -> Fault {
    Fault::class(mdev_core::abi::copy::LAUNCH_DMA)
}

/// Ends the GPU process, because the device no longer responds. Its vGPUs see the loss, and the
/// next GPU process resets the device.
fn exit_lost(error: &DeviceError) -> ! {
    log::error!("Device lost: {error}");
    std::process::exit(1);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A vGPU's DMA window, reserved until dropped.
#[derive(Debug)]
struct Claim {
    windows: Arc<Mutex<Windows>>,
    vgpu: VgpuId,
}

impl Reservation for Claim {}

impl Drop for Claim {
    fn drop(&mut self) {
        lock(&self.windows).release(self.vgpu);
    }
}

/// An allocation in a window, freed when dropped.
#[derive(Debug)]
struct Allocation {
    windows: Arc<Mutex<Windows>>,
    window: Window,
    iova: u64,
}

impl Drop for Allocation {
    fn drop(&mut self) {
        lock(&self.windows).free(self.window, self.iova);
    }
}

/// Guest memory in a window. Fields drop in order: unmapped from the IOMMU first, then freed in the
/// window.
#[derive(Debug)]
struct Import {
    _attached: Attached,
    _allocation: Allocation,
}

impl Reservation for Import {}
