//! Reading of video memory as chunks of a stream.

use std::io;
use std::sync::{Mutex, PoisonError};
use std::thread;

use mdev_core::gpu::StagedCopy;
use mdev_core::stream::{MAX_CHUNK, MemoryChunk};

use super::slots::Work;
use super::{SLOTS, Staging};

/// Chunks that wait for the stream's writer, for each thread.
const AHEAD: usize = 2;

/// Reads `bytes` of video memory, and passes its chunks in ascending order and without what is
/// zero. `copy` makes copies to staging memory, on a thread; `write` is called on this one.
///
/// # Errors
///
/// Fails if a copy or `write` fails.
pub fn read(
    staging: &Staging,
    bytes: u64,
    threads: usize,
    copy: impl FnMut(StagedCopy) -> io::Result<()> + Send,
    mut write: impl FnMut(&MemoryChunk) -> io::Result<()>,
) -> io::Result<()> {
    let chunk = MAX_CHUNK as u64;
    let pieces = bytes.div_ceil(chunk) as usize;
    let per_batch = (staging.slot_bytes / chunk) as usize;
    let batches: Vec<usize> =
        (0..pieces).step_by(per_batch).map(|first| per_batch.min(pieces - first)).collect();
    let threads = threads.clamp(1, pieces.max(1));
    let work = Work::new(batches);
    work.open_pieces(AHEAD * threads);
    let chunks: Vec<Mutex<Option<MemoryChunk>>> = (0..pieces).map(|_| Mutex::default()).collect();
    let buffers = Mutex::new(Vec::new());
    let load_all = || {
        work.run(
            |index| index / per_batch,
            |index| {
                let mut data: Vec<u8> = lock(&buffers).pop().unwrap_or_default();
                let offset = index as u64 * chunk;
                data.resize((bytes - offset).min(chunk) as usize, 0);
                let at = staging.slot(index / per_batch) + offset % (per_batch as u64 * chunk);
                staging.read(&mut data, at)?;
                *lock(&chunks[index]) =
                    MemoryChunk::new(offset, data).map_err(|zero| lock(&buffers).push(zero)).ok();
                Ok(())
            },
        );
    };
    thread::scope(|scope| {
        let copies = || copy_all(staging, bytes, per_batch as u64 * chunk, &work, copy);
        let spawned = thread::Builder::new().name("save-copies".into()).spawn_scoped(scope, copies);
        let mut spawned = spawned.map(drop);
        for _ in 0..threads {
            let loader = thread::Builder::new().name("save".into()).spawn_scoped(scope, load_all);
            spawned = spawned.and(loader.map(drop));
        }
        if let Err(error) = spawned {
            work.fail(error);
        }
        for (index, chunk) in chunks.iter().enumerate() {
            if !work.wait_for_piece(index) {
                break;
            }
            if let Some(chunk) = lock(chunk).take() {
                if let Err(error) = write(&chunk) {
                    work.fail(error);
                    break;
                }
                lock(&buffers).push(chunk.into_data());
            }
            work.open_pieces(index + 1 + AHEAD * threads);
        }
    });
    work.finish()
}

/// Copies one batch after the other to its slot, once the one before has been read.
fn copy_all(
    staging: &Staging,
    bytes: u64,
    batch_bytes: u64,
    work: &Work<io::Error>,
    mut copy: impl FnMut(StagedCopy) -> io::Result<()>,
) {
    for (number, offset) in (0..bytes).step_by(batch_bytes as usize).enumerate() {
        let before = number.checked_sub(SLOTS as usize);
        if before.is_some_and(|before| !work.wait_for_batch(before)) {
            return;
        }
        let len = batch_bytes.min(bytes - offset);
        let reading = StagedCopy { offset, len, at: staging.slot(number), fills: false };
        if let Err(error) = copy(reading) {
            return work.fail(error);
        }
        work.open_batches(number + 1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
