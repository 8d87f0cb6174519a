//! The engine, and all that a chip would have besides memory.
//!
//! From the outside in:
//!
//! * [`Silicon`]: one device and its vGPUs
//! * [`vgpu`]: one vGPU; [`address_space`]: its memory; [`signals`], [`wake`]: its interrupts and its wake-ups
//! * [`engine`], [`runlist`], [`quota`], [`clock`]: who runs when
//! * [`channel`], [`method`]: rings and pushbuffers; [`host`], [`copy`]: what methods do
//! * [`compute`], [`kernels`]: programs, for devices whose engine is the CPU
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
pub mod wake;

use std::io;
use std::sync::Arc;

use mdev_core::gpu::{ClientSpec, GpuDescription, UsageReport};
use mdev_core::ids::VgpuId;

use self::engine::{Board, Engine};
use self::vgpu::{Shared, Vgpu};
use super::hardware::Hardware;
use super::wire::Refusal;

/// One device and its vGPUs.
#[derive(Debug)]
pub struct Silicon {
    hardware: Arc<dyn Hardware>,
    board: Arc<Board>,
    _engine: Engine,
}

impl Silicon {
    /// Starts its engine.
    pub fn new(hardware: Arc<dyn Hardware>) -> io::Result<Self> {
        let board = Arc::new(Board::new()?);
        let engine = Engine::start(Arc::clone(&board), hardware.pace())?;
        Ok(Self { hardware, board, _engine: engine })
    }

    /// The device.
    pub fn hardware(&self) -> &dyn Hardware {
        &*self.hardware
    }

    /// What it is.
    pub fn describe(&self) -> &GpuDescription {
        self.hardware.describe()
    }

    /// Makes room for a vGPU.
    pub fn admit(&self, spec: &ClientSpec) -> Result<(Arc<Vgpu>, Shared), Refusal> {
        let most = self.describe().max_vgpus as usize;
        let room = |vgpus: &[Arc<Vgpu>]| {
            if vgpus.iter().any(|other| other.id() == spec.vgpu) {
                return Err(Refusal::VgpuExists);
            }
            if vgpus.len() >= most { Err(Refusal::VgpuLimit) } else { Ok(()) }
        };
        room(&self.board.list())?;
        let (vgpu, shared) =
            Vgpu::new(spec.clone(), Arc::clone(&self.hardware), self.board.kick())?;
        let vgpu = Arc::new(vgpu);
        self.board.update(|vgpus| room(vgpus).map(|()| vgpus.push(Arc::clone(&vgpu))))?;
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
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    use mdev_core::partition::Partitions;
    use mdev_core::profile::{Profile, profiles};
    use mdev_core::units::GIB;
    use proptest::prelude::*;
    use uuid::Uuid;

    use super::*;
    use crate::mediator::hardware::{Hold, Partition};
    use crate::soft::SoftGpu;

    const TOTAL: u64 = 4 * GIB;

    /// A device that is slow to take its memory back.
    #[derive(Debug)]
    struct Slow {
        description: GpuDescription,
        leaves: Arc<Leaves>,
    }

    #[derive(Debug, Default)]
    struct Leaves {
        begun: AtomicBool,
        done: AtomicBool,
    }

    #[derive(Debug)]
    struct Claim(Arc<Leaves>);

    impl Hold for Claim {}

    impl Drop for Claim {
        fn drop(&mut self) {
            self.0.begun.store(true, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(100));
            self.0.done.store(true, Ordering::SeqCst);
        }
    }

    impl Hardware for Slow {
        fn describe(&self) -> &GpuDescription {
            &self.description
        }

        fn partition(&self, _spec: &ClientSpec) -> Result<Partition, Refusal> {
            Ok(Partition { memory: None, hold: Box::new(Claim(Arc::clone(&self.leaves))) })
        }
    }

    /// The manager admits a vGPU again while the connection of its dead worker is still being cleared away.
    #[test]
    fn who_evicts_a_vgpu_that_is_leaving_waits_until_it_is_gone() {
        let leaves = Arc::new(Leaves::default());
        let soft = SoftGpu::new("slow", TOTAL);
        let hardware = Slow { description: soft.describe().clone(), leaves: Arc::clone(&leaves) };
        let silicon = Arc::new(Silicon::new(Arc::new(hardware)).unwrap());
        let spec = profiles(silicon.describe())[0].client_spec(VgpuId(Uuid::from_u128(1)));
        let (vgpu, _shared) = silicon.admit(&spec).unwrap();
        let first = {
            let (silicon, vgpu) = (Arc::clone(&silicon), Arc::clone(&vgpu));
            thread::spawn(move || silicon.evict(&vgpu))
        };
        while !leaves.begun.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        silicon.evict(&vgpu);
        assert!(leaves.done.load(Ordering::SeqCst));
        assert!(silicon.find(spec.vgpu).is_err());
        first.join().unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Types of all sizes come and go in any order, in the manager's books and in the silicon: whatever is free can
        /// be had, by as many vGPUs as are said to be available, and not one byte more.
        #[test]
        fn video_memory_is_never_stranded_and_never_given_twice(
            steps in prop::collection::vec((0_u8..24, 0_usize..10), 1..80),
        ) {
            let silicon = Silicon::new(Arc::new(SoftGpu::new("soft0", TOTAL))).unwrap();
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
