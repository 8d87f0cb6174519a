//! Access to libvirt by virsh, which has libvirt's checks and supports remote connections.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

use crate::failure::Failure;

/// Access to one libvirt daemon. Each command opens a new connection.
#[derive(Debug)]
pub struct Virsh<'a> {
    uri: &'a str,
}

/// State of a domain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// Whether the domain is running, paused or shutting down.
    pub active: bool,
    /// Whether the domain has a definition.
    pub persistent: bool,
}

impl<'a> Virsh<'a> {
    /// Creates access to libvirt at a URI such as `qemu:///system`.
    pub fn at(uri: &'a str) -> Self {
        Self { uri }
    }

    /// Returns the state of a domain.
    pub fn state(&self, domain: &str) -> Result<State, Failure> {
        let info = self.run(&["dominfo", domain], domain, "")?;
        let field = |name: &str| {
            let mut lines = info.lines().filter_map(|line| line.split_once(':'));
            let found = lines.find(|(key, _)| *key == name);
            found.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let active = !matches!(field("State").as_str(), "shut off" | "crashed");
        Ok(State { active, persistent: field("Persistent") == "yes" })
    }

    /// Returns a domain's definition with its secrets, which defining it again would otherwise
    /// remove.
    pub fn definition(&self, domain: &str) -> Result<String, Failure> {
        self.run(&["dumpxml", "--inactive", "--security-info", domain], domain, "")
    }

    /// Replaces a domain's definition.
    pub fn define(&self, domain: &str, xml: &str) -> Result<(), Failure> {
        self.run(&["define", "/dev/stdin"], domain, xml).map(drop)
    }

    /// Returns the XML with which the running domain can be started again, with its secrets.
    pub fn running(&self, domain: &str) -> Result<String, Failure> {
        self.run(&["dumpxml", "--migratable", "--security-info", domain], domain, "")
    }

    /// Returns a domain's uuid.
    pub fn uuid(&self, domain: &str) -> Result<String, Failure> {
        Ok(self.run(&["domuuid", domain], domain, "")?.trim().to_owned())
    }

    /// Pauses, continues or ends a domain: `suspend`, `resume`, `destroy`.
    pub fn change(&self, what: &str, domain: &str) -> Result<(), Failure> {
        self.run(&[what, domain], domain, "").map(drop)
    }

    /// Starts a domain with this XML, paused. Its definition stays as it is.
    pub fn create_paused(&self, domain: &str, xml: &str) -> Result<(), Failure> {
        self.run(&["create", "/dev/stdin", "--paused"], domain, xml).map(drop)
    }

    /// Passes a command to QEMU's monitor, with a descriptor. Returns QEMU's reply.
    pub fn monitor(
        &self,
        domain: &str,
        command: &Value,
        fd: Option<OwnedFd>,
    ) -> Result<Value, Failure> {
        let command = command.to_string();
        let mut args = vec!["qemu-monitor-command", "--domain", domain];
        // The descriptor is the standard input of virsh.
        let input = fd.map(|fd| {
            args.extend(["--pass-fds", "0"]);
            Stdio::from(fd)
        });
        args.extend(["--cmd", &command]);
        let output = self.command(&args).stdin(input.unwrap_or_else(Stdio::null)).output();
        let reply = self.succeeded(output, domain)?;
        serde_json::from_str(&reply).map_err(|error| {
            Failure::Local(format!("libvirt passes no reply of QEMU for '{domain}': {error}"))
        })
    }

    /// Runs commands of QEMU's human monitor and returns what they print. The domain is a uuid.
    pub fn human(&self, uuid: &str, lines: &[String]) -> Result<String, Failure> {
        let command = ["qemu-monitor-command", "--domain", uuid, "--hmp", "--cmd"].join(" ");
        let one = |line: &String| [command.as_str(), " '", line, "'"].concat();
        let all = lines.iter().map(one).collect::<Vec<_>>().join("; ");
        let output = self.command(&[&all]).stdin(Stdio::null()).output();
        // The status of virsh is that of the last command.
        match output {
            Ok(output) if !output.stderr.is_empty() => {
                Err(self.failure(&String::from_utf8_lossy(&output.stderr), uuid))
            }
            output => self.succeeded(output, uuid),
        }
    }

    fn run(&self, args: &[&str], domain: &str, input: &str) -> Result<String, Failure> {
        self.succeeded(self.output(args, input), domain)
    }

    /// Returns what virsh has printed, or its failure.
    fn succeeded(&self, output: io::Result<Output>, domain: &str) -> Result<String, Failure> {
        let output = output.map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Failure::Local(
                "There is no virsh on this host; install libvirt's clients (Debian: apt install \
                 libvirt-clients), or use `vgpuctl libvirt-xml`"
                    .to_owned(),
            ),
            _ => Failure::Local(format!(
                "Cannot run virsh: {error}; fix the cause, or use `vgpuctl libvirt-xml`"
            )),
        })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(self.failure(&String::from_utf8_lossy(&output.stderr), domain))
    }

    fn output(&self, args: &[&str], input: &str) -> io::Result<Output> {
        let mut command = self.command(args);
        let stdin = if input.is_empty() { Stdio::null() } else { Stdio::piped() };
        let mut child = command.stdin(stdin).spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // If virsh stops reading, its own message has the reason.
            let _ = stdin.write_all(input.as_bytes());
        }
        child.wait_with_output()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new("virsh");
        command.args(["--quiet", "--connect", self.uri]).args(args).env("LC_ALL", "C");
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Converts the error messages of virsh to a one-line failure.
    fn failure(&self, text: &str, domain: &str) -> Failure {
        let Self { uri } = self;
        let lines: Vec<_> =
            text.lines().map(|line| line.trim_start_matches("error: ").trim()).collect();
        let reason =
            lines.iter().rev().find(|line| !line.is_empty()).copied().unwrap_or("no reason given");
        if lines.iter().any(|line| line.starts_with("failed to get domain")) {
            return Failure::NotFound(format!(
                "There is no domain '{domain}' at {uri}; `virsh -c {uri} list --all` lists the domains"
            ));
        }
        if lines.iter().any(|line| line.starts_with("failed to connect to the hypervisor")) {
            return Failure::Local(format!(
                "Cannot reach libvirt at {uri}: {reason}; start it (`systemctl start libvirtd`), \
                 or name another URI with --connect"
            ));
        }
        Failure::Local(format!("libvirt refuses domain '{domain}': {reason}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn virsh_errors_become_one_line_with_the_remedy() {
        let failure = |text: &str| Virsh::at("qemu:///system").failure(text, "vm1");
        let none = failure("error: failed to get domain 'vm1'\n\n");
        assert_eq!(none.exit_status(), 4);
        assert!(none.to_string().starts_with("There is no domain 'vm1' at qemu:///system; `virsh"));
        let down = failure(
            "error: failed to connect to the hypervisor\nerror: Failed to connect socket to \
             '/var/run/libvirt/libvirt-sock': No such file or directory\n",
        );
        assert_eq!(
            down.to_string(),
            "Cannot reach libvirt at qemu:///system: Failed to connect socket to \
             '/var/run/libvirt/libvirt-sock': No such file or directory; start it (`systemctl start \
             libvirtd`), or name another URI with --connect"
        );
        let other =
            failure("error: Failed to define domain from /dev/stdin\nerror: XML error: x\n");
        assert_eq!(other.to_string(), "libvirt refuses domain 'vm1': XML error: x");
        assert_eq!(failure("").exit_status(), 1);
    }
}
