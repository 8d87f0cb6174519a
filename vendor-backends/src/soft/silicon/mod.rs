//! The software silicon: memory, address spaces, channels, the runlist and the engine.
//!
//! From the outside in:
//!
//! * [`Silicon`]: one GPU, its description and its vGPUs
//! * [`vgpu`]: one vGPU; [`vram`], [`address_space`]: its memory; [`signals`], [`wake`]: its interrupts and its
//!   wake-ups
//! * [`engine`], [`runlist`], [`quota`], [`clock`]: who runs when
//! * [`channel`], [`method`]: rings and pushbuffers; [`host`], [`copy`], [`compute`], [`kernels`]: what methods do
//! * [`fault`], [`counters`], [`stretch`]: how a channel ends; what is counted, and for which engine

pub mod address_space;
pub mod channel;
pub mod clock;
pub mod compute;
pub mod copy;
pub mod counters;
pub mod engine;
pub mod fault;
pub mod host;
#[cfg(test)]
mod hostile;
pub mod kernels;
pub mod method;
pub mod quota;
pub mod runlist;
pub mod signals;
pub mod stretch;
pub mod vgpu;
pub mod vram;
pub mod wake;

use std::io;
use std::sync::Arc;
use std::time::Duration;

use mdev_core::gpu::{ClientSpec, GpuCapabilities, GpuDescription, UsageReport};
use mdev_core::ids::VgpuId;
use mdev_core::units::{GIB, MIB, is_aligned};

use self::engine::{Board, Engine};
use self::vgpu::{Shared, Vgpu};
use self::vram::Vram;
use super::wire::Refusal;

/// Channels that one vGPU may have.
const MAX_CHANNELS: u32 = 32;
/// VGPUs of one GPU.
const MAX_VGPUS: usize = 256;
/// Most guest memory of one vGPU.
const MAX_IMPORT: u64 = 4096 * GIB;
/// Default time slice.
const DEFAULT_SLICE: Duration = Duration::from_millis(2);

/// One software GPU.
#[derive(Debug)]
pub struct Silicon {
    description: GpuDescription,
    vram: Vram,
    board: Arc<Board>,
    _engine: Engine,
}

impl Silicon {
    /// Makes one and starts its engine.
    pub fn new(name: &str, vram_bytes: u64) -> io::Result<Self> {
        let board = Arc::new(Board::new()?);
        Ok(Self {
            description: GpuDescription {
                parent: name.into(),
                model: "SOFT".into(),
                name: "Tessera software GPU".into(),
                vram_bytes,
                capabilities: GpuCapabilities::all(),
                max_channels: MAX_CHANNELS,
                default_timeslice: DEFAULT_SLICE,
            },
            vram: Vram::new(vram_bytes),
            _engine: Engine::start(Arc::clone(&board))?,
            board,
        })
    }

    /// What it is.
    pub fn describe(&self) -> &GpuDescription {
        &self.description
    }

    /// Makes room for a vGPU.
    pub fn admit(&self, spec: &ClientSpec) -> Result<(Arc<Vgpu>, Shared), Refusal> {
        let whole = |bytes| is_aligned(bytes, MIB);
        if spec.vram_bytes == 0
            || !whole(spec.vram_bytes)
            || !is_aligned(spec.framebuffer_bytes, mdev_core::units::PAGE_SIZE)
            || spec.framebuffer_bytes > spec.vram_bytes
            || spec.max_import_bytes > MAX_IMPORT
        {
            return Err(Refusal::Spec);
        }
        let partition = self.vram.take(spec.vram_bytes)?;
        let (vgpu, shared) =
            Vgpu::new(spec.clone(), MAX_CHANNELS, DEFAULT_SLICE, partition, self.board.kick())?;
        let vgpu = Arc::new(vgpu);
        self.board.update(|vgpus| {
            if vgpus.iter().any(|other| other.id() == spec.vgpu) {
                return Err(Refusal::VgpuExists);
            }
            if vgpus.len() >= MAX_VGPUS {
                return Err(Refusal::VgpuLimit);
            }
            vgpus.push(Arc::clone(&vgpu));
            Ok(())
        })?;
        Ok((vgpu, shared))
    }

    /// The vGPU with this id.
    pub fn find(&self, id: VgpuId) -> Result<Arc<Vgpu>, Refusal> {
        self.board.list().into_iter().find(|vgpu| vgpu.id() == id).ok_or(Refusal::NoVgpu)
    }

    /// Takes everything from a vGPU and forgets it.
    pub fn evict(&self, vgpu: &Arc<Vgpu>) {
        vgpu.evict();
        self.board.update(|vgpus| vgpus.retain(|other| !Arc::ptr_eq(other, vgpu)));
    }

    /// All counters.
    pub fn usage(&self) -> UsageReport {
        let vgpus = self.board.list();
        let usage = vgpus.iter().map(|vgpu| (vgpu.id(), vgpu.usage())).collect();
        UsageReport { now_ns: clock::now_ns(), vgpus: usage }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use mdev_core::partition::Partitions;
    use mdev_core::profile::{Profile, profiles};
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;

    const TOTAL: u64 = 4 * GIB;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Types of all sizes come and go in any order, in the manager's books and in the silicon: whatever is free can
        /// be had, by as many vGPUs as are said to be available, and not one byte more.
        #[test]
        fn video_memory_is_never_stranded_and_never_given_twice(
            steps in prop::collection::vec((0_u8..24, 0_usize..10), 1..80),
        ) {
            let silicon = Silicon::new("soft0", TOTAL).unwrap();
            let types: Vec<Profile> = profiles(silicon.describe());
            prop_assert_eq!(types.len(), 10, "from 256 MiB to all of it, with and without a head");
            let mut books = Partitions::new(TOTAL);
            let mut running = BTreeMap::new();
            for (n, pick) in steps {
                let (id, profile) = (VgpuId(Uuid::from_u128(n.into())), &types[pick]);
                if let Some((vgpu, _shared)) = running.remove(&id) {
                    silicon.evict(&vgpu);
                    books.release(id);
                    continue;
                }
                let used: u64 = running.values().map(|(vgpu, _): &(Arc<Vgpu>, Shared)| vgpu.spec().vram_bytes).sum();
                let fits = profile.vram_bytes <= TOTAL - used;
                prop_assert_eq!(books.available(profile) > 0, fits);
                prop_assert_eq!(books.admit(id, profile.vram_bytes).is_ok(), fits);
                match silicon.admit(&profile.client_spec(id)) {
                    Ok(admitted) => {
                        prop_assert!(fits, "more than there is");
                        running.insert(id, admitted);
                    }
                    Err(refusal) => prop_assert!(!fits && refusal == Refusal::VramLimit, "{refusal:?}"),
                }
            }
            // Whatever is left is there for the smallest type, to the last of it.
            let smallest = types.iter().min_by_key(|profile| profile.vram_bytes).unwrap();
            for n in 0..books.available(smallest) {
                let id = VgpuId(Uuid::from_u128(1000 + u128::from(n)));
                running.insert(id, silicon.admit(&smallest.client_spec(id)).unwrap());
            }
            let one_more = smallest.client_spec(VgpuId(Uuid::from_u128(2000)));
            prop_assert_eq!(silicon.admit(&one_more).unwrap_err(), Refusal::VramLimit);
        }
    }
}
