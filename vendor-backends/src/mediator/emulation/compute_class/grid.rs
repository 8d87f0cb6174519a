//! A grid in progress, and what its QMD asks for at its end.

use std::collections::VecDeque;

use crate::mediator::emulation::context::{Context, Progress};
use crate::mediator::emulation::kernels::Job;
use crate::mediator::emulation::semaphore::Release;
use crate::mediator::emulation::transfer::Transfer;
use crate::mediator::fault::Fault;

/// Work of a grid.
#[derive(Debug)]
pub(super) enum Work {
    /// A kernel of the software GPU.
    Job(Job),
    /// Copies and fills, in order.
    Transfers(VecDeque<Transfer>),
}

/// A grid in progress.
#[derive(Debug)]
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
                while let Some(transfer) = transfers.front_mut() {
                    let progress = transfer.run(cx)?;
                    if progress != Progress::Done {
                        return Ok(progress);
                    }
                    transfers.pop_front();
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
