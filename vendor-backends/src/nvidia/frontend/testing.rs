//! Front ends for tests and fuzz targets, and the words of a program's arguments.
//!
//! * [`program`]: a program in a VM
#![allow(clippy::unwrap_used, missing_docs, reason = "test helpers panic on violations")]

pub mod program;

use mdev_core::ids::VgpuId;
use nvidia_rm::recording::Recorded;
use nvidia_rm::version::Layout;
use programs::front_end::FrontEndSpec;

use super::NvidiaFrontEnd;
use super::identity::Identity;

/// Descriptors that programs may have on a vGPU for tests.
pub const DESCRIPTORS: usize = 4032;

/// Returns what a vGPU for tests says of itself.
pub fn identity(driver: &str, vram_bytes: u64) -> Identity {
    Identity::of(&FrontEndSpec {
        vgpu: VgpuId::random(),
        name: "Test".into(),
        driver: Some(driver.into()),
        vram_bytes,
        max_system_bytes: 0,
        max_descriptors: 0,
    })
}

/// Returns a front end with recorded answers, for so much system memory.
pub fn front_end(identity: Identity, max_system_bytes: u64) -> NvidiaFrontEnd {
    let layout = Layout::of_programs(&identity.driver).unwrap();
    let queries = Recorded::hopper().unwrap();
    NvidiaFrontEnd::new(identity, layout, queries, (max_system_bytes, DESCRIPTORS))
}

/// Returns words as bytes.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Returns a word of bytes.
pub fn word(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(*bytes[4 * index..].first_chunk().unwrap())
}

/// Returns the parameters of a memory allocation.
pub fn memory_params(len: u64, align: u64) -> Vec<u8> {
    let mut params = vec![0; 128];
    params[64..72].copy_from_slice(&len.to_le_bytes());
    params[72..80].copy_from_slice(&align.to_le_bytes());
    params
}
