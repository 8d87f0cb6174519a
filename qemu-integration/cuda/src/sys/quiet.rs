//! Sections that neither signals nor cancellation interrupt.

use std::ffi::c_int;

use nix::sys::signal::{SigSet, SigmaskHow};

const PTHREAD_CANCEL_DISABLE: c_int = 1;

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// A section of a thread: its signals are blocked, and it cannot be cancelled.
///
/// A handler that ran within a request could make another one and wait for ever for the lock.
#[derive(Debug)]
pub struct Quiet {
    signals: Option<SigSet>,
    cancellation: c_int,
}

impl Quiet {
    /// Begins a section.
    pub fn begin() -> Self {
        let mut cancellation = 0;
        // SAFETY: the old state is written to a local variable.
        unsafe { pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &raw mut cancellation) };
        Self { signals: SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK).ok(), cancellation }
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        if let Some(signals) = &self.signals {
            // It can only fail for an unknown `how`.
            let _ = signals.thread_set_mask();
        }
        let mut old = 0;
        // SAFETY: as above.
        unsafe { pthread_setcancelstate(self.cancellation, &raw mut old) };
    }
}
