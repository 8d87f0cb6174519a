//! Restoring a vGPU from a stream, or from a file with one.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use ipc::mem::file_of;
use mdev_core::ids::{GuestPa, VgpuId};
use mdev_core::stream::{Head, IndexedVgpu, Part, StagedWriter, StreamError, StreamReader};
use vgpud_api::{ConfigWrite, ErrorCode, ErrorDetail, RestoredVgpu};

use super::saving::{cannot, check_staged};
use crate::guest_pieces;
use crate::manager::{Result, Saveable};
use crate::staged_memory::{self, Staging};
use crate::worker_client::{self, StagedCopier};
use crate::worker_protocol::MemoryRange;

/// Damage of a stream with more than a vGPU.
const MACHINE: &str = "it is that of a VM";

/// Reads a stream into a vGPU.
pub(super) fn read(saveable: &Saveable, id: VgpuId, from: impl Read) -> Result<RestoredVgpu> {
    let (mut stream, head) = StreamReader::new(from).map_err(invalid)?;
    check_type(&head, saveable, id)?;
    let mut state = Vec::new();
    let mut filling: Option<Filling<'_>> = None;
    let result = loop {
        let part = match stream.next_part() {
            Ok(Part::State(piece)) => {
                state.extend_from_slice(piece);
                continue;
            }
            Ok(part) => part,
            Err(error) => break Err(invalid(error)),
        };
        // Memory follows the state.
        let into = match &mut filling {
            Some(filling) => filling,
            None => filling.insert(Filling::begin(saveable, &state)?),
        };
        let is_end = matches!(part, Part::End);
        match into.take(&part) {
            Ok(()) if is_end => break Ok(()),
            Ok(()) => {}
            Err(error) => break Err(error),
        }
    };
    match filling {
        Some(filling) => finish(id, filling, result),
        None => result.map(|()| RestoredVgpu::default()),
    }
}

/// Reads the vGPU of this index in a file into a vGPU. The checksums of memory are checked while it
/// is filled.
pub(super) fn read_file(
    saveable: &Saveable,
    id: VgpuId,
    file: &File,
    index: usize,
) -> Result<RestoredVgpu> {
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    if !is_file {
        let message = "The saved vGPU is not in a regular file";
        return Err(ErrorDetail::new(ErrorCode::Invalid, message));
    }
    let begun = Instant::now();
    let vgpu = IndexedVgpu::find(file, index).map_err(invalid)?;
    check_type(&vgpu.head, saveable, id)?;
    let indexed = begun.elapsed();
    let mut filling = Filling::begin(saveable, &vgpu.state)?;
    let made = begun.elapsed();
    let result = filling.take_file(file, &vgpu);
    if result.is_ok() {
        let bytes: u64 = vgpu.memory.iter().map(|place| place.len as u64).sum();
        let filled = begun.elapsed();
        log::info!(
            "vGPU {id} is restored: {} MiB of memory; file {indexed:.1?}, state {:.1?}, memory {:.1?}",
            bytes >> 20,
            made.saturating_sub(indexed),
            filled.saturating_sub(made)
        );
    }
    finish(id, filling, result)
}

fn check_type(head: &Head, saveable: &Saveable, id: VgpuId) -> Result<()> {
    if (&head.mdev_type, head.vram_bytes) == (&saveable.mdev_type, saveable.vram_bytes) {
        return Ok(());
    }
    let message = format!(
        "The saved vGPU has type {}, and vGPU {id} has type {}",
        head.mdev_type, saveable.mdev_type
    );
    Err(ErrorDetail::new(ErrorCode::Conflict, message))
}

/// Returns the result of a restore. Resets a vGPU that was filled in part.
fn finish(id: VgpuId, filling: Filling<'_>, result: Result<()>) -> Result<RestoredVgpu> {
    if result.is_err()
        && let Err(error) = worker_client::discard(filling.control)
    {
        log::error!("vGPU {id} keeps a part of a saved vGPU: {error}");
    }
    result.map(|()| filling.restored)
}

fn invalid(error: StreamError) -> ErrorDetail {
    ErrorDetail::new(ErrorCode::Invalid, error)
}

/// A vGPU with its restored state, whose memory is being filled.
struct Filling<'a> {
    control: &'a Path,
    restored: RestoredVgpu,
    memory: Memory,
    /// Guest memory that the worker gets together, and its length.
    guest: Option<(File, u64)>,
}

/// Video memory that is being filled.
enum Memory {
    /// Its file.
    File(File, MemoryRange),
    Staged(Staged),
}

/// Video memory that is filled through staging memory.
struct Staged {
    writer: StagedWriter,
    /// Staging memory, and its length.
    file: File,
    len: u64,
    copier: StagedCopier,
}

impl Staged {
    fn new(control: &Path, file: File, len: u64, vram_bytes: u64) -> io::Result<Self> {
        let writer = StagedWriter::new(file.try_clone()?, len, vram_bytes)?;
        Ok(Self { writer, file, len, copier: StagedCopier::connect(control)? })
    }
}

impl<'a> Filling<'a> {
    /// Restores the state.
    fn begin(saveable: &'a Saveable, state: &[u8]) -> Result<Self> {
        let Saveable { control, vram_bytes, .. } = saveable;
        let refused = |error| cannot("restored", &error);
        let state = file_of(c"vgpu-state", state).map_err(refused)?;
        let (restored, memory) = worker_client::restore(control, state.as_fd()).map_err(refused)?;
        check_staged(saveable, restored.memory).map_err(refused)?;
        let config = restored.config.into_iter().map(ConfigWrite::from).collect();
        let (file, range) = (File::from(memory), restored.memory);
        let memory = if range.staged {
            let staged = Staged::new(control, file, range.len, *vram_bytes);
            Memory::Staged(staged.map_err(refused)?)
        } else {
            Memory::File(file, range)
        };
        Ok(Self { control, restored: RestoredVgpu { config }, memory, guest: None })
    }

    /// Takes all memory of a vGPU in a file.
    fn take_file(&mut self, file: &File, vgpu: &IndexedVgpu) -> Result<()> {
        let mut data = Vec::new();
        for place in &vgpu.guest {
            place.load(file, &mut data).map_err(invalid)?;
            self.take(&Part::Guest { address: GuestPa(place.offset), data: &data })?;
        }
        if matches!(self.memory, Memory::File(..)) {
            for place in &vgpu.memory {
                place.load(file, &mut data).map_err(invalid)?;
                self.take(&Part::Memory { offset: place.offset, data: &data })?;
            }
            return self.take(&Part::End);
        }
        let refused = |error: io::Error| cannot("restored", &error);
        self.flush_guest().map_err(refused)?;
        let Memory::Staged(staged) = &self.memory else { return Ok(()) };
        let staging_file = staged.file.try_clone().map_err(refused)?;
        let staging = Staging::new(staging_file, staged.len).map_err(refused)?;
        let copy = |copy| staged.copier.copy(copy);
        let threads = staged_memory::threads();
        staged_memory::fill::fill(file, &vgpu.memory, &staging, threads, copy).map_err(invalid)
    }

    /// Takes a part of the stream after the state.
    fn take(&mut self, part: &Part<'_>) -> Result<()> {
        let refused = |error: io::Error| cannot("restored", &error);
        match part {
            Part::Guest { address, data } => self.add_guest(*address, data).map_err(refused),
            Part::Memory { offset, data } => {
                self.flush_guest().map_err(refused)?;
                self.put(*offset, data).map_err(invalid)
            }
            Part::End => {
                self.flush_guest().map_err(refused)?;
                match &mut self.memory {
                    Memory::File(..) => Ok(()),
                    Memory::Staged(Staged { writer, copier, .. }) => {
                        writer.flush(|copy| copier.copy(copy)).map_err(refused)
                    }
                }
            }
            Part::State(_) | Part::Next(_) | Part::Domain(_) | Part::Machine(_) => {
                Err(invalid(StreamError::Damaged(MACHINE)))
            }
        }
    }

    fn put(&mut self, offset: u64, data: &[u8]) -> std::result::Result<(), StreamError> {
        let (file, range) = match &mut self.memory {
            Memory::File(file, range) => (file, *range),
            Memory::Staged(Staged { writer, copier, .. }) => {
                return writer.write(offset, data, |copy| copier.copy(copy));
            }
        };
        let MemoryRange { offset: start, len, .. } = range;
        let inside = offset.checked_add(data.len() as u64).is_some_and(|end| end <= len);
        let at = start.checked_add(offset).filter(|_| inside);
        let at = at.ok_or(StreamError::Damaged("it has more video memory than its vGPU"))?;
        file.write_all_at(data, at).map_err(StreamError::from)
    }

    fn add_guest(&mut self, address: GuestPa, data: &[u8]) -> io::Result<()> {
        let (file, len) = match &mut self.guest {
            Some(guest) => guest,
            None => self.guest.insert((File::from(file_of(c"guest-memory", &[])?), 0)),
        };
        guest_pieces::write(file, address, data)?;
        *len += data.len() as u64;
        if *len >= guest_pieces::BATCH { self.flush_guest() } else { Ok(()) }
    }

    fn flush_guest(&mut self) -> io::Result<()> {
        let Some((mut file, _)) = self.guest.take() else { return Ok(()) };
        file.rewind()?;
        worker_client::fill_guest(self.control, file.as_fd())
    }
}
