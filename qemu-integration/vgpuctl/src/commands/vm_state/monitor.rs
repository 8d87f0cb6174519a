//! QEMU's monitor of a VM: a QMP socket, or libvirt's passage for its domains.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use integrate::qmp::{Qmp, QmpError};
use serde_json::{Value, json};

use crate::commands::libvirt::virsh::Virsh;
use crate::commands::saving::blocking;
use crate::failure::Failure;

/// Where a VM's monitor is.
#[derive(Clone, Debug)]
pub enum Address {
    /// QMP socket.
    Socket(PathBuf),
    /// Domain of libvirt.
    Domain {
        /// Connection URI of libvirt.
        uri: String,
        /// Uuid of the domain.
        uuid: String,
    },
}

/// Connection to a VM's monitor.
#[derive(Debug)]
pub enum Monitor {
    /// QMP socket.
    Socket(Qmp),
    /// Domain of libvirt.
    Domain {
        /// Connection URI of libvirt.
        uri: String,
        /// Uuid of the domain.
        uuid: String,
    },
}

impl Address {
    /// Connects to the monitor.
    pub async fn connect(&self) -> Result<Monitor, Failure> {
        match self.clone() {
            Self::Socket(path) => blocking(move || connect(&path)).await,
            Self::Domain { uri, uuid } => Ok(Monitor::Domain { uri, uuid }),
        }
    }

    /// Runs `body` with a connection of its own.
    pub async fn with(
        &self,
        body: impl FnOnce(&mut Monitor) -> Result<(), Failure> + Send + 'static,
    ) -> Result<(), Failure> {
        let mut monitor = self.connect().await?;
        blocking(move || body(&mut monitor)).await
    }
}

/// Connects to a QMP socket.
pub fn connect(path: &Path) -> Result<Monitor, Failure> {
    Qmp::connect(path).map(Monitor::Socket).map_err(|error| match error {
        QmpError::Connect { .. } => Failure::NotFound(error.to_string()),
        _ => Failure::Local(format!("{}: {error}", path.display())),
    })
}

impl Monitor {
    /// Runs a command and returns its result.
    pub fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, Failure> {
        match self {
            Self::Socket(qmp) => qmp.execute(command, arguments).map_err(|error| failed(&error)),
            Self::Domain { uri, uuid } => pass(uri, uuid, command, arguments, None),
        }
    }

    /// Runs commands of the human monitor and returns what they print.
    pub fn human(&mut self, lines: &[String]) -> Result<String, Failure> {
        match self {
            Self::Socket(qmp) => {
                let printed = lines.iter().map(|line| qmp.human(line));
                printed.collect::<Result<String, _>>().map_err(|error| failed(&error))
            }
            Self::Domain { uri, uuid } => Virsh::at(uri).human(uuid, lines),
        }
    }

    /// Passes a descriptor to QEMU, under a name for URIs such as `fd:NAME`.
    pub fn pass_descriptor(&mut self, name: &str, fd: OwnedFd) -> Result<(), Failure> {
        match self {
            Self::Socket(qmp) => qmp.pass_descriptor(name, fd).map_err(|error| failed(&error)),
            Self::Domain { uri, uuid } => {
                pass(uri, uuid, "getfd", &json!({ "fdname": name }), Some(fd)).map(drop)
            }
        }
    }

    /// Returns the VM's run state (QMP's `RunState`).
    pub fn status(&mut self) -> Result<String, Failure> {
        let status = self.execute("query-status", &json!({}))?;
        Ok(status["status"].as_str().unwrap_or_default().to_owned())
    }

    /// Pauses the VM.
    pub fn pause(&mut self) -> Result<(), Failure> {
        self.change("stop", "suspend")
    }

    /// Lets the VM continue.
    pub fn resume(&mut self) -> Result<(), Failure> {
        self.change("cont", "resume")
    }

    /// Ends QEMU.
    pub fn end(&mut self) -> Result<(), Failure> {
        self.change("quit", "destroy")
    }

    /// libvirt has commands of its own, so that it knows the domain's state.
    fn change(&mut self, command: &str, of_virsh: &str) -> Result<(), Failure> {
        match self {
            Self::Socket(_) => self.execute(command, &json!({})).map(drop),
            Self::Domain { uri, uuid } => Virsh::at(uri).change(of_virsh, uuid),
        }
    }
}

/// Runs a command by libvirt.
fn pass(
    uri: &str,
    uuid: &str,
    command: &str,
    arguments: &Value,
    fd: Option<OwnedFd>,
) -> Result<Value, Failure> {
    let request = json!({ "execute": command, "arguments": arguments });
    let mut reply = Virsh::at(uri).monitor(uuid, &request, fd)?;
    match reply["error"]["desc"].as_str() {
        Some(text) => Err(Failure::Local(format!("QEMU refused {command}: {text}"))),
        None => Ok(reply["return"].take()),
    }
}

/// Returns an error as a failure of this command.
pub fn failed(error: &dyn std::fmt::Display) -> Failure {
    Failure::Local(error.to_string())
}
