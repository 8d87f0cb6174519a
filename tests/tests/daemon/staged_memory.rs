//! Video memory that several threads save and restore through staging memory, on a fake NVIDIA
//! driver whose copy engines copy.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mdev_core::gpu::{Client, ClientSpec, Gpu, Saving, StagedCopy};
use mdev_core::ids::VgpuId;
use mdev_core::stream::{IndexedVgpu, StreamError, StreamWriter};
use mdev_core::testing::saved_head;
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::{self, Engines, FakeRm};
use vendor_backends::nvidia::{NvidiaClient, NvidiaGpu, Options};
use vgpud::staged_memory::{Staging, fill, read};

/// Video memory: more than staging memory, and no multiple of its slots.
const VRAM: u64 = 208 * MIB;

/// A paused vGPU.
struct Vgpu {
    rm: Arc<FakeRm>,
    _gpu: NvidiaGpu,
    client: Mutex<NvidiaClient>,
    _engines: Engines,
    staging: Staging,
}

impl Vgpu {
    fn new() -> Result<Self> {
        let rm = FakeRm::new("580.142");
        rm.set_clock(1_000_000_000);
        let options = Options { direct_vram: false, ..Options::FOR_TESTS };
        let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, options)?;
        let spec = ClientSpec {
            vgpu: VgpuId::random(),
            vram_bytes: VRAM,
            framebuffer_bytes: 0,
            max_channels: 4,
            max_import_bytes: 64 * MIB,
        };
        let file = gpu.admit(&spec)?.fd.context("a file")?;
        let mut client = NvidiaClient::open(rm.clone(), file.into_trusted())?;
        client.start()?;
        let engines = Engines::start(&rm, Duration::from_micros(400));
        client.pause()?;
        let aperture = client.staging()?;
        let staging = Staging::new(File::from(aperture.fd), aperture.len)?;
        Ok(Self { rm, _gpu: gpu, client: Mutex::new(client), _engines: engines, staging })
    }

    fn copy(&self, copy: StagedCopy) -> io::Result<()> {
        let mut client = self.client.lock().unwrap_or_else(PoisonError::into_inner);
        client.copy_staged(copy).map_err(io::Error::other)
    }

    fn fill(&self, file: &File, threads: usize) -> std::result::Result<(), StreamError> {
        let vgpu = IndexedVgpu::find(file, 0)?;
        fill::fill(file, &vgpu.memory, &self.staging, threads, |copy| self.copy(copy))
    }

    fn save(&self, threads: usize) -> Result<File> {
        let mut stream = stream()?;
        let write = |chunk: &_| stream.memory_chunk(chunk);
        read::read(&self.staging, VRAM, threads, |copy| self.copy(copy), write)?;
        Ok(stream.finish()?)
    }
}

fn stream() -> Result<StreamWriter<File>> {
    let mut stream = StreamWriter::new(tempfile::tempfile()?, &saved_head(VRAM))?;
    stream.state(b"state")?;
    Ok(stream)
}

/// Returns a stream whose memory differs in each MiB. Every fifth one is zero.
fn sample() -> Result<File> {
    let mut stream = stream()?;
    for offset in (0..VRAM).step_by(MIB as usize).filter(|offset| offset / MIB % 5 != 3) {
        let word = (offset as u32 | 1).wrapping_mul(0x9e37_79b9).to_le_bytes();
        stream.memory(offset, &word.repeat(MIB as usize / 4))?;
    }
    Ok(stream.finish()?)
}

fn contents(file: &File) -> Result<Vec<u8>> {
    let mut bytes = vec![0; file.metadata()?.len() as usize];
    file.read_exact_at(&mut bytes, 0)?;
    Ok(bytes)
}

#[test]
fn what_is_restored_on_several_threads_is_saved_as_the_same() -> Result<()> {
    let file = sample()?;
    for threads in [1, 4] {
        let vgpu = Vgpu::new()?;
        vgpu.fill(&file, threads)?;
        for threads in [3, 1] {
            ensure!(contents(&vgpu.save(threads)?)? == contents(&file)?, "another memory");
        }
        ensure!(vgpu.rm.violations().is_empty(), "{:?}", vgpu.rm.violations());
    }
    Ok(())
}

#[test]
fn a_damaged_file_is_noticed_while_a_vgpu_is_filled() -> Result<()> {
    let file = sample()?;
    file.write_all_at(b"other", file.metadata()?.len() / 2)?;
    let vgpu = Vgpu::new()?;
    let refused = vgpu.fill(&file, 4);
    ensure!(matches!(refused, Err(StreamError::Damaged(_))), "{refused:?}");
    Ok(())
}
