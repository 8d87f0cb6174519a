//! `x = x!` modulo 2^32, the fixed function of QEMU's `edu` and of the software GPU.

use mdev_core::abi::program::{FixedFunction, FunctionId, Kernel};

use super::{Work, compare};
use crate::GuestError;
use crate::compute::{Launch, Shape};
use crate::device::Device;
use crate::memory::{Buffer, Home};
use crate::pushbuffer::Methods;

/// Id of the function.
pub const FUNCTION: FunctionId = FunctionId(6);

/// Factorials of `n` words.
#[derive(Debug)]
pub struct Factorial {
    x: Buffer,
    n: u32,
    launch: Launch,
}

/// Returns input number `index`. Inputs are small and differ; every 50th input overflows to the
/// result 0.
fn x(index: usize) -> u32 {
    if index % 50 == 49 { u32::MAX - index as u32 } else { (index % 37) as u32 }
}

/// Returns `n!` modulo 2^32, which is 0 from 34! on.
fn factorial(n: u32) -> u32 {
    if n < 34 { (1..=n).fold(1, u32::wrapping_mul) } else { 0 }
}

impl Factorial {
    /// Allocates the vector.
    pub fn new(device: &Device, home: Home, n: u32) -> Result<Self, GuestError> {
        let x = Buffer::new(device, home, u64::from(n) * 4)?;
        let parameters = FixedFunction { x: x.va(), n, reserved: 0 };
        let launch =
            Launch::new(device, Kernel::FixedFunction(FUNCTION), Shape::line(n), &parameters)?;
        Ok(Self { x, n, launch })
    }
}

impl Work for Factorial {
    fn name(&self) -> &'static str {
        "factorial"
    }

    fn amount(&self) -> (f64, &'static str) {
        (f64::from(self.n), "elements")
    }

    fn prepare(&self) {
        self.x.store(0, &(0..self.n as usize).map(x).collect::<Vec<_>>());
    }

    fn push(&self, methods: &mut Methods) {
        self.launch.push(methods);
    }

    fn verify(&self) -> Result<u64, GuestError> {
        let words: Vec<u32> = self.x.load(0, self.n as usize);
        compare(self.name(), &words, |index| factorial(x(index)))
    }
}
