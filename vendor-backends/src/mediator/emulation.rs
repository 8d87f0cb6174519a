//! Emulation of a GPU's engine: everything that a chip has besides memory.
//!
//! In reading order:
//!
//! * [`EmulatedGpu`]: a device and its vGPUs
//! * [`vgpu`]: a vGPU; [`address_space`]: its memory; [`interrupts`], `wakeup`: its interrupts and
//!   wake-ups
//! * [`engine`], `runlist`, `token_bucket`, [`run_limit`]: scheduling
//! * [`channel`], `pushbuffer`: rings and pushbuffers
//! * `host_class`, `copy_class`, `compute_class`: methods; `semaphore`, `reduction`,
//!   `transfer`, `fill`, `remap`, `kernels`: the operations that methods start
//! * [`counters`], `engine_time`, [`clock`]: accounting

pub mod address_space;
pub mod channel;
pub mod clock;
mod compute_class;
pub mod context;
mod copy_class;
pub mod counters;
pub mod engine;
mod engine_time;
mod fill;
mod host_class;
pub mod interrupts;
#[cfg(test)]
mod isolation_tests;
mod kernels;
mod pushbuffer;
mod reduction;
mod remap;
pub mod run_limit;
pub mod runlist;
mod semaphore;
mod token_bucket;
mod transfer;
pub mod vgpu;
mod wakeup;

use std::io;
use std::sync::Arc;

use mdev_core::gpu::{ClientSpec, GpuDescription, UsageReport};
use mdev_core::ids::VgpuId;

use self::engine::vgpu_list::VgpuList;
use self::engine::{Engine, EngineThread};
use self::vgpu::{Vgpu, WorkerFds};
use super::context_process::turns::Turns;
use super::hardware::Hardware;
use super::wire::Refusal;

/// A device and its vGPUs.
#[derive(Debug)]
pub struct EmulatedGpu {
    hardware: Arc<dyn Hardware>,
    vgpus: Arc<VgpuList>,
    _engine: Option<EngineThread>,
}

impl EmulatedGpu {
    /// Starts the engine.
    pub fn new(hardware: Arc<dyn Hardware>) -> io::Result<Self> {
        let vgpus = Arc::new(VgpuList::new()?);
        let engine = EngineThread::start(Arc::clone(&vgpus), hardware.pace())?;
        Ok(Self { hardware, vgpus, _engine: Some(engine) })
    }

    /// Returns the device of a context, for one vGPU, and its engine, which the caller runs. The
    /// engine runs in turns only.
    pub fn in_turns(hardware: Arc<dyn Hardware>, turns: Arc<Turns>) -> io::Result<(Self, Engine)> {
        let vgpus = Arc::new(VgpuList::new()?);
        let engine = Engine::new(Arc::clone(&vgpus), hardware.pace(), Some(turns));
        Ok((Self { hardware, vgpus, _engine: None }, engine))
    }

    /// Ends the engine of [`Self::in_turns`].
    pub fn stop(&self) {
        self.vgpus.stop();
    }

    /// Returns the device.
    pub fn hardware(&self) -> &dyn Hardware {
        &*self.hardware
    }

    /// Returns the description of the device.
    pub fn describe(&self) -> &GpuDescription {
        self.hardware.describe()
    }

    /// Admits a vGPU.
    pub fn admit(&self, spec: &ClientSpec) -> Result<(Arc<Vgpu>, WorkerFds), Refusal> {
        let max_vgpus = self.describe().max_vgpus as usize;
        let check_room = |vgpus: &[Arc<Vgpu>]| {
            if vgpus.iter().any(|other| other.id() == spec.vgpu) {
                return Err(Refusal::VgpuExists);
            }
            if vgpus.len() >= max_vgpus { Err(Refusal::VgpuLimit) } else { Ok(()) }
        };
        check_room(&self.vgpus.list())?;
        let (vgpu, fds) =
            Vgpu::new(spec.clone(), Arc::clone(&self.hardware), self.vgpus.waker().clone())?;
        let vgpu = Arc::new(vgpu);
        self.vgpus.update(|vgpus| check_room(vgpus).map(|()| vgpus.push(Arc::clone(&vgpu))))?;
        Ok((vgpu, fds))
    }

    /// Returns the vGPU with an id.
    pub fn find(&self, id: VgpuId) -> Result<Arc<Vgpu>, Refusal> {
        self.vgpus.list().into_iter().find(|vgpu| vgpu.id() == id).ok_or(Refusal::NoVgpu)
    }

    /// Frees all resources of a vGPU and removes it.
    pub fn evict(&self, vgpu: &Arc<Vgpu>) {
        vgpu.evict();
        self.vgpus.update(|vgpus| vgpus.retain(|other| !Arc::ptr_eq(other, vgpu)));
    }

    /// Returns the counters of all vGPUs.
    pub fn usage(&self) -> UsageReport {
        let vgpus = self.vgpus.list();
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
    use crate::mediator::hardware::{Partition, Reservation};
    use crate::soft::SoftGpu;

    const TOTAL: u64 = 4 * GIB;

    /// A device that frees its reservations slowly.
    #[derive(Debug)]
    struct SlowDevice {
        description: GpuDescription,
        release: Arc<Release>,
    }

    #[derive(Debug, Default)]
    struct Release {
        begun: AtomicBool,
        done: AtomicBool,
    }

    #[derive(Debug)]
    struct SlowReservation(Arc<Release>);

    impl Reservation for SlowReservation {}

    impl Drop for SlowReservation {
        fn drop(&mut self) {
            self.0.begun.store(true, Ordering::SeqCst);
            thread::sleep(Duration::from_millis(100));
            self.0.done.store(true, Ordering::SeqCst);
        }
    }

    impl Hardware for SlowDevice {
        fn describe(&self) -> &GpuDescription {
            &self.description
        }

        fn partition(&self, _spec: &ClientSpec) -> Result<Partition, Refusal> {
            Ok(Partition {
                memory: None,
                reservation: Box::new(SlowReservation(Arc::clone(&self.release))),
            })
        }
    }

    /// The manager may admit a vGPU again while the connection of its dead worker is still being
    /// closed.
    #[test]
    fn concurrent_evictions_wait_until_the_vgpu_is_gone() {
        let release = Arc::new(Release::default());
        let soft = SoftGpu::new("slow", TOTAL);
        let hardware =
            SlowDevice { description: soft.describe().clone(), release: Arc::clone(&release) };
        let gpu = Arc::new(EmulatedGpu::new(Arc::new(hardware)).unwrap());
        let spec = profiles(gpu.describe())[0].client_spec(VgpuId(Uuid::from_u128(1)));
        let (vgpu, _shared) = gpu.admit(&spec).unwrap();
        let first = {
            let (gpu, vgpu) = (Arc::clone(&gpu), Arc::clone(&vgpu));
            thread::spawn(move || gpu.evict(&vgpu))
        };
        while !release.begun.load(Ordering::SeqCst) {
            thread::yield_now();
        }
        gpu.evict(&vgpu);
        assert!(release.done.load(Ordering::SeqCst));
        assert!(gpu.find(spec.vgpu).is_err());
        first.join().unwrap();
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Profiles of all sizes start and stop in any order, in the manager's partition table and
        /// in the emulated GPU: all free memory can be allocated, to as many vGPUs as reported
        /// available.
        #[test]
        fn all_video_memory_is_usable_and_none_is_allocated_twice(
            steps in prop::collection::vec((0_u8..24, 0_usize..10), 1..80),
        ) {
            let gpu = EmulatedGpu::new(Arc::new(SoftGpu::new("soft0", TOTAL))).unwrap();
            let types: Vec<Profile> = profiles(gpu.describe());
            prop_assert_eq!(types.len(), 10, "from 256 MiB to all memory, with and without a display");
            let mut partitions = Partitions::new(TOTAL);
            let mut running = BTreeMap::new();
            for (n, pick) in steps {
                let (id, profile) = (VgpuId(Uuid::from_u128(n.into())), &types[pick]);
                if let Some((vgpu, _shared)) = running.remove(&id) {
                    gpu.evict(&vgpu);
                    partitions.release(id);
                    continue;
                }
                let used: u64 = running.values().map(|(vgpu, _): &(Arc<Vgpu>, WorkerFds)| vgpu.spec().vram_bytes).sum();
                let fits = profile.vram_bytes <= TOTAL - used;
                prop_assert_eq!(partitions.available(profile) > 0, fits);
                prop_assert_eq!(partitions.admit(id, profile.vram_bytes).is_ok(), fits);
                match gpu.admit(&profile.client_spec(id)) {
                    Ok(admitted) => {
                        prop_assert!(fits, "more than the total");
                        running.insert(id, admitted);
                    }
                    Err(refusal) => prop_assert!(!fits && refusal == Refusal::VramLimit, "{refusal:?}"),
                }
            }
            // All remaining memory can be allocated to the smallest type.
            let smallest = types.iter().min_by_key(|profile| profile.vram_bytes).unwrap();
            for n in 0..partitions.available(smallest) {
                let id = VgpuId(Uuid::from_u128(1000 + u128::from(n)));
                running.insert(id, gpu.admit(&smallest.client_spec(id)).unwrap());
            }
            let one_more = smallest.client_spec(VgpuId(Uuid::from_u128(2000)));
            prop_assert_eq!(gpu.admit(&one_more).unwrap_err(), Refusal::VramLimit);
        }
    }
}
