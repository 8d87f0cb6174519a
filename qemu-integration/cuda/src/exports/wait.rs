//! `poll`, `ppoll`.

use std::ffi::c_int;
use std::ptr::null;
use std::time::{Duration, Instant};

use libc::{nfds_t, pollfd, sigset_t, timespec};

use crate::sys::kernel;
use crate::sys::next::{POLL, PPOLL};
use crate::{events, open_files};

/// # Safety
/// As for `poll()`.
unsafe fn next_poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    if let Some(poll) = POLL.get() {
        // SAFETY: by the caller.
        return unsafe { poll(fds, count, timeout) };
    }
    let time = timespec {
        tv_sec: i64::from(timeout / 1000),
        tv_nsec: i64::from(timeout % 1000) * 1_000_000,
    };
    let time = if timeout < 0 { null() } else { &raw const time };
    // SAFETY: by the caller.
    unsafe { kernel::ppoll(fds, count, time, null()) }
}

/// # Safety
/// As for `ppoll()`.
unsafe fn next_ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    signals: *const sigset_t,
) -> c_int {
    // SAFETY: by the caller.
    unsafe {
        match PPOLL.get() {
            Some(ppoll) => ppoll(fds, count, timeout, signals),
            None => kernel::ppoll(fds, count, timeout, signals),
        }
    }
}

/// Returns whether one of the descriptors may be a file of the driver.
///
/// # Safety
/// `fds` is an array of `count`.
unsafe fn any(fds: *mut pollfd, count: nfds_t) -> bool {
    // SAFETY: by the caller.
    !fds.is_null()
        && (0..count as usize).any(|at| open_files::possible(unsafe { (*fds.add(at)).fd }))
}

/// Waits with files of the driver among the descriptors, by `wait`, which gets the descriptors and
/// the time that is left. A wait that ends with events which another thread has taken goes on.
///
/// # Safety
/// `fds` is an array of `count`.
unsafe fn with_driver(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: Option<Duration>,
    wait: impl Fn(&mut [pollfd], Option<Duration>) -> c_int,
) -> c_int {
    // None for a time that does not end.
    let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
    // SAFETY: by the caller.
    let asked = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    let mut entries = asked.to_vec();
    events::prepare(&mut entries);
    loop {
        let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        let ready = wait(&mut entries, left);
        if ready < 0 {
            return ready;
        }
        let ready = events::report(&mut entries, asked);
        if ready > 0 || left == Some(Duration::ZERO) {
            asked.iter_mut().zip(&entries).for_each(|(asked, entry)| asked.revents = entry.revents);
            return c_int::try_from(ready).unwrap_or(c_int::MAX);
        }
    }
}

/// # Safety
/// As for `poll()`.
unsafe fn wait(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: by the caller.
    unsafe {
        if !any(fds, count) {
            return next_poll(fds, count, timeout);
        }
        let time = u64::try_from(timeout).ok().map(Duration::from_millis);
        with_driver(fds, count, time, |fds, left| {
            // Not before the time: a rest of a millisecond counts as one.
            let left = left.map_or(-1, |left| left.as_nanos().div_ceil(1_000_000) as c_int);
            next_poll(fds.as_mut_ptr(), count, left)
        })
    }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int {
    // SAFETY: by the caller.
    unsafe { wait(fds, count, timeout) }
}

/// # Safety
/// As for libc's function, which `_FORTIFY_SOURCE` calls.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn __poll_chk(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: c_int,
    _bytes: usize,
) -> c_int {
    // SAFETY: by the caller.
    unsafe { wait(fds, count, timeout) }
}

/// # Safety
/// As for libc's function.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ppoll(
    fds: *mut pollfd,
    count: nfds_t,
    timeout: *const timespec,
    signals: *const sigset_t,
) -> c_int {
    // SAFETY: by the caller.
    unsafe {
        if !any(fds, count) {
            return next_ppoll(fds, count, timeout, signals);
        }
        let time = timeout.as_ref().map(|time| {
            let (seconds, nanos) = (time.tv_sec.max(0), time.tv_nsec.max(0));
            Duration::new(seconds.cast_unsigned(), nanos.cast_unsigned() as u32)
        });
        with_driver(fds, count, time, |fds, left| {
            let left = left.map(|left| timespec {
                tv_sec: left.as_secs().cast_signed(),
                tv_nsec: left.subsec_nanos().into(),
            });
            let left = left.as_ref().map_or(null(), std::ptr::from_ref);
            next_ppoll(fds.as_mut_ptr(), count, left, signals)
        })
    }
}
