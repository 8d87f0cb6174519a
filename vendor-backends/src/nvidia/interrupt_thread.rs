//! Thread of a worker that forwards non-stall interrupts to the guest.

use std::os::fd::{AsFd, OwnedFd};

use mdev_core::gpu::Pending;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::vgpu_state::VgpuState;

/// Forwards interrupts until the vGPU's threads are stopped.
///
/// The GPU signals each client for the interrupts of all channels, so a guest is also woken for
/// other vGPUs. It checks its semaphores and sleeps again. A vGPU without channels gets no
/// interrupts.
pub fn run(state: &VgpuState, interrupt_event: &OwnedFd) {
    while !state.signals.is_stopped() {
        let mut fds = [
            PollFd::new(state.signals.stop_event(), PollFlags::POLLIN),
            PollFd::new(interrupt_event.as_fd(), PollFlags::POLLIN | PollFlags::POLLPRI),
        ];
        if poll(&mut fds, PollTimeout::NONE).is_err() || fds[1].any() != Some(true) {
            continue;
        }
        let vectors = state.channels().vectors();
        if vectors != 0 {
            state.signals.raise(Pending::NONSTALL);
            state.signals.signal(vectors);
        }
    }
}
