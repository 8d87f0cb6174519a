//! Attacks by a guest while others measure their throughput.

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

/// Time limit of a fault's error.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for garbage, which may be valid by chance.
const GARBAGE_TIMEOUT: Duration = Duration::from_millis(300);

/// Number of CPUs that ring doorbells: two saturate the GPU.
const FLOODS: usize = 4;

/// Attack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum Trouble {
    /// A copy to an unmapped address.
    Fault,
    /// A kernel that never ends.
    Hang,
    /// Repeated faults, each on a new channel.
    FaultStorm,
    /// Doorbells with an empty queue.
    DoorbellFlood,
    /// Garbage in the ring.
    GarbageRing,
    /// A killed worker.
    Killed,
}

impl Trouble {
    /// All attacks.
    pub const ALL: [Self; 6] = [
        Self::Fault,
        Self::Hang,
        Self::FaultStorm,
        Self::DoorbellFlood,
        Self::GarbageRing,
        Self::Killed,
    ];

    /// Returns the description.
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

/// Result for the attacker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Reported {
    /// Time until the (first) error was reported, in milliseconds.
    pub after_ms: f64,
    /// The error's code.
    pub code: u32,
    /// Number of repetitions.
    pub rounds: u64,
}

/// Attacks for this time; an attack that ends by itself runs once.
pub fn make(device: &Device, trouble: Trouble, time: Duration) -> Result<Reported> {
    let start = Instant::now();
    match trouble {
        Trouble::Fault => fault(device),
        Trouble::Hang => {
            let mut channel = Channel::new(device, EngineKind::Compute)?;
            let endless = spin(device, u32::MAX)?;
            let mut methods = Methods::new();
            endless.push(&mut methods);
            channel.submit(&methods)?;
            error_of(&channel, TIMEOUT)
        }
        Trouble::FaultStorm => {
            let mut told = Reported::default();
            while start.elapsed() < time {
                // After many faults a device refuses new channels for a while.
                match fault(device) {
                    Ok(one) => told = Reported { rounds: told.rounds + 1, ..one },
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
            // The guest may write to its doorbell page even if other vGPUs' doorbells trap.
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
            Ok(Reported { rounds, ..Reported::default() })
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
                let _ = error_of(&channel, GARBAGE_TIMEOUT);
                rounds += 1;
            }
            Ok(Reported { rounds, ..Reported::default() })
        }
        Trouble::Killed => bail!("A tenant cannot kill its worker"),
    }
}

fn fault(device: &Device) -> Result<Reported> {
    let mut channel = Channel::new(device, EngineKind::Copy)?;
    let nowhere = device.info().va_end - (1 << 20);
    let mut methods = Methods::new();
    copy::linear(&mut methods, nowhere, nowhere, 4096);
    channel.submit(&methods)?;
    error_of(&channel, TIMEOUT)
}

/// Waits until the channel's error is reported.
fn error_of(channel: &Channel, timeout: Duration) -> Result<Reported> {
    let start = Instant::now();
    while start.elapsed() < timeout {
        match channel.check() {
            Ok(()) => std::thread::sleep(Duration::from_millis(1)),
            Err(GuestError::Channel { code, .. }) => {
                let after_ms = start.elapsed().as_secs_f64() * 1e3;
                return Ok(Reported { after_ms, code, rounds: 1 });
            }
            Err(other) => return Err(other.into()),
        }
    }
    bail!("No error within {} ms", timeout.as_millis())
}
