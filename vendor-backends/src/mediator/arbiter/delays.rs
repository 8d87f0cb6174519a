//! Time in which the host has run something else on the CPU of a context's engine.
//!
//! The kernel counts it, so that a context that has been taken over cannot claim it: the second
//! number of `/proc/PID/schedstat` is the time for which a thread was able to run and waited for a
//! CPU (proc(5); Documentation/scheduler/sched-stats.rst). The thread is the context's main one,
//! which is its engine. A context cannot choose the CPUs, policy or priority of its threads.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Longest content: three numbers of 64 bits.
const MAX_BYTES: usize = 64;

/// The kernel's count for one context.
#[derive(Debug)]
pub struct Delays(Option<File>);

impl Delays {
    /// Reads a file of `/proc`. Without one the context has no delays, as on a kernel without
    /// `CONFIG_SCHED_INFO`.
    pub fn new(file: Option<OwnedFd>) -> Self {
        Self(file.map(File::from))
    }

    /// Returns the time in nanoseconds, 0 if it is unknown.
    pub fn total_ns(&self) -> u64 {
        let mut bytes = [0; MAX_BYTES];
        let read = self.0.as_ref().and_then(|file| file.read_at(&mut bytes, 0).ok());
        let text = read.and_then(|count| std::str::from_utf8(&bytes[..count]).ok());
        text.and_then(|text| text.split_whitespace().nth(1)?.parse().ok()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn a_thread_that_waits_for_a_cpu_is_delayed() {
        let file = File::open("/proc/thread-self/schedstat").unwrap();
        let delays = Delays::new(Some(file.into()));
        let before = delays.total_ns();
        // More threads than CPUs, until this one has waited.
        let cpus = std::thread::available_parallelism().map_or(1, usize::from);
        let stop = std::sync::atomic::AtomicBool::new(false);
        let waited = std::thread::scope(|scope| {
            for _ in 0..2 * cpus {
                scope.spawn(|| {
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                });
            }
            let begun = Instant::now();
            while delays.total_ns() == before && begun.elapsed() < Duration::from_secs(60) {}
            stop.store(true, std::sync::atomic::Ordering::Relaxed);
            delays.total_ns() - before
        });
        assert!(waited > 0);
        assert_eq!(Delays::new(None).total_ns(), 0);
        assert_eq!(Delays::new(Some(File::open("/dev/null").unwrap().into())).total_ns(), 0);
    }
}
