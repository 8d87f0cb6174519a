//! A VNC viewer that is installed here.

use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use tokio::process::{Child, Command as Started};

use super::door::Door;

/// One that is there.
#[derive(Debug)]
pub struct Viewer {
    kind: Kind,
    program: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// TigerVNC's, which connects to UNIX sockets too.
    Tiger,
    /// Another that is called `vncviewer`.
    Vnc,
    /// virt-viewer's.
    Remote,
    /// gtk-vnc's.
    Gtk,
}

impl Viewer {
    /// Looks for one, where there is a desktop for it.
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

    /// Whether it connects to UNIX sockets.
    pub fn takes_sockets(&self) -> bool {
        self.kind == Kind::Tiger
    }

    /// Its path, for people.
    pub fn name(&self) -> String {
        self.program.display().to_string()
    }

    /// Starts it on a door. It ends with this command.
    pub fn start(&self, door: &Door) -> io::Result<Child> {
        let mut command = Started::new(&self.program);
        match door {
            Door::Unix { path, .. } => drop(command.arg(path)),
            Door::Loopback { address, .. } => {
                let (ip, port) = (address.ip(), address.port());
                match self.kind {
                    Kind::Remote => drop(command.arg(format!("vnc://{address}"))),
                    // It counts displays, from the port that is the first one's.
                    Kind::Gtk => drop(command.arg(format!("{ip}:{}", i32::from(port) - 5900))),
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
    let said = Command::new(program).arg("--version").stdin(Stdio::null()).output();
    said.is_ok_and(|said| {
        [said.stdout, said.stderr]
            .iter()
            .any(|text| String::from_utf8_lossy(text).contains("TigerVNC"))
    })
}
