//! `y = a * x + y`.

use mdev_core::abi::program::{Kernel, Saxpy as Parameters};

use super::{Work, compare};
use crate::GuestError;
use crate::compute::{Launch, Shape};
use crate::device::Device;
use crate::memory::{Buffer, Home};
use crate::pushbuffer::Methods;

const A: f32 = 2.0;

/// One pass over `n` elements.
#[derive(Debug)]
pub struct Saxpy {
    x: Buffer,
    y: Buffer,
    n: u32,
    launch: Launch,
}

fn x(index: usize) -> f32 {
    (index % 1021) as f32
}

fn y(index: usize) -> f32 {
    (index % 509) as f32
}

impl Saxpy {
    /// Allocates two vectors.
    pub fn new(device: &Device, home: Home, n: u32) -> Result<Self, GuestError> {
        let [x, y] = [(); 2].map(|()| Buffer::new(device, home, u64::from(n) * 4));
        let (x, y) = (x?, y?);
        let parameters = Parameters { x: x.va(), y: y.va(), a: A, n };
        let launch = Launch::new(device, Kernel::Saxpy, Shape::line(n), &parameters)?;
        Ok(Self { x, y, n, launch })
    }
}

impl Work for Saxpy {
    fn name(&self) -> &'static str {
        "saxpy"
    }

    fn amount(&self) -> (f64, &'static str) {
        (f64::from(self.n), "elements")
    }

    fn prepare(&self) {
        self.x.store(0, &(0..self.n as usize).map(x).collect::<Vec<_>>());
        self.y.store(0, &(0..self.n as usize).map(y).collect::<Vec<_>>());
    }

    fn push(&self, methods: &mut Methods) {
        self.launch.push(methods);
    }

    fn verify(&self) -> Result<u64, GuestError> {
        compare(self.name(), &self.y.load::<f32>(0, self.n as usize), |index| {
            A * x(index) + y(index)
        })
    }
}
