//! Exceptions of kernels.

use std::time::Duration;

use mdev_core::abi::notifier;
use mdev_core::gpu::{ChannelHandle, Client, EngineKind, Exception, GpuError, Pending, Programs};
use mdev_core::ids::ChannelId;
use mdev_core::units::MIB;
use nvidia_rm::fake_rm::{FAILED_MULTIPROCESSOR, FakeRm};
use vendor_backends::conformance::{lifecycle, readable};
use vendor_backends::nvidia::NvidiaClient;

use super::programs::{channel, of_program, open};
use super::{DRIVER, gpu, ram};

/// Traps, as in the mask and as a notifier.
const TRAPS: u32 = 1 << TRAP;
const TRAP: u32 = 1;

/// Offset of the state of the failed multiprocessor, among those from number 100.
const FAILED: usize = (FAILED_MULTIPROCESSOR as usize - 100) * 48;

fn announced(client: &mut NvidiaClient) -> Vec<Exception> {
    assert!(readable(&client.event(), Duration::from_secs(20)));
    assert_eq!(client.take_pending(), Pending::CHANNEL_ERROR);
    client.take_exceptions()
}

#[test]
fn an_exception_is_announced_to_the_channel_that_has_it() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    let memory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let space = client.create_space().unwrap();
    let mut of_group = |index, group| channel(&mut client, import, index, (space, group));
    let [watched, beside, other] = [of_group(0, 1), of_group(1, 1), of_group(2, 2)];
    assert!(!rm.raise_exception(watched.token.0, TRAP), "nobody watches");

    client.watch_exceptions(watched.id, TRAPS).unwrap();
    client.watch_exceptions(other.id, u32::MAX).unwrap();
    for _ in 0..3 {
        assert!(rm.raise_exception(watched.token.0, TRAP));
    }
    let expected = Exception { channel: watched.id, notifier: TRAP };
    assert_eq!(announced(&mut client), [expected]);
    assert_eq!(client.take_exceptions(), []);
    assert!(!rm.raise_exception(watched.token.0, 3), "it is not in the mask");
    assert!(!rm.raise_exception(other.token.0, 2), "the driver ends the group by itself");
    assert!(rm.raise_exception(other.token.0, 3));
    assert_eq!(announced(&mut client), [Exception { channel: other.id, notifier: 3 }]);

    // All channels of the group have the debugger.
    for ChannelHandle { id, .. } in [watched, beside] {
        let errors = client.error_states(id, 100, 32).unwrap();
        assert_eq!((errors.states.len(), errors.fault), (32 * 48, None));
        assert_eq!(errors.states[FAILED + 4], 0x10);
        let told = errors.states.iter().filter(|byte| **byte != 0).count();
        assert_eq!(told, 1, "addresses stay unknown");
        client.clear_error_states(id, 132).unwrap();
    }
    rm.fault(watched.token.0, 31);
    assert!(client.error_states(watched.id, 0, 100).unwrap().fault.is_some());
    drop(client);
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn exceptions_need_kernels_and_a_watch() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    let memory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let space = client.create_space().unwrap();
    let copies = of_program(import, 0, EngineKind::Copy, (space, 1));
    let copies = client.create_channel(&copies).unwrap();
    assert!(matches!(client.watch_exceptions(copies.id, TRAPS), Err(GpuError::Invalid(_))));
    let kernels = channel(&mut client, import, 1, (space, 2));
    assert!(matches!(client.error_states(kernels.id, 0, 1), Err(GpuError::Unsupported(_))));
    client.watch_exceptions(kernels.id, TRAPS).unwrap();
    for (first, count) in [(0, 101), (1025, 1), (u32::MAX, u32::MAX)] {
        let read = client.error_states(kernels.id, first, count);
        assert!(matches!(read, Err(GpuError::OutOfRange(_))), "{first} {count}");
    }
    assert!(client.clear_error_states(kernels.id, u32::MAX).is_err());
    let missing = ChannelId(u32::MAX);
    assert!(client.watch_exceptions(missing, TRAPS).is_err());
    assert!(client.error_states(missing, 0, 1).is_err());
    client.destroy_channel(kernels.id).unwrap();
    assert!(client.error_states(kernels.id, 0, 1).is_err());
    assert_eq!(rm.violations(), Vec::<String>::new());
}

#[test]
fn a_program_that_resets_its_channel_gets_the_error_on_the_whole_group() {
    let rm = FakeRm::new(DRIVER);
    let mut gpu = gpu(&rm);
    let mut client = open(&rm, &mut gpu);
    let memory = ram(MIB);
    let import = lifecycle::import(&mut client, &memory).unwrap();
    let space = client.create_space().unwrap();
    let mut of_group = |index, group| channel(&mut client, import, index, (space, group)).id;
    let [first, second, other] = [of_group(0, 1), of_group(1, 1), of_group(2, 2)];
    client.reset_channel(first).unwrap();
    assert!(readable(&client.event(), Duration::from_secs(20)));
    assert!(client.take_pending().contains(Pending::CHANNEL_ERROR));
    let errors = [first, second, other].map(|id| client.query_channel(id).unwrap().error);
    assert_eq!(errors, [notifier::RESET_CHANNEL, notifier::RESET_CHANNEL, 0]);
    // Once is enough, and a channel that has ended has nothing to reset.
    client.reset_channel(second).unwrap();
    assert_eq!(client.usage().unwrap().faults, 2);
    client.destroy_channel(first).unwrap();
    assert!(matches!(client.reset_channel(first), Err(GpuError::NotFound(_))));
    drop(client);
    assert_eq!(rm.violations(), Vec::<String>::new());
}
