//! `view`: a vGPU's screen, live.
//!
//! `vgpud` serves it on its control socket, to those who may use that. This is the door that VNC viewers know: a UNIX
//! socket of this user's, or a port on loopback with a password. It is there while the command runs, and no longer.

mod door;
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
use vfio_user_server::api::model::OpenConsole;

use self::door::{Caller, Door};
use self::viewer::Viewer;
use crate::cli::{Output, View};
use crate::client::{Client, vgpu_path};
use crate::failure::Failure;

/// Wrong passwords after which the door is closed: nobody guesses one of 10^14 in five tries.
const MOST_WRONG: u32 = 5;

/// How long there may be no such vGPU before it is gone: a domain's own is made anew with the domain.
const GONE: Duration = Duration::from_secs(10);
/// How often it is asked after.
const LOOK: Duration = Duration::from_secs(1);

/// `view`
pub async fn view(client: &Client, args: View) -> Result<Vec<u8>, Failure> {
    let id = args.which.id();
    let id = id.ok_or_else(|| Failure::Usage("Name the vGPU: vgpuctl view UUID".into()))?;
    let path = format!("{}/console", vgpu_path(id));
    let monitor = args.monitor.as_deref().map(whole).transpose()?;
    let request = OpenConsole { monitor };
    // What cannot be is said now, and not to a viewer later.
    drop(client.upgrade(&path, &request).await?);
    let viewer = if args.print { None } else { Viewer::find() };
    let loopback = args.tcp.is_some() || viewer.as_ref().is_some_and(|one| !one.takes_sockets());
    let door = if loopback {
        Door::loopback(args.tcp.filter(|port| *port != 0)).await
    } else {
        Door::unix(id)
    };
    let door = door.map_err(|error| {
        let remedy = if loopback { "name another port with --tcp=PORT" } else { "set TMPDIR" };
        Failure::Local(format!("No viewer could connect: {error}; {remedy}"))
    })?;
    announce(&door, args.output, id.to_string().as_str(), viewer.as_ref())?;
    let mut child = match &viewer {
        Some(viewer) => Some(viewer.start(&door).map_err(|error| {
            let name = viewer.name();
            Failure::Local(format!("Cannot start {name}: {error}; view with another: --print"))
        })?),
        None => None,
    };
    let mut interrupt = signal(SignalKind::interrupt()).map_err(Failure::start)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(Failure::start)?;
    let mut hangup = signal(SignalKind::hangup()).map_err(Failure::start)?;
    let gone = gone(client, id);
    tokio::pin!(gone);
    let (wrong, mut wrongs) = mpsc::unbounded_channel();
    let mut count = 0;
    loop {
        tokio::select! {
            _ = interrupt.recv() => return Ok(Vec::new()),
            _ = terminate.recv() => return Ok(Vec::new()),
            _ = hangup.recv() => return Ok(Vec::new()),
            () = &mut gone => return Err(Failure::Gone(id)),
            () = exited(child.as_mut()) => return Ok(Vec::new()),
            _ = wrongs.recv() => {
                count += 1;
                if count == MOST_WRONG {
                    let what = format!("{MOST_WRONG} wrong passwords: somebody may be guessing; view it anew");
                    return Err(Failure::Local(what));
                }
            }
            caller = door.accept() => match caller {
                Ok(caller) => {
                    let (client, path, request) = (client.clone(), path.clone(), request.clone());
                    let (password, wrong) = (door.password(), wrong.clone());
                    tokio::spawn(async move {
                        match show(caller, &client, &path, &request, password).await {
                            Ok(true) => {}
                            // Nobody listens any more where the command is ending.
                            Ok(false) => drop(wrong.send(())),
                            Err(what) => eprintln!("vgpuctl: {what}"),
                        }
                    });
                }
                Err(error) => eprintln!("vgpuctl: A viewer is turned away: {error}"),
            },
        }
    }
}

/// Lets one viewer in and passes on what both ends say; `false`: its password was wrong.
async fn show(
    mut caller: Caller,
    client: &Client,
    path: &str,
    request: &OpenConsole,
    password: Option<[u8; 8]>,
) -> Result<bool, Failure> {
    let broken = |error: io::Error| Failure::Local(format!("A viewer is turned away: {error}"));
    match door::greet(&mut caller, password.as_ref()).await {
        Ok(true) => {}
        Ok(false) => return Ok(false),
        // Somebody looked whether there is a door.
        Err(error) if has_left(&error) => return Ok(true),
        Err(error) => return Err(broken(error)),
    }
    let mut screen = client.upgrade(path, request).await?;
    vfio_user_server::console::rfb::handshake::join(&mut screen).await.map_err(broken)?;
    // How it ended says nothing that the viewer has not shown.
    let _ = tokio::io::copy_bidirectional(&mut caller, &mut screen).await;
    Ok(true)
}

fn has_left(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    matches!(error.kind(), BrokenPipe | ConnectionReset | UnexpectedEof)
}

/// Waits until there is no such vGPU any more. While vgpud is away, that cannot be known.
async fn gone(client: &Client, id: VgpuId) {
    let mut since = None;
    loop {
        sleep(LOOK).await;
        match client.find(id).await {
            Ok(None) => {
                if since.get_or_insert_with(Instant::now).elapsed() >= GONE {
                    return;
                }
            }
            Ok(Some(_)) => since = None,
            Err(_) => {}
        }
    }
}

async fn exited(child: Option<&mut tokio::process::Child>) {
    match child {
        // It has ended, or cannot be waited for: either way it is over.
        Some(child) => drop(child.wait().await),
        None => std::future::pending().await,
    }
}

/// Says how to connect, before anything else happens.
fn announce(door: &Door, output: Output, id: &str, viewer: Option<&Viewer>) -> Result<(), Failure> {
    let password = door.password().map(|password| String::from_utf8_lossy(&password).into_owned());
    let text = match output {
        Output::Json => {
            let (socket, address) = door.names();
            let all = json!({
                "uuid": id, "socket": socket, "address": address, "password": password,
            });
            format!("{all}\n")
        }
        Output::Text => {
            // A String takes whatever is written to it.
            let mut text = format!("The screen of vGPU {id}, until this command ends (Ctrl-C):\n");
            for line in door.ways() {
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

/// A monitor's path as `vgpud` can find it, which works somewhere else.
pub fn whole(monitor: &Path) -> Result<String, Failure> {
    match std::path::absolute(monitor) {
        Ok(path) => Ok(path.to_string_lossy().into_owned()),
        Err(error) => {
            let what =
                format!("Cannot tell where {} is: {error}; give its whole path", monitor.display());
            Err(Failure::Usage(what))
        }
    }
}
