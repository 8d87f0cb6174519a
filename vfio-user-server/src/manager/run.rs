//! The life of a manager process: lock, signals, the API's socket, the manager's thread.

use std::fs;
use std::path::Path;
use std::sync::{Arc, mpsc};

use anyhow::Context;
use mdev_core::definition::store::SCRIPTS;
use nix::sys::stat::{Mode, umask};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

use super::config::Config;
use super::folders::Folders;
use super::{Ending, Handle, Manager, Watcher, service, sockets};
use crate::api::access::{Group, Peer};
use crate::api::model::Version;
use crate::api::{Api, http};
use crate::callouts::Callouts;
use crate::console::web::access::Access;
use crate::console::web::server;
use crate::spawn;

/// Most questions to workers that wait at the same time.
const MAX_WAITING: usize = 64;

/// Runs the manager until a signal ends it. SIGTERM, SIGINT and SIGHUP end everything in an orderly way; SIGUSR1 ends
/// the manager alone, for the next one to adopt what runs.
pub fn run(config: &Config) -> anyhow::Result<()> {
    spawn::reserve_descriptors().context("Cannot reserve descriptors")?;
    // What is for others besides is given to them one by one.
    umask(Mode::from_bits_truncate(0o077));
    let folders = Folders::create(&config.run_dir)?;
    let lock = folders.lock()?;
    // Before anything is started that would outlive a failure, as the control socket is.
    let web = config.web.map(|address| {
        let listen = || {
            let listener = server::listen(address)?;
            let access = Arc::new(Access::new(listener.local_addr()?));
            std::io::Result::Ok((listener, access))
        };
        listen().with_context(|| format!("Cannot serve the web console on {}", address.0))
    });
    let (web, access) = web.transpose()?.unzip();
    let io = "Cannot start the I/O runtime";
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(MAX_WAITING)
        .build()
        .context(io)?;
    let _context = runtime.enter();
    let signals = Signals::new().context(io)?;
    let (events, inbox) = mpsc::channel();
    let watcher =
        Watcher { runtime: runtime.handle().clone(), events: events.clone(), generation: 0 };
    let mut manager = Manager::new(config, folders.clone(), watcher)?;
    let socket = folders.api_socket();
    // One that was opened for us is not ours to make, nor to remove.
    let given = service::listener()?;
    let ours = given.is_none();
    let listener = match given {
        Some(listener) => listener,
        None => listen(&socket, config.access.readers.as_ref())?,
    };
    manager.begin();
    let packaged = config.scripts_dir.clone();
    let callouts = Callouts::new(vec![packaged, manager.store.dir().join(SCRIPTS)]);
    // With scripts, each start waits for them; requests are not to wait for all of that.
    let waiting = if callouts.are_there() {
        manager.to_start_by_itself()
    } else {
        manager.start_defined();
        Vec::new()
    };
    let about = Version {
        version: env!("CARGO_PKG_VERSION").into(),
        api: "v1".into(),
        pid: std::process::id(),
        run_dir: folders.root().to_string_lossy().into_owned(),
        config_dir: manager.store.dir().to_string_lossy().into_owned(),
    };
    let handle = Handle { events };
    let api = Api::new(handle.clone(), callouts, about, access.clone());
    if let (Some(web), Some(access)) = (web, access) {
        log::info!("Serving the web console on {}; vgpuctl web opens it", web.local_addr()?);
        server::serve(web, api.clone(), access).context("Cannot serve the web console")?;
    }
    let router = http::router(api.clone(), config.access.clone());
    let server = axum::serve(listener, router.into_make_service_with_connect_info::<Peer>());
    let (ended, end) = oneshot::channel::<()>();
    let thread = spawn::thread("manager", move || {
        manager.serve(&inbox);
        drop(ended);
    })
    .context("Cannot start the manager's thread")?;
    log::info!("Listening on {}", socket.display());
    service::ready();
    runtime.block_on(async {
        let server = tokio::spawn(async move { server.await });
        tokio::spawn(api.start_all(waiting));
        signals.relay(&handle, end).await;
        server.abort();
    });
    if ours {
        // A file that is gone already is what is wanted.
        let _ = fs::remove_file(&socket);
    }
    drop(lock);
    // Not waited for: a worker that does not answer keeps a thread of it busy for a while.
    runtime.shutdown_background();
    // Our own bug stays one.
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    Ok(())
}

/// What is listened to.
struct Signals {
    stop: [Signal; 3],
    leave: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            stop: [
                signal(SignalKind::terminate())?,
                signal(SignalKind::interrupt())?,
                signal(SignalKind::hangup())?,
            ],
            leave: signal(SignalKind::user_defined1())?,
        })
    }

    /// Tells the manager of signals until it has left.
    async fn relay(mut self, manager: &Handle, mut end: oneshot::Receiver<()>) {
        let [terminate, interrupt, hangup] = &mut self.stop;
        loop {
            tokio::select! {
                _ = &mut end => return,
                _ = terminate.recv() => manager.end(Ending::Stop),
                _ = interrupt.recv() => manager.end(Ending::Stop),
                _ = hangup.recv() => manager.end(Ending::Stop),
                _ = self.leave.recv() => manager.end(Ending::Leave),
            }
        }
    }
}

/// Makes the API's socket, for ourselves and a group.
fn listen(path: &Path, group: Option<&Group>) -> anyhow::Result<tokio::net::UnixListener> {
    let make = || {
        let listener = sockets::bind(path)?;
        sockets::share(path, group.map(|group| group.gid))?;
        listener.set_nonblocking(true)?;
        tokio::net::UnixListener::from_std(listener)
    };
    make().with_context(|| format!("Cannot listen on {}", path.display()))
}
