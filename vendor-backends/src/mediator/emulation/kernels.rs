//! The built-in kernels. Each runs in steps of about 10 us, so that a grid can be preempted.
//!
//! A step copies data into private buffers, computes there, and copies the results back. A guest
//! that changes the data meanwhile only gets wrong results. The inner loops are in `kernel_loops`.

mod mandelbrot;
mod sgemm;
mod spin;

use mdev_core::abi::program::{
    FixedFunction, FunctionId, Mandelbrot, Saxpy, Sgemm, Spin, VectorAdd,
};
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use self::mandelbrot::MandelbrotJob;
use self::sgemm::SgemmJob;
use self::spin::SpinJob;
use super::address_space::{AddressSpace, MmuFault};
use crate::mediator::Hardware;

/// Elements of a step of a one-dimensional kernel.
const ELEMENTS: usize = 4096;

/// Size of a grid in blocks, and of a block in threads, in x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub block: [u32; 3],
}

impl Extent {
    /// Returns how many of `elements` have a thread in a dimension.
    fn bound(&self, dimension: usize, elements: u32) -> u32 {
        let threads = u64::from(self.grid[dimension]) * u64::from(self.block[dimension]);
        threads.min(u64::from(elements)) as u32
    }

    fn blocks(&self) -> u128 {
        self.grid.iter().map(|n| u128::from(*n)).product()
    }

    fn threads(&self) -> u64 {
        self.block.iter().map(|n| u64::from(*n)).product()
    }
}

/// A grid in progress.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Job {
    /// `y = a * x + y`
    Saxpy {
        /// Parameters.
        params: Saxpy,
        /// Remaining elements.
        range: Range,
    },
    /// `c = a + b`
    VectorAdd {
        /// Parameters.
        params: VectorAdd,
        /// Remaining elements.
        range: Range,
    },
    /// `c = a * b`
    Sgemm(Box<SgemmJob>),
    /// A picture of the Mandelbrot set.
    Mandelbrot(Box<MandelbrotJob>),
    /// `x = f(x)`, by a fixed function of the device.
    FixedFunction {
        /// Id of the function.
        function: FunctionId,
        /// Parameters.
        params: FixedFunction,
        /// Remaining elements.
        range: Range,
    },
    /// A grid that only takes time.
    Spin(SpinJob),
}

/// Remaining elements of a one-dimensional kernel.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Range {
    next: u32,
    end: u32,
}

impl Range {
    /// Takes at most `max` elements. Returns the offset of the first in bytes, and their number.
    fn take(&mut self, max: usize) -> (u64, usize) {
        let (from, count) = (self.next, (self.end - self.next).min(max as u32));
        self.next += count;
        (u64::from(from) * 4, count as usize)
    }

    fn is_valid(self) -> bool {
        self.next <= self.end
    }
}

impl Job {
    /// Creates a grid of [`Saxpy`].
    pub fn saxpy(params: Saxpy, extent: Extent) -> Self {
        Self::Saxpy { params, range: Range { next: 0, end: extent.bound(0, params.n) } }
    }

    /// Creates a grid of [`VectorAdd`].
    pub fn vector_add(params: VectorAdd, extent: Extent) -> Self {
        Self::VectorAdd { params, range: Range { next: 0, end: extent.bound(0, params.n) } }
    }

    /// Creates a grid of a fixed function.
    pub fn fixed_function(function: FunctionId, params: FixedFunction, extent: Extent) -> Self {
        let range = Range { next: 0, end: extent.bound(0, params.n) };
        Self::FixedFunction { function, params, range }
    }

    /// Creates a grid of [`Sgemm`].
    pub fn sgemm(params: Sgemm, extent: Extent) -> Self {
        Self::Sgemm(Box::new(SgemmJob::new(params, extent)))
    }

    /// Creates a grid of [`Mandelbrot`].
    pub fn mandelbrot(params: Mandelbrot, extent: Extent) -> Self {
        Self::Mandelbrot(Box::new(MandelbrotJob::new(params, extent)))
    }

    /// Creates a grid of [`Spin`].
    pub fn spin(params: Spin, extent: Extent) -> Self {
        Self::Spin(SpinJob::new(params, extent))
    }

    /// Returns the pointers in the parameters.
    pub fn pointers(&self) -> impl Iterator<Item = u64> + use<> {
        let (count, all) = match self {
            Self::Saxpy { params, .. } => (2, [params.x, params.y, 0]),
            Self::VectorAdd { params, .. } => (3, [params.a, params.b, params.c]),
            Self::Sgemm(sgemm) => {
                let Sgemm { a, b, c, .. } = sgemm.params;
                (3, [a, b, c])
            }
            Self::Mandelbrot(picture) => (1, [picture.params.pixels, 0, 0]),
            Self::FixedFunction { params, .. } => (1, [params.x, 0, 0]),
            Self::Spin(spin) => (1, [spin.params.out, 0, 0]),
        };
        all.into_iter().take(count)
    }

    /// Returns whether a launch on this device can lead to the state.
    pub fn is_valid(&self, hardware: &dyn Hardware) -> bool {
        match self {
            Self::Saxpy { range, .. } | Self::VectorAdd { range, .. } => range.is_valid(),
            Self::FixedFunction { function, range, .. } => {
                range.is_valid() && hardware.fixed_functions().contains(function)
            }
            Self::Sgemm(sgemm) => sgemm.is_valid(),
            Self::Mandelbrot(picture) => picture.is_valid(),
            Self::Spin(spin) => spin.is_valid(),
        }
    }

    /// Runs one step. Returns true after the last step.
    pub fn step(
        &mut self,
        space: AddressSpace<'_>,
        hardware: &dyn Hardware,
    ) -> Result<bool, MmuFault> {
        match self {
            Self::Saxpy { params, range } => {
                let (offset, count) = range.take(ELEMENTS);
                let (mut x, mut y) = ([0f32; ELEMENTS], [0f32; ELEMENTS]);
                let (x, y) = (&mut x[..count], &mut y[..count]);
                let target = params.y.wrapping_add(offset);
                space.read(params.x.wrapping_add(offset), x.as_mut_bytes())?;
                space.read(target, y.as_mut_bytes())?;
                kernel_loops::saxpy(params.a, x, y);
                space.write(target, y.as_bytes())?;
                Ok(range.next == range.end)
            }
            Self::VectorAdd { params, range } => {
                let (offset, count) = range.take(ELEMENTS);
                let (mut a, mut b) = ([0f32; ELEMENTS], [0f32; ELEMENTS]);
                let (a, b) = (&mut a[..count], &mut b[..count]);
                space.read(params.a.wrapping_add(offset), a.as_mut_bytes())?;
                space.read(params.b.wrapping_add(offset), b.as_mut_bytes())?;
                kernel_loops::saxpy(1.0, a, b);
                space.write(params.c.wrapping_add(offset), b.as_bytes())?;
                Ok(range.next == range.end)
            }
            Self::FixedFunction { function, params, range } => {
                let (offset, count) = range.take(hardware.pace().words.min(ELEMENTS));
                let mut words = [0u32; ELEMENTS];
                let (at, words) = (params.x.wrapping_add(offset), &mut words[..count]);
                space.read(at, words.as_mut_bytes())?;
                hardware.apply_fixed_function(*function, words);
                space.write(at, words.as_bytes())?;
                Ok(range.next == range.end)
            }
            Self::Sgemm(sgemm) => sgemm.step(space),
            Self::Mandelbrot(picture) => picture.step(space),
            Self::Spin(spin) => spin.step(space),
        }
    }
}
