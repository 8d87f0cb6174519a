//! The Mandelbrot set.

use kernel_loops::{Orbits, POINTS};
use mdev_core::abi::program::Mandelbrot;
use serde::{Deserialize, Serialize};
use zerocopy::IntoBytes;

use super::Extent;
use crate::mediator::emulation::address_space::{AddressSpace, MmuFault};

/// A picture in progress: parts of rows with at most [`POINTS`] pixels, each of which may take
/// several steps.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MandelbrotJob {
    pub params: Mandelbrot,
    width: u32,
    height: u32,
    x: u32,
    y: u32,
    /// Not saved: the pixels are computed again.
    #[serde(skip)]
    lanes: Option<Box<Orbits>>,
}

impl MandelbrotJob {
    pub fn new(params: Mandelbrot, extent: Extent) -> Self {
        let (width, height) = (extent.bound(0, params.width), extent.bound(1, params.height));
        Self { params, width, height, x: 0, y: 0, lanes: None }
    }

    /// Returns whether a launch can lead to the state.
    pub fn is_valid(&self) -> bool {
        let Self { width, height, x, y, .. } = *self;
        y <= height && (width == 0 || x < width)
    }

    /// Runs one step. Returns true after the last step.
    pub fn step(&mut self, space: AddressSpace<'_>) -> Result<bool, MmuFault> {
        if self.y == self.height || self.width == 0 {
            return Ok(true);
        }
        let count = (self.width - self.x).min(POINTS as u32) as usize;
        let Mandelbrot { left, top, step, max_iterations, .. } = self.params;
        let (x, y) = (self.x, self.y);
        let orbits = self.lanes.get_or_insert_with(|| {
            let re = |lane: usize| left + (x + lane as u32) as f32 * step;
            Box::new(Orbits::new(re, top + y as f32 * step))
        });
        if !orbits.advance(max_iterations) {
            return Ok(false);
        }
        let mut pixels = [0u32; POINTS];
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
