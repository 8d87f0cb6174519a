//! The list of vGPUs that the engine thread serves.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::waker::EngineWaker;
use crate::mediator::emulation::vgpu::Vgpu;

/// List of vGPUs, shared between the engine thread and the control threads.
#[derive(Debug)]
pub struct VgpuList {
    vgpus: Mutex<Vec<Arc<Vgpu>>>,
    /// Number of changes of `vgpus`.
    generation: AtomicU64,
    /// Set to end the engine thread.
    stop: AtomicBool,
    waker: EngineWaker,
}

impl VgpuList {
    /// Creates an empty list.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            vgpus: Mutex::default(),
            generation: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            waker: EngineWaker::new()?,
        })
    }

    /// Returns the waker of the engine.
    pub fn waker(&self) -> &EngineWaker {
        &self.waker
    }

    /// Changes the list and wakes the engine.
    pub fn update<R>(&self, change: impl FnOnce(&mut Vec<Arc<Vgpu>>) -> R) -> R {
        let mut vgpus = self.vgpus.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut vgpus);
        self.generation.fetch_add(1, Ordering::Release);
        drop(vgpus);
        self.waker.wake();
        result
    }

    /// Returns a copy of the list.
    pub fn list(&self) -> Vec<Arc<Vgpu>> {
        self.vgpus.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Acquire)
    }

    /// Ends the engine.
    pub fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.waker.wake();
    }

    pub(super) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }
}
