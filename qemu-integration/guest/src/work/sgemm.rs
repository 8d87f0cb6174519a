//! `c = a * b` of square matrices.

use mdev_core::abi::program::{Kernel, Sgemm as Parameters};

use super::{Work, compare};
use crate::GuestError;
use crate::channel::Channel;
use crate::compute::{Launch, Shape};
use crate::copy;
use crate::device::Device;
use crate::memory::{Buffer, Home};
use crate::pushbuffer::Methods;

/// Limit of checked rows, because the CPU is slow for large products.
const ROWS: u32 = 128;

/// One product of `n` by `n`.
#[derive(Debug)]
pub struct Sgemm {
    a: Buffer,
    b: Buffer,
    c: Buffer,
    /// Matrices in video memory, if the GPU does not work on guest RAM.
    resident: Option<[Buffer; 3]>,
    n: u32,
    launch: Launch,
}

fn launch(device: &Device, [a, b, c]: [&Buffer; 3], n: u32) -> Result<Launch, GuestError> {
    let parameters = Parameters { a: a.va(), b: b.va(), c: c.va(), n, reserved: 0 };
    Launch::new(device, Kernel::Sgemm, Shape::plane(n, n), &parameters)
}

fn a(row: u32, column: u32) -> f32 {
    ((row * 3 + column * 5) % 8) as f32
}

fn b(row: u32, column: u32) -> f32 {
    ((row * 7 + column) % 9) as f32 - 4.0
}

impl Sgemm {
    /// Largest dimension for which every sum is exact.
    pub const MAX: u32 = 8192;

    /// Allocates three matrices.
    pub fn new(device: &Device, home: Home, n: u32) -> Result<Self, GuestError> {
        if !(1..=Self::MAX).contains(&n) {
            return Err(GuestError::Invalid(format!(
                "a product of dimension {n}: use 1 to {}",
                Self::MAX
            )));
        }
        let bytes = u64::from(n) * u64::from(n) * 4;
        let [a, b, c] = [(); 3].map(|()| Buffer::new(device, home, bytes));
        let (a, b, c) = (a?, b?, c?);
        let launch = launch(device, [&a, &b, &c], n)?;
        Ok(Self { a, b, c, resident: None, n, launch })
    }

    /// Allocates three matrices in video memory, which the CPU need not access; see [`Self::load`]
    /// and [`Self::unload`].
    pub fn resident(device: &Device, n: u32) -> Result<Self, GuestError> {
        let mut product = Self::new(device, Home::Guest, n)?;
        let bytes = product.a.len();
        let [a, b, c] = [(); 3].map(|()| Buffer::video(device, bytes));
        let (a, b, c) = (a?, b?, c?);
        product.launch = launch(device, [&a, &b, &c], n)?.reside(device, Shape::plane(n, n))?;
        product.resident = Some([a, b, c]);
        Ok(product)
    }

    /// Copies the inputs of [`Work::prepare`] to video memory.
    pub fn load(&self, channel: &mut Channel) -> Result<(), GuestError> {
        let mut methods = Methods::new();
        for (to, from) in self.resident.iter().flatten().zip([&self.a, &self.b, &self.c]) {
            copy::linear(&mut methods, to.va(), from.va(), from.len());
        }
        channel.run(&methods)
    }

    /// Copies the result to the buffer that [`Work::verify`] reads.
    pub fn unload(&self, channel: &mut Channel) -> Result<(), GuestError> {
        let mut methods = Methods::new();
        if let Some([_, _, from]) = &self.resident {
            copy::linear(&mut methods, self.c.va(), from.va(), from.len());
        }
        channel.run(&methods)
    }

    /// Overwrites the result and keeps the inputs.
    pub fn spoil(&self) {
        self.c.window().fill(0xff);
    }
}

impl Work for Sgemm {
    fn name(&self) -> &'static str {
        "sgemm"
    }

    fn amount(&self) -> (f64, &'static str) {
        (2.0 * f64::from(self.n).powi(3), "flops")
    }

    fn prepare(&self) {
        for (buffer, value) in [(&self.a, a as fn(u32, u32) -> f32), (&self.b, b)] {
            for row in 0..self.n {
                let values: Vec<f32> = (0..self.n).map(|column| value(row, column)).collect();
                buffer.store(u64::from(row) * u64::from(self.n) * 4, &values);
            }
        }
        self.spoil();
    }

    fn push(&self, methods: &mut Methods) {
        self.launch.push(methods);
    }

    fn verify(&self) -> Result<u64, GuestError> {
        let mut checked = 0;
        // Checks all rows of small products; of large products, rows from the first to the last.
        let steps = self.n.min(ROWS);
        for step in 0..steps {
            let row =
                (u64::from(step) * u64::from(self.n - 1) / u64::from((steps - 1).max(1))) as u32;
            let mut right = vec![0.0f32; self.n as usize];
            for k in 0..self.n {
                let factor = a(row, k);
                for (column, sum) in right.iter_mut().enumerate() {
                    *sum += factor * b(k, column as u32);
                }
            }
            let at = u64::from(row) * u64::from(self.n) * 4;
            let got: Vec<f32> = self.c.load(at, self.n as usize);
            checked += compare(&format!("sgemm, row {row}"), &got, |index| right[index])?;
        }
        Ok(checked)
    }
}
