//! Workers that die while they destroy channels with work.

use std::panic::{AssertUnwindSafe, catch_unwind};

use mdev_core::gpu::{ChannelSpec, Client, ClientSpec, EngineKind};
use mdev_core::ids::SpaceId;
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::{self, FakeRm};
use vendor_backends::conformance::lifecycle;
use vendor_backends::nvidia::NvidiaGpu;

use super::{Anchor, CONTINUED, Worker};
use crate::{DRIVER, set_ring, spec};

/// Creates an address space with two channels in each of three groups, all of which have work.
fn with_program(anchor: &mut Anchor, worker: &mut Worker) -> SpaceId {
    let client = &mut worker.client;
    let memory = lifecycle::import(client, &anchor.ram).unwrap();
    let space = client.create_space().unwrap();
    let engines = [EngineKind::Compute, EngineKind::Copy, EngineKind::Copy];
    for index in 0..6 {
        let group = index / 2;
        let channel = lifecycle::channel_spec(engines[group], memory, index as u64 * 512);
        let group = Some(group as u32 + 1);
        client.create_channel(&ChannelSpec { space, group, ..channel }).unwrap();
        set_ring(&anchor.ram.mapping, index as u64, 0, 3);
    }
    anchor.record(client);
    space
}

#[test]
fn a_worker_that_dies_while_a_program_ends_counts_no_fault() {
    let spec = ClientSpec { max_channels: 8, ..spec(64 * MIB) };
    for end in 0.. {
        let rm = FakeRm::new(DRIVER);
        let mut gpu = NvidiaGpu::open(rm.clone(), fake_rm::ADDRESS, CONTINUED).unwrap();
        let (mut anchor, mut worker) = Anchor::new(&rm, &mut gpu, &spec);
        let space = with_program(&mut anchor, &mut worker);
        match end % 2 {
            0 => worker.process.end_after(end / 2),
            _ => worker.process.end_within(end / 2),
        }
        let destroy = || worker.client.destroy_space(space);
        if let Ok(done) = catch_unwind(AssertUnwindSafe(destroy)) {
            done.unwrap();
            assert!(end > 20, "{end} calls are too few");
            worker.end();
            return;
        }
        let mut worker = anchor.replace(worker);
        worker.client.destroy_space(space).unwrap();
        anchor.record(&mut worker.client);
        assert_eq!(worker.client.usage().unwrap().faults, 0, "{end}");
        // Nothing delays the next program.
        with_program(&mut anchor, &mut worker);
        assert!(rm.violations().is_empty(), "{:?}", rm.violations());
    }
}
