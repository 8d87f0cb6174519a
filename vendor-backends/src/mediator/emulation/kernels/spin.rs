//! A kernel that spins for a number of iterations.

use mdev_core::abi::program::Spin;
use serde::{Deserialize, Serialize};

use super::Extent;
use crate::mediator::emulation::address_space::{AddressSpace, MmuFault};

/// Steps of the linear congruential generator in one step of the grid.
const LCG_STEPS: u64 = 8192;
/// Empty blocks that count as one step of the grid.
const EMPTY_BLOCKS: u64 = 256;

/// A grid of blocks that only take time.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SpinJob {
    pub params: Spin,
    /// Remaining blocks, including the current one.
    blocks: u128,
    /// LCG steps of a block.
    steps: u64,
    /// Completed LCG steps of the current block.
    done: u64,
    state: u32,
}

impl SpinJob {
    pub fn new(params: Spin, extent: Extent) -> Self {
        let steps = u64::from(params.iterations).saturating_mul(extent.threads());
        Self { params, blocks: extent.blocks(), steps, done: 0, state: 1 }
    }

    /// Returns whether a launch can lead to the state.
    pub fn is_valid(&self) -> bool {
        self.blocks > 0 && self.done <= self.steps
    }

    /// Runs one step. Returns true after the last step.
    pub fn step(&mut self, space: AddressSpace<'_>) -> Result<bool, MmuFault> {
        let mut left = LCG_STEPS;
        loop {
            let steps = left.min(self.steps - self.done);
            self.state = kernel_loops::spin(self.state, steps);
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
