//! A grid in progress, and what its QMD asks for at its end.

use std::collections::VecDeque;

use mdev_core::abi::qmd;
use serde::{Deserialize, Serialize};

use crate::mediator::Hardware;
use crate::mediator::emulation::context::{Context, Progress};
use crate::mediator::emulation::kernels::Job;
use crate::mediator::emulation::semaphore::Release;
use crate::mediator::emulation::transfer::{SavedTransfer, Transfer};
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

/// Transfers of one grid at most: see `driver_kernels`.
const MAX_TRANSFERS: usize = 2;

/// Saved state of a [`Grid`].
#[derive(Debug, Serialize, Deserialize)]
pub struct SavedGrid {
    work: SavedWork,
    releases: Vec<Release>,
    interrupt: bool,
}

#[derive(Debug, Serialize, Deserialize)]
enum SavedWork {
    Job(Job),
    Transfers(Vec<SavedTransfer>),
}

impl Grid {
    /// Returns the state.
    pub fn save(&self) -> SavedGrid {
        let work = match &self.work {
            Work::Job(job) => SavedWork::Job(job.clone()),
            Work::Transfers(transfers) => {
                SavedWork::Transfers(transfers.iter().map(Transfer::save).collect())
            }
        };
        SavedGrid { work, releases: self.releases.clone(), interrupt: self.interrupt }
    }
}

impl SavedGrid {
    /// Returns the grid, or `None` if no guest can cause this state.
    pub fn restore(&self, hardware: &dyn Hardware) -> Option<Grid> {
        let work = match &self.work {
            SavedWork::Job(job) => Work::Job(job.is_valid(hardware).then(|| job.clone())?),
            SavedWork::Transfers(saved) if saved.len() <= MAX_TRANSFERS => {
                Work::Transfers(saved.iter().map(SavedTransfer::restore).collect::<Option<_>>()?)
            }
            SavedWork::Transfers(_) => return None,
        };
        let few = self.releases.len() <= qmd::RELEASES as usize;
        few.then(|| Grid { work, releases: self.releases.clone(), interrupt: self.interrupt })
    }
}
