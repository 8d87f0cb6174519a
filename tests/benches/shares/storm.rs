//! Attacks by a guest.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use mdev_core::abi::control::reg;
use mdev_core::gpu::EngineKind;
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;
use vgpu_guest::work::spin::Spin;

/// Video memory that is mapped and unmapped.
const BYTES: u64 = 1 << 20;

/// Attack.
#[derive(Clone, Copy, Debug)]
pub enum Attack {
    /// A kernel that never ends.
    Endless,
    /// Doorbells and trapped wake-ups.
    Doorbells,
    /// Mailbox requests.
    Mailbox,
    /// Mappings and unmappings.
    Maps,
}

impl Attack {
    /// All attacks.
    pub const ALL: [Self; 4] = [Self::Endless, Self::Doorbells, Self::Mailbox, Self::Maps];

    /// Returns the name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Endless => "an endless kernel",
            Self::Doorbells => "a storm of doorbells and wake-ups",
            Self::Mailbox => "a storm of mailbox requests",
            Self::Maps => "a storm of maps and unmaps",
        }
    }

    fn run(self, device: &Device, stop: &AtomicBool) -> Result<()> {
        let mut channel = Channel::new(device, EngineKind::Compute)?;
        let (name, mut methods) = (channel.name(), Methods::new());
        let spin = Spin::new(device, u32::MAX)?;
        spin.push(&mut methods);
        if matches!(self, Self::Endless) {
            channel.submit(&methods)?;
        }
        let offset = device.take_vram(BYTES)?;
        while !stop.load(Ordering::Relaxed) {
            match self {
                Self::Endless => thread::sleep(Duration::from_millis(10)),
                Self::Doorbells => {
                    device.platform().ring(name.token);
                    device.platform().write32(reg::WAKE, name.token);
                }
                Self::Mailbox => drop(device.query_channel(name.channel)?),
                Self::Maps => {
                    let va = device.map_vram(offset, BYTES)?;
                    device.unmap(va, BYTES)?;
                }
            }
        }
        device.give_vram(offset, BYTES);
        Ok(())
    }
}

/// A running attack, beside its vGPU's other work.
#[derive(Debug)]
pub struct Storm {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<()>>,
}

impl Storm {
    /// Starts an attack.
    pub fn start(device: &Device, attack: Attack) -> Result<Self> {
        let stop = Arc::<AtomicBool>::default();
        let (device, ends) = (device.clone(), Arc::clone(&stop));
        let thread = thread::Builder::new().spawn(move || attack.run(&device, &ends));
        Ok(Self { stop, thread: thread.context("Cannot attack")? })
    }

    /// Ends the attack; an error if it failed.
    pub fn end(self) -> Result<()> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().map_err(|_| anyhow!("The attacker panicked"))?
    }
}
