//! The guest runtime as a client inside the host, without a VM.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use mdev_core::gpu::EngineKind;
use mdev_core::units::{KIB, MIB};
use system_tests::Vgpud;
use system_tests::ram::Ram;
use system_tests::vfio_user_guest::VfioUserGuest;
use vgpu_guest::GuestError;
use vgpu_guest::channel::Channel;
use vgpu_guest::copy::linear;
use vgpu_guest::device::Device;
use vgpu_guest::fence::WaitPolicy;
use vgpu_guest::memory::Buffer;
use vgpu_guest::pushbuffer::Methods;

use super::{LIMIT, LONG};

/// Length of each of the two buffers.
pub const BYTES: u64 = 8 * KIB;

/// A guest with a channel and two buffers of two pages.
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
        let platform = VfioUserGuest::attach(&vgpud.vfio_socket(uuid), ram).unwrap();
        let device = Device::open(Box::new(platform))?;
        let mut channel = Channel::new(&device, EngineKind::Copy)?;
        // Polled rarely: in virtual time a poll costs more than the wait.
        let nap = Duration::from_millis(20);
        channel.set_wait_policy(WaitPolicy { limit: LIMIT, nap, ..WaitPolicy::default() });
        let [from, to] = [0, 1].map(|_| Buffer::guest(&device, BYTES).unwrap());
        Ok(Self { device, channel, from, to })
    }

    /// Copies 8 KiB with the device.
    pub fn copy(&mut self, word: u32) -> Result<(), GuestError> {
        self.copy_often(word, 1)
    }

    /// Copies 8 KiB `times` times, in one submission.
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

    /// Copies `bytes` bytes in one copy.
    pub fn copy_for(&mut self, bytes: u64) -> Result<(), GuestError> {
        let [from, to] = [0, 1].map(|_| Buffer::guest(&self.device, bytes));
        let (from, to) = (from?, to?);
        let mut methods = Methods::new();
        linear(&mut methods, to.va(), from.va(), bytes);
        self.channel.run(&methods)
    }

    /// Copies with a full queue until `stop` is set.
    pub fn keep_busy(&mut self, stop: &AtomicBool) {
        let nap = Duration::from_millis(50);
        self.channel.set_wait_policy(WaitPolicy { limit: LONG, nap, ..WaitPolicy::default() });
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
