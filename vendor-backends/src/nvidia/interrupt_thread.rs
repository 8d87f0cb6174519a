//! Thread of a worker that forwards what the GPU signals: non-stall interrupts and exceptions.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use mdev_core::gpu::Pending;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::vgpu_state::VgpuState;

/// Forwards interrupts and exceptions until the vGPU's threads are stopped.
///
/// The GPU signals each client for the interrupts of all channels, so a guest is also woken for
/// other vGPUs. It checks its semaphores and sleeps again. A vGPU without channels gets no
/// interrupts. Exceptions are signalled to the vGPU that has them.
pub fn run(state: &VgpuState, interrupt_event: &OwnedFd, exception_event: &OwnedFd) {
    let event = |fd| PollFd::new(fd, PollFlags::POLLIN | PollFlags::POLLPRI);
    while !state.signals.is_stopped() {
        let sources: [BorrowedFd<'_>; 3] =
            [state.signals.stop_event(), interrupt_event.as_fd(), exception_event.as_fd()];
        let mut fds = sources.map(event);
        if poll(&mut fds, PollTimeout::NONE).is_err() {
            continue;
        }
        let [_, has_interrupt, has_exception] = fds.map(|fd| fd.any() == Some(true));
        if has_exception && state.channels().note_exceptions() {
            state.signals.raise(Pending::CHANNEL_ERROR);
        }
        let vectors = if has_interrupt { state.channels().vectors() } else { 0 };
        if vectors != 0 {
            state.signals.raise(Pending::NONSTALL);
            state.signals.signal(vectors);
        }
    }
}
