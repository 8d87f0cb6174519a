//! A grid in progress, and what its QMD asks for at its end.

use mdev_core::abi::qmd;
use serde::{Deserialize, Serialize};

use crate::mediator::Hardware;
use crate::mediator::emulation::context::{Context, Progress};
use crate::mediator::emulation::kernels::Job;
use crate::mediator::emulation::semaphore::Release;
use crate::mediator::emulation::transfer::Transfer;
use crate::mediator::fault::Fault;

/// Copies and fills of a grid, in order.
pub(super) type Transfers = [Option<Transfer>; 2];

/// Work of a grid.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Work {
    /// A kernel of the software GPU.
    Job(Job),
    /// Copies and fills, in order.
    Transfers(Box<Transfers>),
}

/// A grid in progress.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Grid {
    pub(super) work: Work,
    /// Semaphores that are released at the end.
    pub(super) releases: Vec<Release>,
    /// Whether an interrupt is raised at the end.
    pub(super) interrupt: bool,
}

impl Grid {
    /// Runs until the grid is complete or the run limit is reached.
    pub fn run(&mut self, cx: Context<'_>) -> Result<Progress, Fault> {
        match &mut self.work {
            Work::Job(job) => {
                while !job.step(cx.space, cx.hardware)? {
                    if cx.limit.reached() {
                        return Ok(Progress::More);
                    }
                }
            }
            Work::Transfers(transfers) => {
                for place in transfers.iter_mut() {
                    let Some(transfer) = place else { continue };
                    let progress = transfer.run(cx)?;
                    if progress != Progress::Done {
                        return Ok(progress);
                    }
                    *place = None;
                }
            }
        }
        for release in &self.releases {
            release.run(cx.space)?;
        }
        if self.interrupt {
            cx.raise_interrupt();
        }
        Ok(Progress::Done)
    }
}

impl Grid {
    /// Returns whether a launch on this device can lead to the state.
    pub fn is_valid(&self, hardware: &dyn Hardware) -> bool {
        let work = match &self.work {
            Work::Job(job) => job.is_valid(hardware),
            Work::Transfers(transfers) => transfers.iter().flatten().all(Transfer::is_valid),
        };
        work && self.releases.len() <= qmd::RELEASES as usize
    }
}
