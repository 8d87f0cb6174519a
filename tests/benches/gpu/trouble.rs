//! The worst that a guest can do, while others measure what is left of the GPU.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::ValueEnum;
use mdev_core::abi::control::reg;
use mdev_core::gpu::EngineKind;
use serde::{Deserialize, Serialize};
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::copy;
use vgpu_guest::device::Device;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;

use crate::solo::spin;

/// How long a fault may take until its guest is told.
const PATIENCE: Duration = Duration::from_secs(10);
/// The same for garbage, which may happen to mean nothing at all.
const GARBAGE_PATIENCE: Duration = Duration::from_millis(300);

/// How many of its processors ring: two are enough for all that the GPU takes.
const FLOODS: usize = 4;

/// What a guest does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum Trouble {
    /// One copy to an address that is not mapped.
    Fault,
    /// One kernel that never ends.
    Hang,
    /// Faults, makes another channel, and faults again.
    FaultStorm,
    /// Rings its doorbell with nothing queued.
    DoorbellFlood,
    /// Writes nonsense to its ring.
    GarbageRing,
    /// Its worker is killed.
    Killed,
}

impl Trouble {
    /// Every kind.
    pub const ALL: [Self; 6] = [
        Self::Fault,
        Self::Hang,
        Self::FaultStorm,
        Self::DoorbellFlood,
        Self::GarbageRing,
        Self::Killed,
    ];

    /// For people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fault => "a fault",
            Self::Hang => "an endless kernel",
            Self::FaultStorm => "a storm of faults",
            Self::DoorbellFlood => "a flood of doorbells",
            Self::GarbageRing => "a ring full of garbage",
            Self::Killed => "a worker killed -9",
        }
    }
}

/// How it went for whoever made it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Told {
    /// How long until it was told of its (first) error, in milliseconds.
    pub after_ms: f64,
    /// The error's code.
    pub code: u32,
    /// How often it did it.
    pub rounds: u64,
}

/// Makes trouble for so long; what ends by itself is made once.
pub fn make(device: &Device, trouble: Trouble, time: Duration) -> Result<Told> {
    let start = Instant::now();
    match trouble {
        Trouble::Fault => fault(device),
        Trouble::Hang => {
            let mut channel = Channel::new(device, EngineKind::Compute)?;
            let endless = spin(device, u32::MAX)?;
            let mut methods = Methods::new();
            endless.push(&mut methods);
            channel.submit(&methods)?;
            error_of(&channel, PATIENCE)
        }
        Trouble::FaultStorm => {
            let mut told = Told::default();
            while start.elapsed() < time {
                // A device that has had enough of it refuses new channels for a while.
                match fault(device) {
                    Ok(one) => told = Told { rounds: told.rounds + 1, ..one },
                    Err(_) => std::thread::sleep(Duration::from_millis(1)),
                }
            }
            Ok(told)
        }
        Trouble::DoorbellFlood => {
            let channel = Channel::new(device, EngineKind::Compute)?;
            let token = channel.name().token;
            let flood = |_| {
                let mut rounds = 0;
                while start.elapsed() < time {
                    (0..64).for_each(|_| device.platform().ring(token));
                    rounds += 64;
                }
                rounds
            };
            // It may write to what it writes where others' doorbells are trapped, too.
            let wake = || {
                while start.elapsed() < time {
                    device.platform().write32(reg::WAKE, token);
                }
            };
            let rounds = std::thread::scope(|scope| {
                scope.spawn(wake);
                let floods: Vec<_> = (0..FLOODS).map(|n| scope.spawn(move || flood(n))).collect();
                floods.into_iter().map(|one| one.join().unwrap_or_default()).sum()
            });
            Ok(Told { rounds, ..Told::default() })
        }
        Trouble::GarbageRing => {
            let (mut rounds, mut state) = (0, 1u64);
            while start.elapsed() < time {
                let Ok(mut channel) = Channel::new(device, EngineKind::Compute) else {
                    std::thread::sleep(Duration::from_millis(1));
                    continue;
                };
                for _ in 0..32 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    channel.submit_raw(state);
                }
                let _ = error_of(&channel, GARBAGE_PATIENCE);
                rounds += 1;
            }
            Ok(Told { rounds, ..Told::default() })
        }
        Trouble::Killed => bail!("Nobody kills itself"),
    }
}

fn fault(device: &Device) -> Result<Told> {
    let mut channel = Channel::new(device, EngineKind::Copy)?;
    let nowhere = device.info().va_end - (1 << 20);
    let mut methods = Methods::new();
    copy::linear(&mut methods, nowhere, nowhere, 4096);
    channel.submit(&methods)?;
    error_of(&channel, PATIENCE)
}

/// Waits until the channel's guest is told that it is dead.
fn error_of(channel: &Channel, patience: Duration) -> Result<Told> {
    let start = Instant::now();
    while start.elapsed() < patience {
        match channel.check() {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            Err(GuestError::Channel { code, .. }) => {
                let after_ms = start.elapsed().as_secs_f64() * 1e3;
                return Ok(Told { after_ms, code, rounds: 1 });
            }
            Err(other) => return Err(other.into()),
        }
    }
    bail!("Nobody has told the guest within {} ms", patience.as_millis())
}
