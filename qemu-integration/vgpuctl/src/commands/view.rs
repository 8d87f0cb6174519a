//! `view`: a vGPU's screen in a VNC viewer.
//!
//! `vgpud` serves screens on its control socket. VNC viewers cannot connect there, so this command
//! opens a UNIX socket of this user or a loopback port with a password, and forwards connections
//! while it runs.

mod listener;
mod viewer;

use std::fmt::Write as _;
use std::io::{self, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use mdev_core::ids::VgpuId;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::sleep;
use vgpud_api::OpenConsole;

use self::listener::{Listener, ViewerStream};
use self::viewer::Viewer;
use crate::cli::{Output, View};
use crate::failure::{Failure, say};
use vgpud_client::{Client, vgpu_path};

/// Number of wrong passwords that ends the command. There are 10^14 passwords.
const MAX_WRONG_PASSWORDS: u32 = 5;

/// Time without the vGPU after which the command ends. A transient vGPU of a domain is absent while
/// the domain restarts.
const ABSENCE_LIMIT: Duration = Duration::from_secs(10);
/// Interval of checks whether the vGPU exists.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Runs `view`.
pub async fn view(client: &Client, args: View) -> Result<Vec<u8>, Failure> {
    let vgpu = client.vgpu(args.vgpu.vgpu()?, None).await?;
    let (id, name) = (vgpu.uuid, vgpu.name);
    let path = format!("{}/console", vgpu_path(id));
    let monitor = args.monitor.as_deref().map(absolute).transpose()?;
    let request = OpenConsole { monitor };
    // Open the screen once to report errors before a viewer starts.
    drop(client.upgrade(&path, &request).await?);
    let viewer = if args.print { None } else { Viewer::find() };
    let loopback =
        args.tcp.is_some() || viewer.as_ref().is_some_and(|viewer| !viewer.supports_unix_sockets());
    let listener = if loopback {
        Listener::loopback(args.tcp.filter(|port| *port != 0)).await
    } else {
        Listener::unix(id)
    };
    let listener = listener.map_err(|error| {
        let remedy = if loopback { "name another port with --tcp=PORT" } else { "set TMPDIR" };
        Failure::Local(format!("Cannot listen for viewers: {error}; {remedy}"))
    })?;
    announce(&listener, args.output, (id, name.as_deref()), viewer.as_ref())?;
    let mut child = match &viewer {
        Some(viewer) => Some(viewer.start(&listener).map_err(|error| {
            let name = viewer.name();
            Failure::Local(format!("Cannot start {name}: {error}; use another viewer with --print"))
        })?),
        None => None,
    };
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::start)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::start)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(Failure::start)?;
    let gone = gone(client, id);
    tokio::pin!(gone);
    let (wrong_sender, mut wrong_passwords) = mpsc::unbounded_channel();
    let mut count = 0;
    loop {
        tokio::select! {
            _ = interrupt.recv() => return Ok(Vec::new()),
            _ = terminate.recv() => return Ok(Vec::new()),
            _ = hangup.recv() => return Ok(Vec::new()),
            () = &mut gone => return Err(Failure::Gone(id)),
            () = exited(child.as_mut()) => return Ok(Vec::new()),
            _ = wrong_passwords.recv() => {
                count += 1;
                if count == MAX_WRONG_PASSWORDS {
                    let message = format!(
                        "{MAX_WRONG_PASSWORDS} wrong passwords, possibly guesses; run the command again"
                    );
                    return Err(Failure::Local(message));
                }
            }
            stream = listener.accept() => match stream {
                Ok(stream) => {
                    let (client, path, request) = (client.clone(), path.clone(), request.clone());
                    let (password, wrong) = (listener.password(), wrong_sender.clone());
                    tokio::spawn(async move {
                        match forward(stream, &client, &path, &request, password).await {
                            Ok(true) => {}
                            // The receiver is gone if the command is ending.
                            Ok(false) => drop(wrong.send(())),
                            Err(failure) => say(&failure),
                        }
                    });
                }
                Err(error) => say(format_args!("Viewer refused: {error}")),
            },
        }
    }
}

/// Does the handshake with a viewer and forwards data in both directions until either side closes.
/// Returns `false` for a wrong password.
async fn forward(
    mut stream: Box<dyn ViewerStream>,
    client: &Client,
    path: &str,
    request: &OpenConsole,
    password: Option<[u8; 8]>,
) -> Result<bool, Failure> {
    let broken = |error: io::Error| Failure::Local(format!("Viewer refused: {error}"));
    match listener::handshake(&mut stream, password.as_ref()).await {
        Ok(true) => {}
        Ok(false) => return Ok(false),
        // The connection was only a probe.
        Err(error) if is_disconnect(&error) => return Ok(true),
        Err(error) => return Err(broken(error)),
    }
    let mut screen = client.upgrade(path, request).await?;
    rfb::handshake::join(&mut screen).await.map_err(broken)?;
    // Errors while forwarding are shown by the viewer.
    let _ = tokio::io::copy_bidirectional(&mut stream, &mut screen).await;
    Ok(true)
}

fn is_disconnect(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Waits until the vGPU is gone. While vgpud cannot be reached, the vGPU counts as existing.
async fn gone(client: &Client, id: VgpuId) {
    let mut since = None;
    loop {
        sleep(CHECK_INTERVAL).await;
        match client.find(id).await {
            Ok(None) => {
                if since.get_or_insert_with(Instant::now).elapsed() >= ABSENCE_LIMIT {
                    return;
                }
            }
            Ok(Some(_)) => since = None,
            Err(_) => {}
        }
    }
}

/// Waits until the viewer exits; for ever if there is none.
async fn exited(child: Option<&mut tokio::process::Child>) {
    match child {
        // An error of waiting also ends the command.
        Some(child) => drop(child.wait().await),
        None => std::future::pending().await,
    }
}

/// Prints how to connect.
fn announce(
    listener: &Listener,
    output: Output,
    (id, name): (VgpuId, Option<&str>),
    viewer: Option<&Viewer>,
) -> Result<(), Failure> {
    let password =
        listener.password().map(|password| String::from_utf8_lossy(&password).into_owned());
    let text = match output {
        Output::Json => {
            let (socket, address) = listener.names();
            let all = json!({
                "uuid": id, "socket": socket, "address": address, "password": password,
            });
            format!("{all}\n")
        }
        Output::Text => {
            // Writing to a String does not fail.
            let called = name.map_or_else(|| id.to_string(), str::to_owned);
            let mut text = format!("Screen of vGPU {called}, until this command ends (Ctrl-C):\n");
            for line in listener.viewer_commands() {
                let _ = writeln!(text, "  {line}");
            }
            if let Some(password) = password {
                let _ = writeln!(text, "Password: {password}");
            }
            if let Some(viewer) = viewer {
                let _ = writeln!(text, "Starting {}", viewer.name());
            }
            text
        }
    };
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Failure::output)
}

/// Returns the absolute path of a monitor. vgpud has another working directory.
pub fn absolute(monitor: &Path) -> Result<String, Failure> {
    match std::path::absolute(monitor) {
        Ok(path) => Ok(path.to_string_lossy().into_owned()),
        Err(error) => {
            let message =
                format!("Cannot resolve {}: {error}; give an absolute path", monitor.display());
            Err(Failure::Usage(message))
        }
    }
}
