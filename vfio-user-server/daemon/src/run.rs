//! The process `vgpud run`: lock, sockets, signals, and the wiring of manager, API, callout scripts
//! and web console.

use std::fs;
use std::net::TcpListener;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use mdev_core::definition::store::SCRIPTS;
use mdev_core::ids::VgpuId;
use nix::sys::stat::{Mode, umask};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::api::Api;
use crate::api::access::{Group, Rules};
use crate::api::listener::{self, Runtimes};
use crate::api::router::router;
use crate::callouts::Callouts;
use crate::child_logs;
use crate::manager::{self, Ending, Handle, Manager, RunDir, Watcher, sockets};
use crate::service::Service;
use crate::web_console::request_guard::Address;
use crate::web_console::server;
use crate::web_console::sessions::Sessions;
use crate::{http_server, io_runtime, spawn, systemd};
use vgpud_api::Version;

/// Limit of the time in which the manager's thread ends its work after a signal. It takes 5 s to
/// stop workers and GPU processes that do not end, after one request to a GPU process that does not
/// answer, which takes 4 s.
const END_LIMIT: Duration = Duration::from_secs(15);

/// Why the manager cannot start on a host that has no more threads.
const NO_THREADS: &str = "Cannot start the manager's threads";

/// Limit of threads that block on a worker's reply.
const MAX_BLOCKING_THREADS: usize = 64;

/// The same for requests of users who may read only.
const MAX_BLOCKING_THREADS_FOR_READERS: usize = 16;

/// Configuration of `vgpud run`.
#[derive(Clone, Debug)]
pub struct Config {
    /// Directory of sockets and of the lock.
    pub run_dir: PathBuf,
    /// Directory of callout scripts from packages. The host's own scripts are in the directory of
    /// definitions.
    pub scripts_dir: PathBuf,
    /// Parents, definitions and users.
    pub manager: manager::Config,
    /// Permissions on the control socket.
    pub access: Rules,
    /// Address of the web console.
    pub web: Option<Address>,
}

/// Runs the manager until a signal ends it. SIGTERM, SIGINT and SIGHUP stop all workers and GPU
/// processes; SIGUSR1 ends the manager alone, and the next manager adopts the processes.
pub fn run(config: &Config) -> anyhow::Result<()> {
    spawn::reserve_descriptors().context("Cannot reserve descriptors")?;
    let files = http_server::raise_file_limit();
    // Files are private unless a mode is set explicitly.
    umask(Mode::from_bits_truncate(0o077));
    let run_dir = RunDir::create(&config.run_dir)?;
    let lock = run_dir.lock()?;
    // The control socket outlives a failure after its creation, so the console's address is tried
    // before.
    let (web, sessions) = config.web.map(listen_web).transpose()?.unzip();
    let runtime = io_runtime::new(MAX_BLOCKING_THREADS).context("Cannot start the I/O runtime")?;
    let _context = runtime.enter();
    let signals = Signals::new().context("Cannot start the I/O runtime")?;
    let (handle, inbox) = manager::channel();
    let watcher = Watcher::new(runtime.handle().clone(), &handle);
    let mut manager = Manager::new(&config.manager, run_dir.clone(), watcher)?;
    let socket = run_dir.api_socket();
    // systemd creates and removes the socket that it passes.
    let inherited = systemd::listener()?;
    let owns_socket = inherited.is_none();
    let listener = match inherited {
        Some(listener) => listener,
        None => listen_api(&socket, config.access.readers.as_ref())?,
    };
    manager.begin();
    let config_dir = &config.manager.config_dir;
    let callouts = Callouts::new(vec![config.scripts_dir.clone(), config_dir.join(SCRIPTS)]);
    let auto = start_auto(&mut manager, &callouts);
    let questions = io_runtime::start("statuses", 1).context(NO_THREADS)?;
    let service = Service::new(handle.clone(), callouts, version(config, &run_dir), questions);
    if let (Some(web), Some(sessions)) = (web, sessions.clone()) {
        server::serve(web, service.clone(), sessions, files)
            .context("Cannot serve the web console")?;
    }
    let api = Api { service: service.clone(), web_sessions: sessions };
    let router = router(api, config.access.clone());
    let runtimes = Runtimes {
        admins: runtime.handle().clone(),
        others: io_runtime::start("readers", MAX_BLOCKING_THREADS_FOR_READERS)
            .context(NO_THREADS)?,
    };
    let rules = config.access.clone();
    listener::start(listener, router, move |peer| rules.level(peer), runtimes, files)
        .context(NO_THREADS)?;
    let (ended, end) = oneshot::channel::<()>();
    let thread = spawn::thread("manager", move || {
        manager.serve(&inbox);
        drop(ended);
    })
    .context(NO_THREADS)?;
    log::info!("Listening on {}", socket.display());
    systemd::ready();
    let has_ended = runtime.block_on(async {
        tokio::spawn(service.start_all(auto));
        signals.relay(&handle, end).await
    });
    if owns_socket {
        // The file may be gone already.
        let _ = fs::remove_file(&socket);
    }
    child_logs::drain();
    drop(lock);
    // The end of the process ends all tasks and threads. Neither a thread that asks a worker nor
    // the close of a listener, with what is in its connections, is waited for.
    std::mem::forget(runtime);
    if !has_ended {
        let seconds = END_LIMIT.as_secs();
        bail!("The manager waits for a process, and ends after {seconds} s without it");
    }
    // A panic of the manager's thread is a bug and ends the process as one.
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
    Ok(())
}

/// Starts vGPUs with start policy `auto`. With callout scripts, each start waits for them; the
/// vGPUs are returned, to be started while the API serves requests.
fn start_auto(manager: &mut Manager, callouts: &Callouts) -> Vec<VgpuId> {
    if callouts.exist() {
        return manager.auto_start();
    }
    manager.start_all_auto();
    Vec::new()
}

fn version(config: &Config, run_dir: &RunDir) -> Version {
    Version {
        version: env!("CARGO_PKG_VERSION").into(),
        api: "v1".into(),
        pid: std::process::id(),
        run_dir: run_dir.root().to_string_lossy().into_owned(),
        config_dir: config.manager.config_dir.to_string_lossy().into_owned(),
    }
}

/// Signals that end the manager.
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

    /// Passes signals to the manager until it has ended. Returns false if it has not ended within
    /// [`END_LIMIT`] after the first one.
    async fn relay(mut self, manager: &Handle, mut end: oneshot::Receiver<()>) -> bool {
        let [terminate, interrupt, hangup] = &mut self.stop;
        let mut deadline = None;
        loop {
            let late = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline).await,
                    None => std::future::pending().await,
                }
            };
            let ending = tokio::select! {
                _ = &mut end => return true,
                () = late => return false,
                _ = terminate.recv() => Ending::Stop,
                _ = interrupt.recv() => Ending::Stop,
                _ = hangup.recv() => Ending::Stop,
                _ = self.leave.recv() => Ending::Leave,
            };
            manager.end(ending);
            deadline.get_or_insert_with(|| Instant::now() + END_LIMIT);
        }
    }
}

/// Creates the control socket, for this user and a group.
fn listen_api(path: &Path, group: Option<&Group>) -> anyhow::Result<UnixListener> {
    sockets::listen_for_group(path, group.map(|group| group.gid))
        .with_context(|| format!("Cannot listen on {}", path.display()))
}

/// Listens for browsers. A port that another program has is tried again later: it must not keep
/// vgpud from starting.
fn listen_web(address: Address) -> anyhow::Result<(Option<TcpListener>, Arc<Sessions>)> {
    let cannot = || format!("Cannot serve the web console on {}", address.0);
    match server::listen(address) {
        Ok(listener) => {
            let bound = listener.local_addr().with_context(cannot)?;
            Ok((Some(listener), Arc::new(Sessions::new(bound))))
        }
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            log::error!("{}: {error}; trying again until it succeeds", cannot());
            let sessions = Sessions::new(address.0);
            sessions.set_failure(Some(error.to_string()));
            Ok((None, Arc::new(sessions)))
        }
        Err(error) => Err(error).with_context(cannot),
    }
}
