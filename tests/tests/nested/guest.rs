//! The guest runtime as a client inside the host: no VM, but all that one's driver does.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mdev_core::gpu::EngineKind;
use mdev_core::units::{KIB, MIB};
use system_tests::Vgpud;
use system_tests::ram::Ram;
use system_tests::stranger::Stranger;
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::copy::linear;
use vgpu_guest::device::Device;
use vgpu_guest::fence::Patience;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;

use super::{LIMIT, LONG};

/// Bytes of each of its two buffers.
pub const BYTES: u64 = 8 * KIB;

/// One guest with a channel, and two pages of its own, twice.
pub struct Guest {
    pub device: Device,
    pub channel: Channel,
    from: Buffer,
    to: Buffer,
}

impl Guest {
    pub fn attach(vgpud: &Vgpud, uuid: &str) -> Self {
        Self::try_attach(vgpud, uuid).unwrap()
    }

    pub fn try_attach(vgpud: &Vgpud, uuid: &str) -> Result<Self, GuestError> {
        let ram = Ram::new(4 * MIB, 64 * KIB).unwrap();
        let platform = Stranger::attach(&vgpud.vfio_socket(uuid), ram).unwrap();
        let device = Device::open(Box::new(platform))?;
        let mut channel = Channel::new(&device, EngineKind::Copy)?;
        // Seldom looked at: where time jumps, each look costs more than the wait.
        let nap = Duration::from_millis(20);
        channel.set_patience(Patience { limit: LIMIT, nap, ..Patience::default() });
        let [from, to] = [0, 1].map(|_| Buffer::guest(&device, BYTES).unwrap());
        Ok(Self { device, channel, from, to })
    }

    /// Copies 8 KiB by the device.
    pub fn copy(&mut self, word: u32) -> Result<(), GuestError> {
        self.copy_often(word, 1)
    }

    /// The same several times, in one submission of one copy after the other.
    pub fn copy_often(&mut self, word: u32, times: usize) -> Result<(), GuestError> {
        self.from.store(0, &[word; BYTES as usize / 4]);
        let methods = self.copies(times);
        self.channel.run(&methods)?;
        assert_eq!(self.to.load::<u32>(0, BYTES as usize / 4), [word; BYTES as usize / 4]);
        Ok(())
    }

    fn copies(&self, times: usize) -> Methods {
        let mut methods = Methods::new();
        for _ in 0..times {
            linear(&mut methods, self.to.va(), self.from.va(), BYTES);
        }
        methods
    }

    /// One copy, of as many bytes.
    pub fn copy_for(&mut self, bytes: u64) -> Result<(), GuestError> {
        let [from, to] = [0, 1].map(|_| Buffer::guest(&self.device, bytes));
        let (from, to) = (from?, to?);
        let mut methods = Methods::new();
        linear(&mut methods, to.va(), from.va(), bytes);
        self.channel.run(&methods)
    }

    /// Copies, with more queued than can be done, until told otherwise.
    pub fn keep_busy(&mut self, stop: &AtomicBool) {
        let nap = Duration::from_millis(50);
        self.channel.set_patience(Patience { limit: LONG, nap, ..Patience::default() });
        let methods = self.copies(16);
        let mut last = self.channel.submit(&methods).unwrap();
        while !stop.load(Ordering::SeqCst) {
            let next = self.channel.submit(&methods).unwrap();
            self.channel.wait(last).unwrap();
            last = next;
        }
        self.channel.wait(last).unwrap();
    }
}
