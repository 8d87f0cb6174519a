//! Saving a vGPU into a stream, restoring it, and handing it over to another process of its VM.
//!
//! The worker stops the vGPU's work and passes its state and the file of its video memory, which the
//! manager copies: a worker that faces a guest writes no stream that another guest is restored from.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use axum::body::Body;
use mdev_core::ids::VgpuId;
use mdev_core::stream::{
    Head, MAX_STATE, MemoryReader, Part, StreamError, StreamReader, StreamWriter,
};
use vendor_backends::mem::file_of;
use vgpud_api::{ConfigWrite, ErrorCode, ErrorDetail, HandoverStep, RestoredVgpu, SaveVgpu};
use vgpud_host::body::{BodyReader, body_writer};

use super::Service;
use crate::blocking;
use crate::manager::{Result, Saveable};
use crate::worker_client::{self, SavedWorker};
use crate::worker_protocol::{MemoryRange, WITH_HANDOVER, WITH_SAVE};

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
        let (saved, control) = blocking::run(move || {
            check(&saveable.control, id, WITH_SAVE)?;
            let refused = |error| cannot("saved", &error);
            worker_client::pause(&saveable.control).map_err(refused)?;
            let saved = worker_client::save(&saveable.control).map_err(refused);
            if saved.is_err() {
                resume(&saveable.control, id);
            }
            Ok::<_, ErrorDetail>((saved?, saveable.control))
        })
        .await??;
        let (writer, body) = body_writer();
        tokio::task::spawn_blocking(move || {
            let written = write(&head, saved, writer);
            if let Err(error) = &written {
                log::warn!("vGPU {id} is not saved: {error}");
            }
            if written.is_err() || !request.keep_paused {
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
fn write(head: &Head, saved: SavedWorker, to: impl Write) -> io::Result<()> {
    // A worker that was taken over can pass a file of any length.
    let mut state = Vec::new();
    File::from(saved.state).take(MAX_STATE + 1).read_to_end(&mut state)?;
    if state.len() as u64 > MAX_STATE {
        return Err(io::Error::other("the worker passes too long a state"));
    }
    let mut stream = StreamWriter::new(to, head)?;
    stream.state(&state)?;
    if saved.range.len < head.vram_bytes {
        return Err(io::Error::other("the worker passes a part of its video memory"));
    }
    let memory = File::from(saved.memory);
    let mut memory = MemoryReader::new(memory, saved.range.offset, head.vram_bytes)?;
    while let Some((offset, data)) = memory.next_chunk()? {
        stream.memory(offset, data)?;
    }
    stream.finish().map(drop)
}

/// Reads a stream into a vGPU.
fn read(saveable: &Saveable, id: VgpuId, from: impl Read) -> Result<RestoredVgpu> {
    let invalid = |error: StreamError| ErrorDetail::new(ErrorCode::Invalid, error);
    let (mut stream, head) = StreamReader::new(from).map_err(invalid)?;
    if (&head.mdev_type, head.vram_bytes) != (&saveable.mdev_type, saveable.vram_bytes) {
        let message = format!(
            "The saved vGPU has type {}, and vGPU {id} has type {}",
            head.mdev_type, saveable.mdev_type
        );
        return Err(ErrorDetail::new(ErrorCode::Conflict, message));
    }
    let mut state = Vec::new();
    // Memory follows the state.
    let first = loop {
        match stream.next_part().map_err(invalid)? {
            Part::State(piece) => state.extend_from_slice(piece),
            Part::Memory { offset, data } => break Some((offset, data.to_vec())),
            Part::Next(_) | Part::Domain(_) | Part::Machine(_) => {
                return Err(invalid(StreamError::Damaged(MACHINE)));
            }
            Part::End => break None,
        }
    };
    let refused = |error| cannot("restored", &error);
    let state = file_of(c"vgpu-state", &state).map_err(refused)?;
    let (restored, memory) =
        worker_client::restore(&saveable.control, state.as_fd()).map_err(refused)?;
    let filled = fill(&mut stream, first, &File::from(memory), restored.memory);
    if let Err(error) = filled {
        if let Err(error) = worker_client::discard(&saveable.control) {
            log::error!("vGPU {id} keeps a part of a saved vGPU: {error}");
        }
        return Err(invalid(error));
    }
    Ok(RestoredVgpu { config: restored.config.into_iter().map(ConfigWrite::from).collect() })
}

/// Fills video memory with the rest of a stream, up to its end.
fn fill(
    stream: &mut StreamReader<impl Read>,
    first: Option<(u64, Vec<u8>)>,
    file: &File,
    range: MemoryRange,
) -> std::result::Result<(), StreamError> {
    let put = |offset: u64, data: &[u8]| {
        let inside = offset.checked_add(data.len() as u64).is_some_and(|end| end <= range.len);
        let at = range.offset.checked_add(offset).filter(|_| inside);
        let at = at.ok_or(StreamError::Damaged("it has more video memory than its vGPU"))?;
        file.write_all_at(data, at).map_err(StreamError::from)
    };
    let Some((offset, data)) = first else { return Ok(()) };
    put(offset, &data)?;
    loop {
        match stream.next_part()? {
            Part::Memory { offset, data } => put(offset, data)?,
            Part::End => return Ok(()),
            Part::State(_) | Part::Next(_) | Part::Domain(_) | Part::Machine(_) => {
                return Err(StreamError::Damaged(MACHINE));
            }
        }
    }
}
