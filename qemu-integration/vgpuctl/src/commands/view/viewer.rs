//! Installed VNC viewers.

use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tokio::process::{Child, Command as Started};

use super::listener::{FIRST_PORT, Listener};

/// Installed VNC viewer.
#[derive(Debug)]
pub struct Viewer {
    kind: Kind,
    program: PathBuf,
}

/// Program, which determines the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// `vncviewer` of TigerVNC, which supports UNIX sockets.
    Tiger,
    /// Another `vncviewer`.
    Vnc,
    /// `remote-viewer` of virt-viewer.
    Remote,
    /// `gvncviewer` of gtk-vnc.
    Gtk,
}

impl Viewer {
    /// Finds an installed viewer. Returns `None` without a desktop session.
    pub fn find() -> Option<Self> {
        let desktop =
            ["WAYLAND_DISPLAY", "DISPLAY"].iter().any(|name| std::env::var_os(name).is_some());
        if !desktop {
            return None;
        }
        let kinds =
            [("vncviewer", Kind::Vnc), ("remote-viewer", Kind::Remote), ("gvncviewer", Kind::Gtk)];
        kinds.into_iter().find_map(|(name, kind)| {
            let program = in_path(name)?;
            let kind = if kind == Kind::Vnc && is_tiger(&program) { Kind::Tiger } else { kind };
            Some(Self { kind, program })
        })
    }

    /// Returns whether the viewer supports UNIX sockets.
    pub fn supports_unix_sockets(&self) -> bool {
        self.kind == Kind::Tiger
    }

    /// Returns the path of the program.
    pub fn name(&self) -> String {
        self.program.display().to_string()
    }

    /// Starts the viewer on a listener. The viewer ends with this process.
    pub fn start(&self, listener: &Listener) -> io::Result<Child> {
        let mut command = Started::new(&self.program);
        match listener {
            Listener::Unix { path, .. } => drop(command.arg(path)),
            Listener::Loopback { address, .. } => {
                let (ip, port) = (address.ip(), address.port());
                match self.kind {
                    Kind::Remote => drop(command.arg(format!("vnc://{address}"))),
                    // gvncviewer takes a display number instead of a port.
                    Kind::Gtk => drop(
                        command.arg(format!("{ip}:{}", i32::from(port) - i32::from(FIRST_PORT))),
                    ),
                    Kind::Tiger | Kind::Vnc => drop(command.arg(format!("{ip}::{port}"))),
                }
            }
        }
        command.stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        command.spawn()
    }
}

fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|folder| folder.join(name)).find(|file| file.is_file())
}

fn is_tiger(program: &PathBuf) -> bool {
    let output = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    output.is_ok_and(|output| {
        [output.stdout, output.stderr]
            .iter()
            .any(|text| String::from_utf8_lossy(text).contains("TigerVNC"))
    })
}
