//! Any changes of a saved state: it is refused, or the channels do what a guest's can do. Nothing
//! is left after a reset.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use mdev_core::gpu::{Client, EngineKind, GpuError, SavedChannel, SavedClient, Saving};
use mdev_core::ids::{ChannelId, GpuVa, SpaceId};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::guest::Guest;
use super::{Host, busy, save};

/// Change of a saved client. Numbers select a channel, a place in its state, or a value.
#[derive(Clone, Debug)]
enum Change {
    Byte(usize, usize, u8),
    Cut(usize, usize),
    Insert(usize, usize, u8),
    Id(usize, u32),
    Ring(usize, u64),
    Entries(usize, u32),
    Engine(usize),
    Group(usize, u32),
    Space(usize, u32),
    Vector(usize, u32),
    Again(usize),
    Mapping(usize, u64),
    Remove(usize),
    MadeSpace(u32),
}

fn change() -> impl Strategy<Value = Change> {
    let number = || any::<usize>();
    let edge = || prop_oneof![0..200_u32, Just(u32::MAX), Just(1 << 31), any::<u32>()];
    let offset =
        || prop_oneof![Just(8_u64), Just(4096), Just(1 << 20), Just(1 << 63), any::<u64>()];
    prop_oneof![
        6 => (number(), number(), any::<u8>()).prop_map(|(c, at, to)| Change::Byte(c, at, to)),
        1 => (number(), number()).prop_map(|(c, at)| Change::Cut(c, at)),
        1 => (number(), number(), any::<u8>()).prop_map(|(c, at, to)| Change::Insert(c, at, to)),
        1 => (number(), edge()).prop_map(|(c, id)| Change::Id(c, id)),
        1 => (number(), offset()).prop_map(|(c, by)| Change::Ring(c, by)),
        1 => (number(), edge()).prop_map(|(c, to)| Change::Entries(c, to)),
        1 => number().prop_map(Change::Engine),
        1 => (number(), edge()).prop_map(|(c, to)| Change::Group(c, to)),
        1 => (number(), edge()).prop_map(|(c, to)| Change::Space(c, to)),
        1 => (number(), edge()).prop_map(|(c, to)| Change::Vector(c, to)),
        1 => number().prop_map(Change::Again),
        1 => (number(), offset()).prop_map(|(m, by)| Change::Mapping(m, by)),
        1 => number().prop_map(Change::Remove),
        1 => edge().prop_map(Change::MadeSpace),
    ]
}

/// Returns the channel that a number selects: no change removes channels.
fn channel(saved: &mut SavedClient, number: usize) -> &mut SavedChannel {
    let channels = saved.channels.len();
    &mut saved.channels[number % channels]
}

fn apply(saved: &mut SavedClient, change: &Change) {
    let mappings = saved.mappings.len().max(1);
    match *change {
        Change::Byte(number, at, to) => {
            let channel = channel(saved, number);
            let len = channel.state.len().max(1);
            if let Some(byte) = channel.state.get_mut(at % len) {
                *byte = to;
            }
        }
        Change::Cut(number, at) => {
            let channel = channel(saved, number);
            channel.state.truncate(at % (channel.state.len() + 1));
        }
        Change::Insert(number, at, byte) => {
            let channel = channel(saved, number);
            let at = at % (channel.state.len() + 1);
            channel.state.insert(at, byte);
        }
        Change::Id(number, id) => channel(saved, number).id = ChannelId(id),
        Change::Ring(number, by) => {
            let ring = &mut channel(saved, number).spec.gpfifo;
            *ring = GpuVa(ring.0.wrapping_add(by));
        }
        Change::Entries(number, to) => channel(saved, number).spec.gpfifo_entries = to,
        Change::Engine(number) => {
            let engine = &mut channel(saved, number).spec.engine;
            let copies = *engine == EngineKind::Copy;
            *engine = if copies { EngineKind::Compute } else { EngineKind::Copy };
        }
        Change::Group(number, to) => channel(saved, number).spec.group = Some(to),
        Change::Space(number, to) => channel(saved, number).spec.space = SpaceId(to),
        Change::Vector(number, to) => channel(saved, number).spec.vector = to,
        Change::Again(number) => {
            let again = channel(saved, number).clone();
            saved.channels.push(again);
        }
        Change::Mapping(number, by) => {
            if let Some(mapping) = saved.mappings.get_mut(number % mappings) {
                mapping.va = GpuVa(mapping.va.0.wrapping_add(by));
            }
        }
        Change::Remove(number) if !saved.mappings.is_empty() => {
            saved.mappings.remove(number % mappings);
        }
        Change::Remove(_) => {}
        Change::MadeSpace(space) => saved.spaces.push(SpaceId(space)),
    }
}

/// Makes the checks of the device model, which are before those of the client.
fn checked(host: &Host, saved: &SavedClient) -> Result<(), GpuError> {
    let capabilities = host.client.gpu().capabilities;
    for channel in &saved.channels {
        channel.spec.check(capabilities)?;
    }
    Ok(())
}

/// Restores a state and lets it continue. Returns whether it was accepted.
fn restore(host: &mut Host, guest: &Guest, saved: &SavedClient) -> Result<bool, GpuError> {
    let restored = checked(host, saved).and_then(|()| guest.restore(&mut host.client, saved));
    if restored.is_ok() {
        host.client.resume()?;
    }
    host.client.reset()?;
    Ok(restored.is_ok())
}

#[test]
fn any_state_is_refused_or_is_one_of_a_guest() {
    let (mut source, guest) = busy();
    std::thread::sleep(Duration::from_millis(3));
    let (saved, _) = save(&mut source);
    drop(source);
    let host = RefCell::new(Host::new());
    let (accepted, refused) = (Cell::new(0), Cell::new(0));
    let changes = prop::collection::vec(change(), 1..4);
    let result = TestRunner::new(Config::with_cases(64)).run(&changes, |changes| {
        let mut changed = saved.clone();
        for change in &changes {
            apply(&mut changed, change);
        }
        let host = &mut *host.borrow_mut();
        let restored = restore(host, &guest, &changed);
        let restored = restored.map_err(|error| TestCaseError::fail(error.to_string()))?;
        let count = if restored { &accepted } else { &refused };
        count.set(count.get() + 1);
        prop_assert_eq!(host.client.usage().unwrap().channels, 0);
        prop_assert!(host.rm.violations().is_empty(), "{:?}", host.rm.violations());
        Ok(())
    });
    result.unwrap();
    println!("{} accepted, {} refused", accepted.get(), refused.get());
    assert!(accepted.get() > 0 && refused.get() > 0);
    // The state itself is still restored.
    let mut host = host.into_inner();
    guest.restore(&mut host.client, &saved).unwrap();
    host.client.resume().unwrap();
    guest.wait();
    host.check();
}
