//! Accepts connections on the control socket. Administrators always have a place.
//!
//! All users share the kernel's queue of connections. A thread that does nothing else empties it,
//! so that those who connect all the time keep others waiting for little time. Connections of
//! administrators and of others are then served by different threads.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::Duration;

use axum::Router;
use axum::extract::connect_info::ConnectInfo;
use axum::http::Extensions;
use foreign_fds::ForeignSocket;
use nix::sys::socket::{MsgFlags, send};
use tokio::runtime::Handle;

use super::access::{Level, Peer};
use super::file_receiver::FileReceiver;
use crate::foreign_stream::ForeignStream;
use crate::http_server::pace::Budgets;
use crate::http_server::slots::{Slot, Slots};
use crate::http_server::{
    ACCEPT_PAUSE, IDLE_TIMEOUT, ListenerLog, Terms, control_limits, serve_connection,
};
use crate::spawn;

/// Limit of the time for the head of a request of an administrator, and without a request.
const ADMIN_IDLE_TIMEOUT: Duration = Duration::from_secs(300);

/// Answer to a connection for which there is no place.
const BUSY: &[u8] = b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: 109\r\n\r\n{\"error\":{\"code\":\"unavailable\",\"message\":\"Too many connections of this user to vgpud are open; close some.\"}}";

/// Runtimes that serve connections.
#[derive(Clone, Debug)]
pub struct Runtimes {
    /// Runtime for administrators.
    pub admins: Handle,
    /// Runtime for all others.
    pub others: Handle,
}

/// Starts the thread that accepts connections until the process ends. `level_of` decides what a
/// client may do, and `files` is this process' limit of open files.
pub fn start(
    listener: UnixListener,
    router: Router,
    level_of: impl Fn(&Peer) -> Level + Send + 'static,
    runtimes: Runtimes,
    files: u64,
) -> io::Result<()> {
    listener.set_nonblocking(false)?;
    // Connections inherit that, also those that are not accepted yet.
    let refuses_fds = foreign_fds::refuse(listener.as_fd());
    let slots = Slots::new(control_limits(files));
    let server = Server { router, runtimes, budgets: Budgets::default() };
    let accept = move || {
        let mut log = ListenerLog::new("the control socket");
        loop {
            let socket = match listener.accept() {
                // Where no descriptors can have come, the close does not wait.
                Ok((stream, _)) if refuses_fds => ForeignSocket::trusting(stream.into()),
                Ok((stream, _)) => ForeignSocket::from(OwnedFd::from(stream)),
                Err(error) => {
                    log.accept_failed(&error);
                    thread::sleep(ACCEPT_PAUSE);
                    continue;
                }
            };
            let peer = Peer::of(&socket).unwrap_or_else(|error| {
                log::debug!(
                    "Cannot read the credentials of a client of the control socket: {error}"
                );
                Peer::default()
            });
            let is_admin = level_of(&peer) == Level::Admin;
            let uid = peer.uid.unwrap_or(u32::MAX);
            let Some(slot) = slots.admit(Some(uid), is_admin) else {
                log.refused(uid);
                refuse(&socket);
                continue;
            };
            if let Err(error) = server.serve(socket, peer, is_admin, slot) {
                log.accept_failed(&error);
            }
        }
    };
    spawn::thread("accept", accept).map(drop)
}

/// What connections are served with.
struct Server {
    router: Router,
    runtimes: Runtimes,
    budgets: Budgets,
}

impl Server {
    /// Serves a connection, on the runtime for its client.
    fn serve(
        &self,
        socket: ForeignSocket,
        peer: Peer,
        is_admin: bool,
        slot: Slot,
    ) -> io::Result<()> {
        let Runtimes { admins, others } = &self.runtimes;
        let runtime = if is_admin { admins } else { others };
        let terms = Terms {
            idle: if is_admin { ADMIN_IDLE_TIMEOUT } else { IDLE_TIMEOUT },
            pace: (!is_admin).then(|| self.budgets.pace(peer.uid)),
        };
        let _context = runtime.enter();
        let (stream, passed) = FileReceiver::new(ForeignStream::accepted(socket)?, is_admin);
        let extend = move |extensions: &mut Extensions| {
            extensions.insert(ConnectInfo(peer.clone()));
            extensions.insert(passed.clone());
        };
        runtime.spawn(serve_connection(stream, extend, self.router.clone(), slot, terms));
        Ok(())
    }
}

/// Tells a client that there is no place for its connection, without waiting for the client.
fn refuse(socket: &ForeignSocket) {
    // The client may have gone.
    let _ = send(socket.as_raw_fd(), BUSY, MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL);
    socket.end();
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Arc, Mutex, mpsc};

    use axum::routing::get;

    use super::*;
    use crate::io_runtime;

    /// Ends a test that would wait for ever.
    const LIMIT: Duration = Duration::from_secs(60);

    /// Connects, and sends a request.
    fn ask(socket: &std::path::Path, path: &str) -> std::os::unix::net::UnixStream {
        let mut stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let head = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        stream
    }

    fn answer(mut stream: std::os::unix::net::UnixStream) -> String {
        let mut bytes = Vec::new();
        // The end of a refused connection is an error, since its request was not read.
        let _ = stream.read_to_end(&mut bytes);
        String::from_utf8(bytes).unwrap()
    }

    #[test]
    fn threads_of_others_and_of_administrators_do_not_wait_for_each_other() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let (begun, begins) = mpsc::channel();
        let (end, ends) = mpsc::channel::<()>();
        let ends = Arc::new(Mutex::new(ends));
        // Keeps the thread that serves it.
        let hold = move || {
            let (begun, ends) = (begun.clone(), Arc::clone(&ends));
            async move {
                begun.send(()).unwrap();
                let _ = ends.lock().unwrap().recv();
            }
        };
        let router = Router::new().route("/hold", get(hold)).route("/", get(async || "here"));
        let accepted = AtomicUsize::new(0);
        // The first connection and the last one are a reader's.
        let level_of = move |_: &Peer| match accepted.fetch_add(1, Ordering::Relaxed) {
            1 | 2 => Level::Admin,
            _ => Level::Read,
        };
        let start = |name| io_runtime::start(name, 1).unwrap();
        let runtimes = Runtimes { admins: start("admins"), others: start("others") };
        let listener = UnixListener::bind(&socket).unwrap();
        // A reader has two places.
        super::start(listener, router, level_of, runtimes, 64).unwrap();
        let reader = ask(&socket, "/hold");
        begins.recv_timeout(LIMIT).unwrap();
        assert!(answer(ask(&socket, "/")).ends_with("here"), "an administrator's request");
        let admin = ask(&socket, "/hold");
        begins.recv_timeout(LIMIT).unwrap();
        // Both threads are kept, and the one that accepts is not.
        let waiting = ask(&socket, "/");
        assert!(answer(ask(&socket, "/")).starts_with("HTTP/1.1 503"), "no place");
        drop(end);
        for (stream, body) in [(reader, ""), (admin, ""), (waiting, "here")] {
            let text = answer(stream);
            assert!(text.starts_with("HTTP/1.1 200") && text.ends_with(body), "{text}");
        }
    }

    #[test]
    fn refused_connection_gets_a_whole_answer() {
        let text = String::from_utf8(BUSY.to_vec()).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("Content-Length: {}", body.len())), "{}", body.len());
        let error: vgpud_api::ErrorBody = serde_json::from_str(body).unwrap();
        assert_eq!(error.error.code, vgpud_api::ErrorCode::Unavailable);
    }
}
