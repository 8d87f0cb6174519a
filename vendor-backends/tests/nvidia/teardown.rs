//! Channels that are destroyed while they have work, by honest and by hostile guests.

use mdev_core::gpu::{Client, Gpu};
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::FakeRm;

use super::{
    DRIVER, create_until_refused, eventually, gpu, ram, resets, set_ring, spec, try_client,
    with_channels,
};

/// What another vGPU always has to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Neighbour {
    Nothing,
    Copies,
    Kernels,
}

/// A guest that creates a compute channel, works for 100 ms as the log shows it, and ends the
/// channel in the midst of the work.
#[derive(Clone, Copy, Debug)]
struct Guest {
    neighbour: Neighbour,
    /// The work is a kernel without an end.
    endless: bool,
    /// The guest writes `GP_GET`, as if all entries were fetched.
    forges: bool,
    /// The guest resets the vGPU instead of destroying the channel.
    resets: bool,
}

impl Guest {
    /// Returns the number of channels, at most `most`, until one is refused, and that of resets.
    fn create_until_refused(self, most: u32) -> (u32, usize) {
        let rm = FakeRm::new(DRIVER);
        let mut gpu = gpu(&rm);
        let mut client = try_client(&rm, &mut gpu, &spec(64 * MIB)).unwrap();
        let (other, _client, other_memory, _) = with_channels(&rm, &mut gpu);
        let work = match self.neighbour {
            Neighbour::Nothing => None,
            Neighbour::Copies => Some(0),
            Neighbour::Kernels => Some(1),
        };
        if let Some(channel) = work {
            set_ring(&other_memory.mapping, channel, 0, 1);
            eventually("the neighbour has work", || {
                let report = gpu.usage().unwrap();
                report.vgpus.iter().any(|(id, usage)| *id == other && usage.runnable)
            });
        }
        // The workers are told with the next request.
        gpu.usage().unwrap();
        rm.hold_engine(self.endless);
        rm.take_log();
        let (memory, own, mut now_ns) = (ram(MIB), u64::from(std::process::id()), 1_000_000_000);
        let created = create_until_refused(&mut client, &memory, most, |client, channel| {
            set_ring(&memory.mapping, 0, 0, 1);
            eventually("a ring", || rm.last_ring() == Some(channel.token.0));
            rm.log_residency(true, own, now_ns);
            now_ns += 100_000_000;
            rm.set_clock(now_ns);
            if self.forges {
                set_ring(&memory.mapping, 0, 1, 1);
            }
            if self.resets {
                client.reset().unwrap();
            } else {
                client.destroy_channel(channel.id).unwrap();
            }
            rm.log_residency(false, own, now_ns);
            set_ring(&memory.mapping, 0, 0, 0);
        });
        (created, resets(&rm))
    }
}

#[test]
fn a_running_kernel_that_is_destroyed_counts_as_a_fault() {
    for (forges, resets) in [(false, false), (false, true), (true, false)] {
        let guest = Guest { neighbour: Neighbour::Kernels, endless: true, forges, resets };
        let (created, resets) = guest.create_until_refused(12);
        assert!(created <= 3 && resets <= 3, "{guest:?}: {created} channels, {resets} resets");
    }
}

/// A vGPU alone keeps the engine from its first kernel to its last, whatever their lengths. So does
/// a vGPU that computes while others copy.
#[test]
fn programs_that_end_in_the_midst_of_work_get_new_channels() {
    for neighbour in [Neighbour::Nothing, Neighbour::Copies, Neighbour::Kernels] {
        for resets in [false, true] {
            let guest = Guest { neighbour, endless: false, forges: false, resets };
            let (created, _) = guest.create_until_refused(12);
            assert_eq!(created, 12, "{guest:?}");
        }
    }
    // Without a neighbour, no kernel is too long.
    let neighbour = Neighbour::Nothing;
    let guest = Guest { neighbour, endless: true, forges: false, resets: false };
    assert_eq!(guest.create_until_refused(12).0, 12, "{guest:?}");
}
