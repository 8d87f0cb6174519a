//! Check of a vGPU that shows no work while its context is resident on the compute engine.
//!
//! An idle context stays resident until another context needs the engine, so residency alone is no
//! work. But what the rings show is the guest's word, and a guest with an engine time cap would gain
//! by showing empty rings. So the context is preempted once. An idle context then leaves the engine
//! and does not come back without a ring. A context with work comes back, and one with a long kernel
//! does not leave.

use std::time::{Duration, Instant};

use mdev_core::gpu::EngineKind;

use super::vgpu_state::VgpuState;

/// Time in which an idle context leaves the engine when it is preempted.
const LEAVES_WITHIN: Duration = Duration::from_millis(30);

/// A request to leave the engine, and what was known at that time.
#[derive(Clone, Copy, Debug)]
struct Request {
    at: Instant,
    rings: u64,
    /// Number of completed residencies.
    residencies: u64,
}

/// State of the check.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct IdleCheck {
    request: Option<Request>,
    /// A context has left the engine on request. On a driver where that never happens, a context
    /// that stays shows nothing.
    leaves: bool,
}

impl IdleCheck {
    /// Returns whether a context that may be resident has work. `rings` is the number of rings so
    /// far.
    pub(super) fn has_work(&mut self, state: &VgpuState, now: Instant, rings: u64) -> bool {
        let request = self.request.filter(|request| request.rings == rings);
        let Some((resident, residencies)) = state.residencies(request.is_some()) else {
            return false;
        };
        let Some(request) = request else {
            if resident {
                self.preempt(state, Request { at: now, rings, residencies });
            }
            return false;
        };
        let has_left = residencies > request.residencies;
        self.leaves |= has_left;
        if has_left && resident {
            // The context is back without a ring.
            self.preempt(state, Request { at: now, rings, residencies });
            return true;
        }
        !has_left && self.leaves && now.duration_since(request.at) > LEAVES_WITHIN
    }

    fn preempt(&mut self, state: &VgpuState, request: Request) {
        state.channels().request_preemption(EngineKind::Compute);
        self.request = Some(request);
    }
}
