//! Lines that name what runs for long, so that no command is silent for a minute.

use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Interval of the lines.
pub const INTERVAL: Duration = Duration::from_secs(30);

/// Thread that reports the running time of a step until it is dropped.
#[derive(Debug)]
pub struct Heartbeat {
    /// Dropped to end the thread.
    running: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Heartbeat {
    /// Calls `report` with the time since now at each interval.
    pub fn start(interval: Duration, report: impl Fn(Duration) + Send + 'static) -> Self {
        let (running, ended) = mpsc::channel::<()>();
        let started = Instant::now();
        let body = move || {
            while ended.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                report(started.elapsed());
            }
        };
        // Without a thread, the step works and is silent.
        let thread = thread::Builder::new().name("heartbeat".into()).spawn(body).ok();
        Self { running: Some(running), thread }
    }
}

impl Drop for Heartbeat {
    fn drop(&mut self) {
        drop(self.running.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_come_until_the_heartbeat_is_dropped() {
        let (sender, reports) = mpsc::channel();
        let report = move |since| sender.send(since).unwrap();
        let heartbeat = Heartbeat::start(Duration::from_millis(1), report);
        let first = reports.recv_timeout(Duration::from_secs(10)).unwrap();
        let second = reports.recv_timeout(Duration::from_secs(10)).unwrap();
        assert!(first >= Duration::from_millis(1) && second > first, "{first:?}, {second:?}");
        drop(heartbeat);
        // The sender is gone with the thread.
        while reports.try_recv().is_ok() {}
        assert_eq!(reports.try_recv(), Err(mpsc::TryRecvError::Disconnected));
    }
}
