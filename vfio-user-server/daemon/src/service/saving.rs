//! Saving a vGPU into a stream, restoring it, and handing it over to another process of its VM.
//!
//! The worker stops the vGPU's work and passes its state and the file of its video memory, which
//! the manager copies: a worker that faces a guest writes no stream that another guest is restored
//! from.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::Path;
use std::pin::pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Body;
use foreign_fds::ForeignFd;
use mdev_core::ids::VgpuId;
use mdev_core::stream::{Head, MAX_STATE, MemoryChunk, MemoryReader, StreamWriter};
use tokio::sync::Notify;
use vgpud_api::{
    Checkpoint, ConfigWrite, ErrorCode, ErrorDetail, HandoverStep, RestoredVgpu, SaveVgpu,
};
use vgpud_host::body::{BodyReader, body_writer};

use super::{Service, restoring, written};
use crate::blocking;
use crate::manager::{Result, Saveable};
use crate::staged_memory::{self, Staging};
use crate::worker_client::{self, SavedWorker, StagedCopier, Written};
use crate::worker_protocol::MemoryRange;

/// Longest time that a request which ends a save waits for the save to end: a save whose client has
/// gone ends when its next piece cannot be passed on.
const END_LIMIT: Duration = Duration::from_secs(5);

/// vGPUs that are being saved or restored.
#[derive(Clone, Debug, Default)]
pub struct Saving(Arc<Reservations>);

#[derive(Debug, Default)]
struct Reservations {
    vgpus: Mutex<BTreeSet<VgpuId>>,
    /// A reservation has ended.
    ended: Notify,
}

/// A vGPU that nothing else saves or restores meanwhile.
#[derive(Debug)]
pub(super) struct Reserved {
    saving: Saving,
    vgpu: VgpuId,
}

impl Saving {
    /// Refuses a vGPU that is being saved, restored or upgraded.
    pub(super) fn reserve(&self, vgpu: VgpuId) -> Result<Reserved> {
        if self.0.vgpus.lock().unwrap_or_else(PoisonError::into_inner).insert(vgpu) {
            return Ok(Reserved { saving: self.clone(), vgpu });
        }
        let message = format!("vGPU {vgpu} is being saved or restored already");
        Err(ErrorDetail::new(ErrorCode::Conflict, message))
    }

    /// Waits at most [`END_LIMIT`] for a save that is ending, and then does the same as
    /// [`Self::reserve`].
    async fn reserve_after_save(&self, vgpu: VgpuId) -> Result<Reserved> {
        let free = async {
            loop {
                let ended = self.0.ended.notified();
                let mut ended = pin!(ended);
                ended.as_mut().enable();
                if let Ok(reserved) = self.reserve(vgpu) {
                    return reserved;
                }
                ended.await;
            }
        };
        match tokio::time::timeout(END_LIMIT, free).await {
            Ok(reserved) => Ok(reserved),
            Err(_) => self.reserve(vgpu),
        }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let Reservations { vgpus, ended } = &*self.saving.0;
        vgpus.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.vgpu);
        ended.notify_waiters();
    }
}

impl Service {
    /// Saves a vGPU. The returned stream is made while it is read; its end says that it is
    /// complete.
    pub async fn save(&self, id: VgpuId, request: SaveVgpu) -> Result<Body> {
        let reserved = self.saving.reserve(id)?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        if request.check {
            blocking::run(move || {
                check(&saveable.control, id)?;
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
            check(&saveable.control, id)?;
            let refused = |error| cannot("saved", &error);
            worker_client::pause(&saveable.control).map_err(refused)?;
            let saved = worker_client::save(&saveable.control).and_then(|saved| {
                check_staged(&saveable, saved.range)?;
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
            check(&saveable.control, id)?;
            restoring::read(&saveable, id, reader)
        })
        .await?
    }

    /// Restores a vGPU from the vGPU of this index in a file with a stream, as [`Self::restore`].
    pub async fn restore_file(
        &self,
        id: VgpuId,
        file: ForeignFd,
        index: usize,
    ) -> Result<RestoredVgpu> {
        let reserved = self.saving.reserve(id)?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        blocking::run(move || {
            let _reserved = reserved;
            check(&saveable.control, id)?;
            let file = File::from(file.into_trusted());
            let restored = restoring::read_file(&saveable, id, &file, index);
            foreign_fds::close(file.into());
            restored
        })
        .await?
    }

    /// Asks a vGPU's VM to checkpoint its CUDA programs. The VM carries that out while it runs.
    pub async fn checkpoint(&self, id: VgpuId) -> Result<Checkpoint> {
        let _reserved = self.saving.reserve(id)?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        blocking::run(move || {
            check(&saveable.control, id)?;
            let refused = |error| cannot("saved", &error);
            let done = worker_client::checkpoint(&saveable.control).map_err(refused)?;
            Ok(Checkpoint { done })
        })
        .await?
    }

    /// Begins or ends a record of the guest memory that a vGPU writes.
    pub async fn log_writes(&self, id: VgpuId, enabled: bool) -> Result<()> {
        let _reserved = self.saving.reserve_after_save(id).await?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        blocking::run(move || {
            check(&saveable.control, id)?;
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
            check(control, id)?;
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
        let _reserved = self.saving.reserve_after_save(id).await?;
        let saveable = self.call(move |manager| manager.saveable(id)).await?;
        let resumed = blocking::run(move || worker_client::resume(&saveable.control)).await?;
        resumed.map_err(|error| cannot("resumed", &error))
    }
}

pub(super) fn cannot(what: &str, error: &io::Error) -> ErrorDetail {
    ErrorDetail::new(ErrorCode::Conflict, format!("The vGPU cannot be {what}: {error}"))
}

/// Refuses vGPUs without a VM, whose guest memory would be missing, and workers of versions that
/// this one does not speak.
fn check(control: &Path, id: VgpuId) -> Result<()> {
    let status = worker_client::status(control).map_err(|error| cannot("saved", &error))?;
    if status.client.is_none() {
        return Err(ErrorDetail::new(
            ErrorCode::Conflict,
            format!(
                "vGPU {id} has no VM; its state is that of a VM, and is saved and restored with it"
            ),
        ));
    }
    Ok(())
}

/// Refuses staging memory from a worker on a GPU that has none: a worker that was compromised can
/// call any file so.
pub(super) fn check_staged(saveable: &Saveable, range: MemoryRange) -> io::Result<()> {
    if range.staged && !saveable.staged {
        return Err(io::Error::other(
            "The worker passes staging memory, which its GPU does not have; it may have been taken over",
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
    // A worker that was compromised can pass a file of any length.
    let mut state = Vec::new();
    File::from(saved.state).take(MAX_STATE + 1).read_to_end(&mut state)?;
    if state.len() as u64 > MAX_STATE {
        return Err(io::Error::other("the worker passes too long a state"));
    }
    let mut stream = StreamWriter::new(to, head)?;
    stream.state(&state)?;
    if let Some(first) = written {
        let request = |from| worker_client::written(control, from);
        let take = |address, data: &[u8]| stream.guest(address, data);
        written::read(first, written::limit(), request, take)?;
    }
    let MemoryRange { offset, len, staged } = saved.range;
    let memory = File::from(saved.memory);
    if staged {
        let staging = Staging::new(memory, len)?;
        let copier = StagedCopier::connect(control)?;
        let copy = |copy| copier.copy(copy);
        let write = |chunk: &MemoryChunk| stream.memory_chunk(chunk);
        staged_memory::read::read(
            &staging,
            head.vram_bytes,
            staged_memory::threads(),
            copy,
            write,
        )?;
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
