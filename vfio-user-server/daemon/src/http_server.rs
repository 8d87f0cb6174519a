//! HTTP/1.1 connections of the control socket and of the web console, with their limits.
//!
//! * [`slots`]: limits of open connections; [`pace`]: limit of CPU time
//! * `write_timeout`: limit of the time in which a client accepts an answer

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::Extensions;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::log_limiter::LogLimiter;
use pace::Pace;
use slots::{Limits, Slot};
use write_timeout::WriteTimeout;

pub mod pace;
pub mod slots;
mod write_timeout;

/// Limit of the time that a client without privilege takes for the head of a request, and in which
/// a connection without a request stays open.
pub const IDLE_TIMEOUT: Duration = Duration::from_secs(15);

/// Limit of the time in which a client accepts no byte of an answer.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// Limit of the head of a request, in bytes.
const MAX_HEAD: usize = 16 << 10;

/// Pause after a failed accept. Without free descriptors, each accept fails until one is closed.
pub const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Highest limit of open files that the manager asks for.
const MAX_FILES: u64 = 65_536;

/// Raises this process' limit of open files to what it may use. Returns the limit.
pub fn raise_file_limit() -> u64 {
    let Ok((soft, hard)) = getrlimit(Resource::RLIMIT_NOFILE) else { return 1024 };
    let wanted = hard.min(MAX_FILES).max(soft);
    match setrlimit(Resource::RLIMIT_NOFILE, wanted, hard) {
        Ok(()) => wanted,
        Err(_) => soft,
    }
}

/// Limits of the control socket for a process with that many descriptors.
pub fn control_limits(files: u64) -> Limits {
    let total = usize::try_from(files / 4).unwrap_or(usize::MAX).clamp(16, 256);
    Limits { total, ordinary: total / 2, per_user: total / 8 }
}

/// Limits of the web console for a process with that many descriptors.
pub fn console_limits(files: u64) -> Limits {
    let total = usize::try_from(files / 8).unwrap_or(usize::MAX).clamp(16, 128);
    Limits { total, ordinary: total, per_user: total / 4 }
}

/// Terms of a connection.
#[derive(Clone, Debug)]
pub struct Terms {
    /// Limit of the time for the head of a request, and without a request.
    pub idle: Duration,
    /// Pace, until the client has a privilege.
    pub pace: Option<Pace>,
}

/// Serves one connection until its end, or until its place is needed for another.
/// `extend` adds what handlers know of the client to each request.
pub async fn serve_connection<T: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    stream: T,
    extend: impl Fn(&mut Extensions) + Send + 'static,
    router: Router,
    slot: Slot,
    Terms { idle, pace }: Terms,
) {
    let slot = Arc::new(slot);
    let extension = Arc::clone(&slot);
    let router = TowerToHyperService::new(router);
    let service = service_fn(move |mut request: Request<Incoming>| {
        let extensions = request.extensions_mut();
        extend(extensions);
        // A handler that takes the connection over keeps the place.
        extensions.insert(Arc::clone(&extension));
        router.call(request)
    });
    let io = TokioIo::new(WriteTimeout::new(stream, WRITE_TIMEOUT));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(idle)
        .max_buf_size(MAX_HEAD)
        // A client that leaves keeps its place until its request has an answer. It could otherwise
        // have more requests under way than it has places.
        .half_close(pace.is_some())
        .serve_connection(io, service)
        .with_upgrades();
    let served = async {
        match pace {
            Some(pace) => pace.run(|| !slot.is_privileged(), connection).await,
            None => connection.await,
        }
    };
    tokio::select! {
        served = served => {
            if let Err(error) = served {
                log::debug!("A connection has ended: {error}");
            }
        }
        () = slot.closed() => log::debug!("A connection was closed for another"),
    }
}

/// Log of a listener, within the limit for lines that clients can cause.
#[derive(Debug)]
pub struct ListenerLog {
    name: &'static str,
    limiter: LogLimiter,
}

impl ListenerLog {
    /// Creates the log of a listener with that name.
    pub fn new(name: &'static str) -> Self {
        Self { name, limiter: LogLimiter::new(Instant::now()) }
    }

    /// Logs a failed accept.
    pub fn accept_failed(&mut self, error: &io::Error) {
        let name = self.name;
        self.warn(format_args!("Cannot accept a connection to {name}: {error}"));
    }

    /// Logs a refused connection.
    pub fn refused(&mut self, user: u32) {
        let name = self.name;
        self.warn(format_args!("Refused a connection to {name}: user {user} has too many"));
    }

    fn warn(&mut self, line: std::fmt::Arguments<'_>) {
        match self.limiter.pass(Instant::now()) {
            None => {}
            Some(0) => log::warn!("{line}"),
            Some(suppressed) => log::warn!("{line} ({suppressed} lines suppressed)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_leave_descriptors_for_vgpus() {
        for files in [64, 256, 1024, 65_536] {
            let (control, console) = (control_limits(files), console_limits(files));
            assert!(control.ordinary < control.total && control.per_user < control.ordinary);
            assert!(console.total as u64 + control.total as u64 <= (files / 2).max(32), "{files}");
        }
    }

    fn slots_for_one() -> Arc<slots::Slots> {
        slots::Slots::new(Limits { total: 1, ordinary: 1, per_user: 1 })
    }

    #[test]
    fn client_that_does_not_finish_its_request_is_disconnected() {
        use tokio::io::{AsyncReadExt, AsyncWriteExt};
        crate::io_runtime::new(1).unwrap().block_on(async {
            let slots = slots_for_one();
            let slot = slots.admit(None, false).unwrap();
            let (mut near, far) = tokio::io::duplex(1 << 10);
            let terms = Terms { idle: Duration::from_millis(50), pace: None };
            tokio::spawn(serve_connection(far, |_| (), Router::new(), slot, terms));
            near.write_all(b"GET / HTTP/1.1\r\nHost: x").await.unwrap();
            let mut answer = Vec::new();
            near.read_to_end(&mut answer).await.unwrap();
            // The place is free again.
            assert!(slots.admit(None, false).is_some());
        });
    }

    #[test]
    fn client_that_leaves_keeps_its_place_until_its_request_is_done() {
        use axum::routing::get;
        use tokio::io::AsyncWriteExt;
        use tokio::sync::Notify;
        crate::io_runtime::new(1).unwrap().block_on(async {
            let slots = slots_for_one();
            let slot = slots.admit(Some(7), false).unwrap();
            let (begun, end) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
            let (begins, ends) = (Arc::clone(&begun), Arc::clone(&end));
            let hold = async move || {
                begins.notify_one();
                ends.notified().await;
            };
            let router = Router::new().route("/", get(hold));
            let (mut near, far) = tokio::io::duplex(1 << 10);
            let pace = Some(pace::Budgets::default().pace(Some(7)));
            let terms = Terms { idle: IDLE_TIMEOUT, pace };
            let served = tokio::spawn(serve_connection(far, |_| (), router, slot, terms));
            near.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
            begun.notified().await;
            drop(near);
            // The connection sees the end at its next turn.
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            assert!(slots.admit(Some(7), false).is_none());
            end.notify_one();
            served.await.unwrap();
            assert!(slots.admit(Some(7), false).is_some());
        });
    }
}
