//! Saving and restoring a vGPU: its registers, and the state of its client. Video memory is copied
//! by the caller while the vGPU is paused; guest memory is saved by the VMM.
//!
//! A state is untrusted input. Its registers must be reachable by a guest; its mappings and
//! channels are made by the requests that a guest's driver makes, with the same checks.

use serde::{Deserialize, Serialize};

use super::VirtualFunction;
use super::state::{SavedFunction, StateError};
use crate::abi::mailbox::{VA_END, VA_START};
use crate::gpu::{
    Aperture, Backing, CREATED_VA_END, Client, GpuCapabilities, GpuError, MapRequest, SavedChannel,
    SavedClient, StagedCopy,
};
use crate::ids::{GpuVa, GuestPa, MemoryId, SpaceId};
use crate::mem::{DmaAccess, GuestMemory};
use crate::units::{PAGE_SIZE, is_aligned};

/// Offset of the command register.
const COMMAND: u16 = 0x04;
/// Offsets of the base address registers.
const BARS: std::ops::Range<u16> = 0x10..0x28;
/// Id of the MSI capability.
const MSI: u8 = 0x05;

/// State of a vGPU without the contents of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedVgpu {
    /// Registers.
    pub registers: SavedFunction,
    /// Guest memory that the client's memory ids stand for.
    pub imports: Vec<SavedImport>,
    /// Address spaces and channels.
    pub client: SavedClient,
}

/// Imported guest memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedImport {
    /// Id at the time of the save.
    pub memory: MemoryId,
    /// Guest-physical address.
    pub address: GuestPa,
    /// Length in bytes.
    pub len: u64,
}

/// Where the video memory of a paused vGPU is read and filled.
#[derive(Debug)]
pub struct SavedMemory {
    /// Video memory, or staging memory.
    pub aperture: Aperture,
    /// True for staging memory ([`VirtualFunction::copy_staged`]).
    pub staged: bool,
}

/// Write to configuration space that tells a VMM what a restore has set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfigWrite {
    /// Offset in bytes.
    pub offset: u16,
    /// Value of 32 bits.
    pub value: u32,
}

/// Reason why a vGPU cannot be saved now.
#[derive(Debug, thiserror::Error)]
pub enum SaveError {
    /// CUDA programs in the VM use the vGPU.
    #[error("CUDA programs use it; `vgpuctl checkpoint` takes them off it while the VM runs")]
    Programs,
    /// CUDA programs of the host use the vGPU.
    #[error("CUDA programs of this host use it, which cannot be saved; end them")]
    HostPrograms,
    /// No agent in the VM waits for requests to checkpoint programs.
    #[error(
        "CUDA programs of the VM may use it, and no agent there can checkpoint them; run `vgpu-guest \
         agent` in the VM, or end the programs and unload the module tessera_guest"
    )]
    NoAgent,
    /// A program in the VM has managed memory.
    #[error(
        "process {0} in the VM has managed memory (cuMemAllocManaged), which libcuda cannot checkpoint"
    )]
    Managed(i32),
    /// The agent does not checkpoint the programs.
    #[error("the VM does not checkpoint its CUDA programs: {0}")]
    Refused(String),
    /// The GPU is lost.
    #[error("The GPU is lost")]
    Lost,
    /// The GPU cannot save, or its video memory cannot be read.
    #[error("vGPUs of this kind of GPU cannot be saved yet")]
    Unsupported,
    /// Error of the GPU.
    #[error("{0}")]
    Gpu(#[from] GpuError),
}

/// Error of a restore. The vGPU is reset.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The vGPU cannot be restored in its own state.
    #[error("The vGPU cannot be restored now: {0}")]
    Now(SaveError),
    /// Invalid registers.
    #[error("{0}")]
    Registers(#[from] StateError),
    /// A mapping or USERD outside of its memory.
    #[error("The state names memory that it does not have")]
    Memory,
    /// The GPU refuses an address space, a mapping or a channel.
    #[error("The GPU refuses the state: {0}")]
    Gpu(#[from] GpuError),
}

impl VirtualFunction {
    /// Stops the vGPU's work until [`Self::resume`] or a reset. Refused, and without effect, if its
    /// state cannot be saved.
    pub fn pause(&mut self) -> Result<(), SaveError> {
        self.check_saveable()?;
        if self.is_checkpointed() {
            // What programs have left is of no use to them, and would be saved.
            self.scrub();
        }
        self.client.lock().require_saving()?.pause()?;
        self.paused = true;
        Ok(())
    }

    /// Returns why the vGPU cannot be saved now, if so.
    pub fn check_saveable(&self) -> Result<(), SaveError> {
        if self.lost {
            return Err(SaveError::Lost);
        }
        if self.queue_runs() {
            return Err(SaveError::Programs);
        }
        if !self.can_save() {
            return Err(SaveError::Unsupported);
        }
        Ok(self.client.lock().require_saving()?.check_save()?)
    }

    /// Returns whether vGPUs of this kind can be saved.
    pub fn can_save(&self) -> bool {
        // The memory of a device on the bus is not that of one vGPU.
        let memory = self.vram().filter(|vram| foreign_fds::is_memory(vram.fd));
        let readable = memory.map_or(0, |vram| vram.len);
        self.client.gpu().capabilities.contains(GpuCapabilities::SAVE)
            && (readable >= self.client.spec().vram_bytes || self.stages_memory())
    }

    /// Returns whether video memory is copied through staging memory.
    pub(super) fn stages_memory(&self) -> bool {
        self.client.lock().saving().is_some_and(|saving| saving.stages_memory())
    }

    /// Returns where a caller reads or fills the video memory of a paused vGPU.
    pub fn saved_memory(&mut self) -> Result<SavedMemory, SaveError> {
        if self.stages_memory() {
            let aperture = self.client.lock().require_saving()?.staging()?;
            return Ok(SavedMemory { aperture, staged: true });
        }
        let vram = self.vram().ok_or(SaveError::Unsupported)?;
        let fd = vram.fd.try_clone_to_owned().map_err(GpuError::from)?;
        let aperture = Aperture { fd, offset: vram.offset, len: vram.len };
        Ok(SavedMemory { aperture, staged: false })
    }

    /// Copies between the video memory of a paused vGPU and its staging memory.
    pub fn copy_staged(&mut self, copy: StagedCopy) -> Result<(), GpuError> {
        if !self.paused {
            return Err(GpuError::Invalid("a copy of the memory of a vGPU that is not paused"));
        }
        self.client.lock().require_saving()?.copy_staged(copy)
    }

    /// Continues after [`Self::pause`], [`Self::restore_vgpu`] and [`Self::checkpoint`].
    pub fn resume(&mut self) -> Result<(), GpuError> {
        if let Some(saving) = self.client.lock().saving() {
            saving.resume()?;
        }
        self.paused = false;
        self.end_checkpoint();
        Ok(())
    }

    /// Returns the state of a paused vGPU.
    pub fn save_vgpu(&mut self) -> Result<SavedVgpu, SaveError> {
        let client = self.client.lock().require_saving()?.save()?;
        let memory = self.memory.lock();
        let imports =
            memory.imports().map(|(memory, address, len)| SavedImport { memory, address, len });
        Ok(SavedVgpu { registers: self.save(), imports: imports.collect(), client })
    }

    /// Restores a state, and clears video memory. The vGPU is paused on success. On an error it is
    /// reset, or unchanged if its registers are invalid.
    pub fn restore_vgpu(&mut self, saved: &SavedVgpu) -> Result<(), RestoreError> {
        self.check_saveable().map_err(RestoreError::Now)?;
        self.check_state(&saved.registers)?;
        self.discard();
        self.restore_checked(saved)
    }

    /// Restores a state with valid registers into a function that was reset. On an error the
    /// function is reset.
    pub(super) fn restore_checked(&mut self, saved: &SavedVgpu) -> Result<(), RestoreError> {
        let restored = self.try_restore(saved);
        if restored.is_err() {
            self.reset();
        }
        restored
    }

    fn try_restore(&mut self, saved: &SavedVgpu) -> Result<(), RestoreError> {
        {
            let mut client = self.client.lock();
            client.require_saving()?.pause()?;
            self.paused = true;
            let mut memory = self.memory.lock();
            restore_client(&mut **client, &mut memory, saved)?;
        }
        self.restore_registers(&saved.registers)?;
        self.active = true;
        self.after_restore();
        Ok(())
    }

    /// Resets the vGPU and clears its video memory.
    pub fn discard(&mut self) {
        self.reset();
        self.scrub();
    }

    /// Returns the writes to configuration space that make a VMM map the BARs and deliver the
    /// interrupts of a restored vGPU: addresses first, then what enables them.
    pub fn config_writes(&self) -> Vec<ConfigWrite> {
        let msi = self.config.capability(MSI);
        let message = msi.into_iter().flat_map(|at| [at + 4, at + 8, at + 12, at]);
        let offsets = (BARS.start..BARS.end).step_by(4).chain(message).chain([COMMAND]);
        let read = |offset: u16| {
            let mut word = [0; 4];
            self.config.read(offset.into(), &mut word, false);
            let mut value = u32::from_le_bytes(word);
            if offset == COMMAND {
                // Writes to the status register in the upper half clear its bits.
                value &= 0xffff;
            }
            ConfigWrite { offset, value }
        };
        offsets.map(read).collect()
    }
}

/// Makes the address spaces, mappings and channels of a state.
fn restore_client(
    client: &mut dyn Client,
    memory: &mut GuestMemory,
    saved: &SavedVgpu,
) -> Result<(), RestoreError> {
    for space in &saved.client.spaces {
        client.require_saving()?.restore_space(*space)?;
    }
    for mapping in &saved.client.mappings {
        check_mapping(client, mapping)?;
        let access =
            if mapping.writable { DmaAccess::READ | DmaAccess::WRITE } else { DmaAccess::READ };
        let mut va = mapping.va.0;
        for (backing, len) in locate(client, memory, saved, mapping.backing, mapping.len, access)? {
            client.map(&MapRequest { va: GpuVa(va), len, backing, ..*mapping })?;
            va = va.checked_add(len).ok_or(RestoreError::Memory)?;
        }
    }
    for channel in &saved.client.channels {
        channel.spec.check(client.gpu().capabilities).map_err(GpuError::from)?;
        if matches!(channel.spec.userd, Backing::Vram { .. }) {
            check_vram(client, channel.spec.userd.offset(), crate::abi::userd::BYTES)?;
        }
        let both = DmaAccess::READ | DmaAccess::WRITE;
        let bytes = crate::abi::userd::BYTES;
        let found = locate(client, memory, saved, channel.spec.userd, bytes, both)?;
        let [(userd, _)] = found[..] else { return Err(RestoreError::Memory) };
        let mut channel: SavedChannel = channel.clone();
        channel.spec.userd = userd;
        client.require_saving()?.restore_channel(&channel)?;
    }
    Ok(())
}

/// Refuses mappings that no request of a guest's driver makes.
fn check_mapping(client: &dyn Client, mapping: &MapRequest) -> Result<(), RestoreError> {
    let MapRequest { space, va: GpuVa(va), len, backing, .. } = *mapping;
    let range =
        if space == SpaceId::DEFAULT { VA_START..VA_END } else { PAGE_SIZE..CREATED_VA_END };
    let end = va.checked_add(len).ok_or(RestoreError::Memory)?;
    let aligned = [va, len, backing.offset()].iter().all(|number| is_aligned(*number, PAGE_SIZE));
    if !aligned || len == 0 || va < range.start || end > range.end {
        return Err(RestoreError::Memory);
    }
    match backing {
        Backing::Vram { offset } => check_vram(client, offset, len),
        Backing::Guest { .. } | Backing::Allocated { .. } => Ok(()),
    }
}

fn check_vram(client: &dyn Client, offset: u64, len: u64) -> Result<(), RestoreError> {
    let end = offset.checked_add(len).filter(|end| *end <= client.spec().vram_bytes);
    end.map(drop).ok_or(RestoreError::Memory)
}

/// Returns the memory of a saved backing, as parts of the guest memory that the VMM has now.
fn locate(
    client: &mut dyn Client,
    memory: &mut GuestMemory,
    saved: &SavedVgpu,
    backing: Backing,
    len: u64,
    access: DmaAccess,
) -> Result<Vec<(Backing, u64)>, RestoreError> {
    let (id, offset) = match backing {
        Backing::Guest { memory, offset } => (memory, offset),
        Backing::Vram { .. } => return Ok(vec![(backing, len)]),
        Backing::Allocated { .. } => return Err(RestoreError::Memory),
    };
    let import = saved.imports.iter().find(|import| import.memory == id);
    let import = import.ok_or(RestoreError::Memory)?;
    let inside = offset.checked_add(len).is_some_and(|end| end <= import.len);
    let address = import.address.0.checked_add(offset).filter(|_| inside && len > 0);
    let address = GuestPa(address.ok_or(RestoreError::Memory)?);
    Ok(memory.import(client, address, len, access)?)
}
