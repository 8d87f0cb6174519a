//! The built-in programs, each cut into steps of about 10 us so that a grid can be preempted anywhere.
//!
//! Data is copied into private buffers, computed on there, and copied back: what a guest does to it meanwhile can make
//! results wrong, and nothing else. Inner loops are written for the compiler to vectorise, and are compiled a second
//! time for AVX2 ([`vector`]).

use mdev_core::abi::program::{Factorial, Mandelbrot, Saxpy, Sgemm, Spin, VectorAdd};
use zerocopy::IntoBytes;

use super::address_space::{AddressSpace, MmuFault};
use crate::mediator::Hardware;

mod vector;

/// Elements of a step of a one-dimensional kernel.
const ELEMENTS: usize = 4096;
/// Rows and columns of a tile of C, and depth of a step.
const TILE: usize = 64;
/// Pixels of a step's row, at most.
const PIXELS: usize = 64;
/// Iterations of all pixels of a step, after which the rest waits for the next one.
const LCG_STEPS: u64 = 8192;
/// Blocks of nothing to do that count as one step.
const EMPTY_BLOCKS: u64 = 256;

/// Blocks of a grid, and threads of a block, in x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of each.
    pub block: [u32; 3],
}

impl Extent {
    /// How many of `elements` there are threads for in a dimension.
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

/// A grid in work.
#[derive(Debug)]
pub enum Job {
    /// `y = a * x + y`
    Saxpy {
        /// Parameters.
        params: Saxpy,
        /// Elements, and how many of them are done.
        range: Range,
    },
    /// `c = a + b`
    VectorAdd {
        /// Parameters.
        params: VectorAdd,
        /// Elements, and how many of them are done.
        range: Range,
    },
    /// `c = a * b`
    Sgemm(Box<Product>),
    /// A picture.
    Mandelbrot(Box<Picture>),
    /// `x = x!`, by the device.
    Factorial {
        /// Parameters.
        params: Factorial,
        /// Elements, and how many of them are done.
        range: Range,
    },
    /// Time.
    Spin(Spinner),
}

/// Elements of a one-dimensional kernel.
#[derive(Clone, Copy, Debug)]
pub struct Range {
    next: u32,
    end: u32,
}

impl Range {
    /// The next of them, so many at most: the first one's offset in bytes, and how many.
    fn take(&mut self, most: usize) -> (u64, usize) {
        let (from, count) = (self.next, (self.end - self.next).min(most as u32));
        self.next += count;
        (u64::from(from) * 4, count as usize)
    }
}

impl Job {
    /// Starts a grid of [`Saxpy`].
    pub fn saxpy(params: Saxpy, extent: Extent) -> Self {
        Self::Saxpy { params, range: Range { next: 0, end: extent.bound(0, params.n) } }
    }

    /// Starts a grid of [`VectorAdd`].
    pub fn vector_add(params: VectorAdd, extent: Extent) -> Self {
        Self::VectorAdd { params, range: Range { next: 0, end: extent.bound(0, params.n) } }
    }

    /// Starts a grid of [`Factorial`].
    pub fn factorial(params: Factorial, extent: Extent) -> Self {
        Self::Factorial { params, range: Range { next: 0, end: extent.bound(0, params.n) } }
    }

    /// Starts a grid of [`Sgemm`].
    pub fn sgemm(params: Sgemm, extent: Extent) -> Self {
        let (columns, rows) = (extent.bound(0, params.n), extent.bound(1, params.n));
        Self::Sgemm(Box::new(Product {
            params,
            rows,
            columns,
            row: 0,
            column: 0,
            depth: 0,
            sum: [0.0; TILE * TILE],
        }))
    }

    /// Starts a grid of [`Mandelbrot`].
    pub fn mandelbrot(params: Mandelbrot, extent: Extent) -> Self {
        let (width, height) = (extent.bound(0, params.width), extent.bound(1, params.height));
        Self::Mandelbrot(Box::new(Picture { params, width, height, x: 0, y: 0, lanes: None }))
    }

    /// Starts a grid of [`Spin`].
    pub fn spin(params: Spin, extent: Extent) -> Self {
        Self::Spin(Spinner {
            params,
            blocks: extent.blocks(),
            steps: u64::from(params.iterations).saturating_mul(extent.threads()),
            done: 0,
            state: 1,
        })
    }

    /// Where its parameters point.
    pub fn pointers(&self) -> impl Iterator<Item = u64> + use<> {
        let (count, all) = match self {
            Self::Saxpy { params, .. } => (2, [params.x, params.y, 0]),
            Self::VectorAdd { params, .. } => (3, [params.a, params.b, params.c]),
            Self::Sgemm(product) => {
                let Sgemm { a, b, c, .. } = product.params;
                (3, [a, b, c])
            }
            Self::Mandelbrot(picture) => (1, [picture.params.pixels, 0, 0]),
            Self::Factorial { params, .. } => (1, [params.x, 0, 0]),
            Self::Spin(spinner) => (1, [spinner.params.out, 0, 0]),
        };
        all.into_iter().take(count)
    }

    /// Does one step, and says whether it was the last.
    pub fn step(
        &mut self,
        space: &AddressSpace,
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
                vector::saxpy(params.a, x, y);
                space.write(target, y.as_bytes())?;
                Ok(range.next == range.end)
            }
            Self::VectorAdd { params, range } => {
                let (offset, count) = range.take(ELEMENTS);
                let (mut a, mut b) = ([0f32; ELEMENTS], [0f32; ELEMENTS]);
                let (a, b) = (&mut a[..count], &mut b[..count]);
                space.read(params.a.wrapping_add(offset), a.as_mut_bytes())?;
                space.read(params.b.wrapping_add(offset), b.as_mut_bytes())?;
                vector::saxpy(1.0, a, b);
                space.write(params.c.wrapping_add(offset), b.as_bytes())?;
                Ok(range.next == range.end)
            }
            Self::Factorial { params, range } => {
                let (offset, count) = range.take(hardware.pace().words.min(ELEMENTS));
                let mut words = [0u32; ELEMENTS];
                let (at, words) = (params.x.wrapping_add(offset), &mut words[..count]);
                space.read(at, words.as_mut_bytes())?;
                hardware.factorials(words);
                space.write(at, words.as_bytes())?;
                Ok(range.next == range.end)
            }
            Self::Sgemm(product) => product.step(space),
            Self::Mandelbrot(picture) => picture.step(space),
            Self::Spin(spinner) => spinner.step(space),
        }
    }
}

/// A matrix product in work: one tile of C after the other, and for each one slab of A and B after the other.
#[derive(Debug)]
pub struct Product {
    params: Sgemm,
    rows: u32,
    columns: u32,
    row: u32,
    column: u32,
    depth: u32,
    sum: [f32; TILE * TILE],
}

impl Product {
    fn step(&mut self, space: &AddressSpace) -> Result<bool, MmuFault> {
        if self.rows == 0 || self.columns == 0 {
            return Ok(true);
        }
        let n = self.params.n;
        let rows = (self.rows - self.row).min(TILE as u32) as usize;
        let columns = (self.columns - self.column).min(TILE as u32) as usize;
        let depth = (n - self.depth).min(TILE as u32) as usize;
        let (mut a, mut b) = ([0f32; TILE * TILE], [0f32; TILE * TILE]);
        for row in 0..rows {
            let at = element(self.params.a, self.row + row as u32, self.depth, n);
            space.read(at, a[row * TILE..][..depth].as_mut_bytes())?;
        }
        for row in 0..depth {
            let at = element(self.params.b, self.depth + row as u32, self.column, n);
            space.read(at, b[row * TILE..][..columns].as_mut_bytes())?;
        }
        vector::multiply(&a, &b, &mut self.sum, rows, depth);
        self.depth += depth as u32;
        if self.depth < n {
            return Ok(false);
        }
        for row in 0..rows {
            let at = element(self.params.c, self.row + row as u32, self.column, n);
            space.write(at, self.sum[row * TILE..][..columns].as_bytes())?;
        }
        self.sum = [0.0; TILE * TILE];
        self.depth = 0;
        self.column += columns as u32;
        if self.column == self.columns {
            self.column = 0;
            self.row += rows as u32;
        }
        Ok(self.row == self.rows)
    }
}

/// Address of an element of a row-major square of f32. Matrices reach over at most 2^66 bytes: too far is a fault.
fn element(base: u64, row: u32, column: u32, n: u32) -> u64 {
    let index = u64::from(row) * u64::from(n) + u64::from(column);
    index.checked_mul(4).and_then(|offset| base.checked_add(offset)).unwrap_or(u64::MAX)
}

/// A picture in work: pieces of rows, each of which may take several steps.
#[derive(Debug)]
pub struct Picture {
    params: Mandelbrot,
    width: u32,
    height: u32,
    x: u32,
    y: u32,
    lanes: Option<Box<vector::Orbits<PIXELS>>>,
}

impl Picture {
    fn step(&mut self, space: &AddressSpace) -> Result<bool, MmuFault> {
        if self.y == self.height || self.width == 0 {
            return Ok(true);
        }
        let count = (self.width - self.x).min(PIXELS as u32) as usize;
        let Mandelbrot { left, top, step, max_iterations, .. } = self.params;
        let (x, y) = (self.x, self.y);
        let orbits = self.lanes.get_or_insert_with(|| {
            let re = |lane: usize| left + (x + lane as u32) as f32 * step;
            Box::new(vector::Orbits::new(re, top + y as f32 * step))
        });
        if !orbits.advance(max_iterations) {
            return Ok(false);
        }
        let mut pixels = [0u32; PIXELS];
        for (pixel, iterations) in pixels.iter_mut().zip(orbits.iterations()) {
            *pixel = iterations.map_or(0, Mandelbrot::colour);
        }
        self.lanes = None;
        let row = u64::from(self.y) * u64::from(self.params.pitch);
        let at = self.params.pixels.wrapping_add(row).wrapping_add(u64::from(self.x) * 4);
        space.write(at, pixels[..count].as_bytes())?;
        self.x += count as u32;
        if self.x == self.width {
            self.x = 0;
            self.y += 1;
        }
        Ok(self.y == self.height)
    }
}

/// Blocks that do nothing but take time.
#[derive(Debug)]
pub struct Spinner {
    params: Spin,
    /// Blocks left, with the one in work.
    blocks: u128,
    /// LCG steps of a block.
    steps: u64,
    /// Of which so many are done in this one.
    done: u64,
    state: u32,
}

impl Spinner {
    fn step(&mut self, space: &AddressSpace) -> Result<bool, MmuFault> {
        let mut left = LCG_STEPS;
        loop {
            let steps = left.min(self.steps - self.done);
            let mut state = self.state;
            for _ in 0..steps {
                state =
                    std::hint::black_box(state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223));
            }
            self.state = state;
            if self.params.iterations == u32::MAX {
                return Ok(false);
            }
            self.done += steps;
            if self.done < self.steps {
                return Ok(false);
            }
            space.add_u32(self.params.out, 1)?;
            self.done = 0;
            self.blocks -= 1;
            if self.blocks == 0 {
                return Ok(true);
            }
            left = left.saturating_sub(steps.max(LCG_STEPS / EMPTY_BLOCKS));
            if left == 0 {
                return Ok(false);
            }
        }
    }
}
