//! Filling of cleared video memory from a file with a stream.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::thread;

use mdev_core::gpu::StagedCopy;
use mdev_core::stream::{ChunkPlace, StreamError};

use super::slots::Work;
use super::{BLOCK, Mapped, SLOTS, Staging};

/// Chunks that are adjacent in video memory and copied together.
#[derive(Debug)]
struct Batch {
    /// Offset in video memory, and length.
    offset: u64,
    len: u64,
    pieces: usize,
}

/// Fills video memory with the chunks at `places` of a file, in ascending order. `copy` makes
/// copies from staging memory; it is called on this thread. What was copied before an error stays.
///
/// # Errors
///
/// Fails if staging memory cannot be mapped, a checksum is wrong, the file cannot be read, or a
/// copy fails.
pub fn fill(
    file: &File,
    places: &[ChunkPlace],
    staging: &Staging,
    threads: usize,
    mut copy: impl FnMut(StagedCopy) -> io::Result<()>,
) -> Result<(), StreamError> {
    let mapped = staging.map()?;
    let (batches, batch_of) = batches(places, staging.slot_bytes);
    let work = Work::new(batches.iter().map(|batch| batch.pieces).collect());
    work.open_batches(SLOTS as usize);
    let load_all = || {
        let mut block = vec![0; BLOCK];
        work.run(
            |index| batch_of[index],
            |index| {
                let (place, number) = (places[index], batch_of[index]);
                let at = staging.slot(number) + (place.offset - batches[number].offset);
                load(file, place, &mapped, at, &mut block)
            },
        );
    };
    thread::scope(|scope| {
        for _ in 0..threads.clamp(1, places.len().max(1)) {
            let name = "restore".to_owned();
            if let Err(error) = thread::Builder::new().name(name).spawn_scoped(scope, load_all) {
                work.fail(error.into());
            }
        }
        for (number, batch) in batches.iter().enumerate() {
            if !work.wait_for_batch(number) {
                break;
            }
            let Batch { offset, len, .. } = *batch;
            let filling = StagedCopy { offset, len, at: staging.slot(number), fills: true };
            if let Err(error) = mapped.check().and_then(|()| copy(filling)) {
                work.fail(error.into());
                break;
            }
            work.open_batches(number + 1 + SLOTS as usize);
        }
    });
    work.finish()
}

/// Puts chunks together that fit into a slot. Returns the batch of each chunk, too.
fn batches(places: &[ChunkPlace], slot_bytes: u64) -> (Vec<Batch>, Vec<usize>) {
    let mut batches: Vec<Batch> = Vec::new();
    let mut batch_of = Vec::with_capacity(places.len());
    for place in places {
        let len = place.len as u64;
        match batches.last_mut() {
            Some(batch)
                if batch.offset + batch.len == place.offset && batch.len + len <= slot_bytes =>
            {
                batch.len += len;
                batch.pieces += 1;
            }
            _ => batches.push(Batch { offset: place.offset, len, pieces: 1 }),
        }
        batch_of.push(batches.len() - 1);
    }
    (batches, batch_of)
}

/// Reads a chunk into staging memory, and checks it.
fn load(
    file: &File,
    place: ChunkPlace,
    mapped: &Mapped,
    at: u64,
    block: &mut [u8],
) -> Result<(), StreamError> {
    let mut sum = place.checksum();
    let mut done = 0;
    while done < place.len {
        let len = block.len().min(place.len - done);
        let data = &mut block[..len];
        file.read_exact_at(data, place.at + done as u64)?;
        sum.update(data);
        let written = mapped.0.write(at + done as u64, data);
        written.ok_or(StreamError::Io(io::ErrorKind::InvalidInput.into()))?;
        done += len;
    }
    sum.check()
}
