//! Exceptions of kernels under an adopting worker.

use mdev_core::gpu::{Client, EngineKind, Exception, Programs};
use vendor_backends::conformance::lifecycle;

use super::{eventually, started};

/// Traps, as a notifier.
const TRAP: u32 = 1;

/// The driver knows files for events by the numbers that a client has registered. Descriptors of
/// the next worker have other numbers.
#[test]
fn programs_that_start_after_a_death_watch_exceptions() {
    let (rm, _gpu, mut anchor, mut worker, _, _) = started();
    for _ in 0..3 {
        worker = anchor.replace(worker);
        let client = &mut worker.client;
        client.start().unwrap();
        let memory = lifecycle::import(client, &anchor.ram).unwrap();
        let spec = lifecycle::channel_spec(EngineKind::Compute, memory, 0);
        let channel = client.create_channel(&spec).unwrap();
        client.watch_exceptions(channel.id, 1 << TRAP).unwrap();
        assert!(rm.raise_exception(channel.token.0, TRAP));
        let mut taken = Vec::new();
        eventually("the exception", || {
            taken.extend(client.take_exceptions());
            !taken.is_empty()
        });
        assert_eq!(taken, [Exception { channel: channel.id, notifier: TRAP }]);
        client.destroy_channel(channel.id).unwrap();
        client.release(memory).unwrap();
        anchor.record(client);
    }
    assert!(rm.violations().is_empty(), "{:?}", rm.violations());
}
