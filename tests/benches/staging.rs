//! Video memory through staging memory: several threads against one. Without a GPU: a copy takes as
//! long as at 50 GB/s.
//!
//! The file with the stream is in `/dev/shm`. `--mib` sets its length.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use ipc::mem::SharedMemory;
use mdev_core::gpu::StagedCopy;
use mdev_core::stream::{IndexedVgpu, MemoryChunk, StreamWriter};
use mdev_core::testing::saved_head;
use mdev_core::units::MIB;
use vgpud::staged_memory::{self, Staging, fill::fill, read::read};

/// Length of staging memory.
const STAGING: u64 = 128 * MIB;
/// Rate of the copy engine, in bytes per nanosecond.
const ENGINE: f64 = 50.0;
/// Measurements of each number of threads. The best counts.
const TURNS: u32 = 3;

#[derive(Parser)]
struct Args {
    /// Length of the video memory in MiB
    #[arg(long, default_value_t = 1024)]
    mib: u64,
    /// `cargo bench` passes it
    #[arg(long, hide = true)]
    bench: bool,
}

/// Waits as long as a copy takes.
#[allow(clippy::unnecessary_wraps, reason = "a copy can fail")]
fn copy(copy: StagedCopy) -> io::Result<()> {
    std::thread::sleep(Duration::from_secs_f64(copy.len as f64 / ENGINE / 1e9));
    Ok(())
}

/// Writes a stream whose memory is nowhere zero.
fn write_file(file: File, bytes: u64) -> Result<File> {
    let mut stream = StreamWriter::new(file, &saved_head(bytes))?;
    for offset in (0..bytes).step_by(MIB as usize) {
        stream.memory(offset, &vec![(offset >> 20) as u8 | 1; MIB as usize])?;
    }
    Ok(stream.finish()?)
}

/// Returns the best rate in GB/s.
fn best(bytes: u64, mut turn: impl FnMut() -> Result<()>) -> Result<f64> {
    let mut best = 0.0_f64;
    for _ in 0..TURNS {
        let since = Instant::now();
        turn()?;
        best = best.max(bytes as f64 / since.elapsed().as_secs_f64() / 1e9);
    }
    Ok(best)
}

fn main() -> Result<()> {
    let args = Args::parse();
    let bytes = args.mib * MIB;
    let file = write_file(tempfile::tempfile_in("/dev/shm")?, bytes)?;
    let memory = SharedMemory::new(c"staging", STAGING)?;
    let staging = Staging::new(File::from(memory.fd.as_fd().try_clone_to_owned()?), STAGING)?;
    let vgpu = IndexedVgpu::find(&file, 0)?;
    // What is read is the last contents of staging memory.
    memory.mapping.write(0, &vec![1; STAGING as usize]).context("staging memory")?;
    let mut alone = [0.0, 0.0];
    let all = staged_memory::threads();
    let twice = |threads: &usize| Some(2 * threads).filter(|twice| *twice < all);
    let mut counts: Vec<usize> = std::iter::successors(Some(1), twice).collect();
    counts.push(all);
    counts.dedup();
    for threads in counts {
        let restore = best(bytes, || Ok(fill(&file, &vgpu.memory, &staging, threads, copy)?))?;
        let save = best(bytes, || {
            let mut written = 0;
            read(&staging, bytes, threads, copy, |chunk: &MemoryChunk| {
                written += chunk.data().len() as u64;
                Ok(())
            })?;
            ensure!(written == bytes, "{written} bytes were read");
            Ok(())
        })?;
        if threads == 1 {
            alone = [restore, save];
        }
        println!(
            "{threads:2} threads: restore {restore:5.1} GB/s ({:.2} of one thread), save {save:5.1} GB/s ({:.2})",
            restore / alone[0],
            save / alone[1]
        );
    }
    let mut last = [0];
    file.read_exact_at(&mut last, vgpu.memory[0].at)?;
    ensure!(last == [1], "the file has changed");
    Ok(())
}
