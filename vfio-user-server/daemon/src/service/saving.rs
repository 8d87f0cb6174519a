//! Saving a vGPU into a stream, restoring it, and handing it over to another process of its VM.
//!
//! The worker stops the vGPU's work and passes its state and the file of its video memory, which the
//! manager copies: a worker that faces a guest writes no stream that another guest is restored from.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufReader, Read, Seek, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use mdev_core::ids::{GuestPa, VgpuId};
use mdev_core::stream::{
    Head, MAX_STATE, MemoryReader, Part, StagedReader, StagedWriter, StreamError, StreamReader,
    StreamWriter,
};
use vendor_backends::mem::file_of;
use vgpud_api::{ConfigWrite, ErrorCode, ErrorDetail, HandoverStep, RestoredVgpu, SaveVgpu};
use vgpud_host::body::{BodyReader, body_writer};

use super::Service;
use crate::manager::{Result, Saveable};
use crate::worker_client::{self, SavedWorker, Written};
use crate::worker_protocol::{MemoryRange, WITH_HANDOVER, WITH_LOG, WITH_SAVE};
use crate::{blocking, guest_pieces};

/// Damage of a stream with more than a vGPU.
const MACHINE: &str = "it is that of a VM";

/// vGPUs that are being saved or restored.
#[derive(Clone, Debug, Default)]
pub struct Saving(Arc<Mutex<BTreeSet<VgpuId>>>);

/// A vGPU that nothing else saves or restores meanwhile.
#[derive(Debug)]
pub(super) struct Reserved {
    saving: Saving,
    vgpu: VgpuId,
}

impl Saving {
    /// Refuses a vGPU that is being saved, restored or upgraded.
    pub(super) fn reserve(&self, vgpu: VgpuId) -> Result<Reserved> {
        if self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(vgpu) {
            return Ok(Reserved { saving: self.clone(), vgpu });
        }
        let message = format!("vGPU {vgpu} is being saved or restored already");
        Err(ErrorDetail::new(ErrorCode::Conflict, message))
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.saving.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.vgpu);
    }
}

impl Service {
    /// Saves a vGPU. The returned stream is made while it is read; its end says that it is complete.
    pub async fn save(&self, id: VgpuId, request: SaveVgpu) -> Result<Body> {
        let reserved = self.saving.reserve(id)?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        if request.check {
            blocking::run(move || {
                check(&saveable.control, id, WITH_SAVE)?;
                let checked = worker_client::check_save(&saveable.control);
                checked.map_err(|error| cannot("saved", &error))
            })
            .await??;
            return Ok(Body::empty());
        }
        let head = Head {
            tessera: self.version.version.clone(),
            vgpu: id,
            mdev_type: saveable.mdev_type.clone(),
            vram_bytes: saveable.vram_bytes,
            place: None,
        };
        let ((saved, written), control) = blocking::run(move || {
            check(&saveable.control, id, if request.written { WITH_LOG } else { WITH_SAVE })?;
            let refused = |error| cannot("saved", &error);
            worker_client::pause(&saveable.control).map_err(refused)?;
            let saved = worker_client::save(&saveable.control).and_then(|saved| {
                let first = request.written.then(|| worker_client::written(&saveable.control, 0));
                Ok((saved, first.transpose()?))
            });
            if saved.is_err() {
                resume(&saveable.control, id);
            }
            Ok::<_, ErrorDetail>((saved.map_err(refused)?, saveable.control))
        })
        .await??;
        let (writer, body) = body_writer();
        tokio::task::spawn_blocking(move || {
            let done = write(&head, saved, written, &control, writer);
            if let Err(error) = &done {
                log::warn!("vGPU {id} is not saved: {error}");
            }
            if done.is_err() || !request.keep_paused {
                resume(&control, id);
            }
            drop(reserved);
        });
        Ok(Body::new(body))
    }

    /// Restores a vGPU from a stream. It is paused then. A stream that is not valid to its end
    /// leaves a vGPU that was reset.
    pub async fn restore(&self, id: VgpuId, body: Body) -> Result<RestoredVgpu> {
        let reserved = self.saving.reserve(id)?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        let reader = BodyReader::new(body);
        blocking::run(move || {
            let _reserved = reserved;
            check(&saveable.control, id, WITH_SAVE)?;
            read(&saveable, id, reader)
        })
        .await?
    }

    /// Begins or ends a record of the guest memory that a vGPU writes.
    pub async fn log_writes(&self, id: VgpuId, enabled: bool) -> Result<()> {
        let _reserved = self.saving.reserve(id)?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        blocking::run(move || {
            check(&saveable.control, id, WITH_LOG)?;
            let done = worker_client::log_writes(&saveable.control, enabled);
            done.map_err(|error| cannot("saved", &error))
        })
        .await?
    }

    /// Makes a step of a handover. The vGPU is paused then.
    pub async fn handover(&self, id: VgpuId, step: HandoverStep) -> Result<RestoredVgpu> {
        let _reserved = self.saving.reserve(id)?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        blocking::run(move || {
            let control = &saveable.control;
            check(control, id, WITH_HANDOVER)?;
            let config = match step {
                HandoverStep::Begin => worker_client::begin_handover(control).map(|()| Vec::new()),
                HandoverStep::Adopt => worker_client::adopt(control),
                HandoverStep::Abandon => {
                    worker_client::abandon_handover(control).map(|()| Vec::new())
                }
            };
            let config = config.map_err(|error| cannot("handed over", &error))?;
            Ok(RestoredVgpu { config: config.into_iter().map(ConfigWrite::from).collect() })
        })
        .await?
    }

    /// Continues the work of a paused vGPU.
    pub async fn resume(&self, id: VgpuId) -> Result<()> {
        let _reserved = self.saving.reserve(id)?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        let resumed = blocking::run(move || worker_client::resume(&saveable.control)).await?;
        resumed.map_err(|error| cannot("resumed", &error))
    }
}

fn cannot(what: &str, error: &io::Error) -> ErrorDetail {
    ErrorDetail::new(ErrorCode::Conflict, format!("The vGPU cannot be {what}: {error}"))
}

/// Refuses vGPUs without a VM, whose guest memory would be missing, and workers of versions that
/// cannot be saved.
fn check(control: &Path, id: VgpuId, version: u32) -> Result<()> {
    let status = worker_client::status(control).map_err(|error| cannot("saved", &error))?;
    let conflict = |message| Err(ErrorDetail::new(ErrorCode::Conflict, message));
    if status.version < version {
        return conflict(format!(
            "vGPU {id} was started by an older version of vgpud, which cannot save it; stop and \
             start it with its VM"
        ));
    }
    if status.client.is_none() {
        return conflict(format!(
            "vGPU {id} has no VM; its state is that of a VM, and is saved and restored with it"
        ));
    }
    Ok(())
}

fn resume(control: &Path, id: VgpuId) {
    if let Err(error) = worker_client::resume(control) {
        log::error!("vGPU {id} stays paused: {error}");
    }
}

/// Writes the stream of a paused vGPU.
fn write(
    head: &Head,
    saved: SavedWorker,
    written: Option<Written>,
    control: &Path,
    to: impl Write,
) -> io::Result<()> {
    // A worker that was taken over can pass a file of any length.
    let mut state = Vec::new();
    File::from(saved.state).take(MAX_STATE + 1).read_to_end(&mut state)?;
    if state.len() as u64 > MAX_STATE {
        return Err(io::Error::other("the worker passes too long a state"));
    }
    let mut stream = StreamWriter::new(to, head)?;
    stream.state(&state)?;
    let mut written = written;
    while let Some(Written { pieces, next }) = written {
        let pieces = BufReader::new(File::from(pieces));
        guest_pieces::read(pieces, |address, data| stream.guest(address, data))?;
        written = next.map(|next| worker_client::written(control, next)).transpose()?;
    }
    let MemoryRange { offset, len, staged } = saved.range;
    let memory = File::from(saved.memory);
    if staged {
        let mut memory = StagedReader::new(memory, len, head.vram_bytes)?;
        let copy = |copy| worker_client::copy_staged(control, copy);
        while let Some((offset, data)) = memory.next_chunk(copy)? {
            stream.memory(offset, data)?;
        }
        return stream.finish().map(drop);
    }
    if len < head.vram_bytes {
        return Err(io::Error::other("the worker passes a part of its video memory"));
    }
    let mut memory = MemoryReader::new(memory, offset, head.vram_bytes)?;
    while let Some((offset, data)) = memory.next_chunk()? {
        stream.memory(offset, data)?;
    }
    stream.finish().map(drop)
}

/// Reads a stream into a vGPU.
fn read(saveable: &Saveable, id: VgpuId, from: impl Read) -> Result<RestoredVgpu> {
    let (mut stream, head) = StreamReader::new(from).map_err(invalid)?;
    if (&head.mdev_type, head.vram_bytes) != (&saveable.mdev_type, saveable.vram_bytes) {
        let message = format!(
            "The saved vGPU has type {}, and vGPU {id} has type {}",
            head.mdev_type, saveable.mdev_type
        );
        return Err(ErrorDetail::new(ErrorCode::Conflict, message));
    }
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
    match (result, filling) {
        (Ok(()), Some(filling)) => Ok(filling.restored),
        (result, filling) => {
            if filling.is_some()
                && let Err(error) = worker_client::discard(&saveable.control)
            {
                log::error!("vGPU {id} keeps a part of a saved vGPU: {error}");
            }
            result.map(|()| RestoredVgpu::default())
        }
    }
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
    Staged(StagedWriter),
}

impl<'a> Filling<'a> {
    /// Restores the state.
    fn begin(saveable: &'a Saveable, state: &[u8]) -> Result<Self> {
        let Saveable { control, vram_bytes, .. } = saveable;
        let refused = |error| cannot("restored", &error);
        let state = file_of(c"vgpu-state", state).map_err(refused)?;
        let (restored, memory) = worker_client::restore(control, state.as_fd()).map_err(refused)?;
        let config = restored.config.into_iter().map(ConfigWrite::from).collect();
        let (file, range) = (File::from(memory), restored.memory);
        let memory = if range.staged {
            StagedWriter::new(file, range.len, *vram_bytes).map(Memory::Staged).map_err(refused)?
        } else {
            Memory::File(file, range)
        };
        Ok(Self { control, restored: RestoredVgpu { config }, memory, guest: None })
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
                    Memory::Staged(memory) => {
                        let copy = |copy| worker_client::copy_staged(self.control, copy);
                        memory.flush(copy).map_err(refused)
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
            Memory::Staged(memory) => {
                let copy = |copy| worker_client::copy_staged(self.control, copy);
                return memory.write(offset, data, copy);
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
