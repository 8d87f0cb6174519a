//! `c = a + b`.

use mdev_core::abi::program::{Kernel, VectorAdd as Parameters};

use super::{Work, compare};
use crate::GuestError;
use crate::compute::{Launch, Shape};
use crate::device::Device;
use crate::memory::{Buffer, Home};
use crate::pushbuffer::Methods;

/// One addition of `n` elements.
#[derive(Debug)]
pub struct VectorAdd {
    a: Buffer,
    b: Buffer,
    c: Buffer,
    n: u32,
    launch: Launch,
}

fn a(index: usize) -> f32 {
    (index % 4093) as f32
}

fn b(index: usize) -> f32 {
    (index % 911) as f32 * 8.0
}

impl VectorAdd {
    /// Allocates three vectors.
    pub fn new(device: &Device, home: Home, n: u32) -> Result<Self, GuestError> {
        let [a, b, c] = [(); 3].map(|()| Buffer::new(device, home, u64::from(n) * 4));
        let (a, b, c) = (a?, b?, c?);
        let parameters = Parameters { a: a.va(), b: b.va(), c: c.va(), n, reserved: 0 };
        let launch = Launch::new(device, Kernel::VectorAdd, Shape::line(n), &parameters)?;
        Ok(Self { a, b, c, n, launch })
    }

    /// Overwrites the result and keeps the inputs.
    pub fn spoil(&self) {
        self.c.window().fill(0xff);
    }
}

impl Work for VectorAdd {
    fn name(&self) -> &'static str {
        "vadd"
    }

    fn amount(&self) -> (f64, &'static str) {
        (f64::from(self.n), "elements")
    }

    fn prepare(&self) {
        self.a.store(0, &(0..self.n as usize).map(a).collect::<Vec<_>>());
        self.b.store(0, &(0..self.n as usize).map(b).collect::<Vec<_>>());
        self.spoil();
    }

    fn push(&self, methods: &mut Methods) {
        self.launch.push(methods);
    }

    fn verify(&self) -> Result<u64, GuestError> {
        compare(self.name(), &self.c.load::<f32>(0, self.n as usize), |index| a(index) + b(index))
    }
}
