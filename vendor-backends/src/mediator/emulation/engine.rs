//! The engine: one thread that runs the work of all vGPUs in the order of the runlist.
//!
//! The thread polls the rings of all channels while there is work, and for a short time after that.
//! Before it sleeps, it tells the guests so (`NEED_WAKEUP`) and polls once more. From then on a
//! doorbell must come with a wake-up.
//!
//! * [`vgpu_list`], [`waker`]: shared with the control threads
//! * `engine_loop`: polling, and the choice of the next group
//! * `run_group`: one run of a group and its accounting
//! * `busy_clock`: which time is charged to which vGPU
//! * `sleep_debt`: consequences of sleep in a vGPU's memory
//! * `sleep`: spinning and sleeping without work
//! * `stolen_time`: time that the host took from the engine, as against sleep
//! * `watchdog`: the end of accesses that hold the engine

mod busy_clock;
mod engine_loop;
mod run_group;
mod sleep;
mod sleep_debt;
mod stolen_time;
pub mod vgpu_list;
pub mod waker;
mod watchdog;

#[cfg(test)]
mod tests;

use std::io;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use self::engine_loop::EngineLoop;
use self::vgpu_list::VgpuList;
use self::watchdog::Watchdog;
use crate::mediator::context_process::turns::Turns;
use crate::mediator::hardware::Pace;

/// An engine that has not begun.
#[derive(Debug)]
pub struct Engine(EngineLoop);

impl Engine {
    /// Makes the engine of some vGPUs. With `turns` it runs work in these only.
    pub fn new(vgpus: Arc<VgpuList>, pace: Pace, turns: Option<Arc<Turns>>) -> Self {
        let mut engine = EngineLoop::new(vgpus, pace);
        engine.turns = turns;
        Self(engine)
    }

    /// Runs the vGPUs' work on this thread until [`VgpuList::stop`].
    pub fn run(mut self) {
        // The process must not survive its engine: guests would hang instead of losing the device.
        let guard = AbortOnPanic;
        let watchdog = Watchdog::start(Arc::clone(&self.0.steps));
        if let Err(error) = &watchdog {
            log::error!("The engine runs without a watchdog: {error}");
        }
        self.0.run();
        std::mem::forget(guard);
    }
}

/// Thread of an engine. Dropping it ends the thread.
#[derive(Debug)]
pub struct EngineThread {
    vgpus: Arc<VgpuList>,
    thread: Option<JoinHandle<()>>,
}

impl EngineThread {
    /// Starts the thread.
    pub fn start(vgpus: Arc<VgpuList>, pace: Pace) -> io::Result<Self> {
        let engine = Engine::new(Arc::clone(&vgpus), pace, None);
        let builder = thread::Builder::new().name("gpu-engine".into());
        let thread = builder.spawn(move || engine.run())?;
        Ok(Self { vgpus, thread: Some(thread) })
    }
}

impl Drop for EngineThread {
    fn drop(&mut self) {
        self.vgpus.stop();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        std::process::abort();
    }
}
