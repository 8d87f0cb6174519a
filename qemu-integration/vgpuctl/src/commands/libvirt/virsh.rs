//! virsh: how a domain is read and written. libvirt's own checks and its remote connections come with it.

use std::io::{self, Write};
use std::process::{Command, Output, Stdio};

use crate::failure::Failure;

/// A connection to libvirt, as virsh makes it anew for each command.
#[derive(Debug)]
pub struct Virsh<'a> {
    uri: &'a str,
}

/// How a domain is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// It runs, or is paused, or is being shut down.
    pub active: bool,
    /// It has a definition.
    pub persistent: bool,
}

impl<'a> Virsh<'a> {
    /// libvirt at an address such as `qemu:///system`.
    pub fn at(uri: &'a str) -> Self {
        Self { uri }
    }

    /// How a domain is.
    pub fn state(&self, domain: &str) -> Result<State, Failure> {
        let info = self.run(&["dominfo", domain], domain, "")?;
        let says = |name: &str| {
            let mut lines = info.lines().filter_map(|line| line.split_once(':'));
            let found = lines.find(|(key, _)| *key == name);
            found.map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
        };
        let active = !matches!(says("State").as_str(), "shut off" | "crashed");
        Ok(State { active, persistent: says("Persistent") == "yes" })
    }

    /// A domain's definition, with the secrets in it: without them, defining it again would lose them.
    pub fn definition(&self, domain: &str) -> Result<String, Failure> {
        self.run(&["dumpxml", "--inactive", "--security-info", domain], domain, "")
    }

    /// Replaces a domain's definition.
    pub fn define(&self, domain: &str, xml: &str) -> Result<(), Failure> {
        self.run(&["define", "/dev/stdin"], domain, xml).map(drop)
    }

    fn run(&self, args: &[&str], domain: &str, input: &str) -> Result<String, Failure> {
        let output = self.output(args, input).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => Failure::Local(
                "There is no virsh here; install libvirt's clients (Debian: apt install libvirt-clients), \
                 or use `vgpuctl libvirt-xml`"
                    .to_owned(),
            ),
            _ => Failure::Local(format!("Cannot run virsh: {error}; mend that, or use `vgpuctl libvirt-xml`")),
        })?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        Err(self.complaint(&String::from_utf8_lossy(&output.stderr), domain))
    }

    fn output(&self, args: &[&str], input: &str) -> io::Result<Output> {
        let mut command = Command::new("virsh");
        command.args(["--quiet", "--connect", self.uri]).args(args).env("LC_ALL", "C");
        let stdin = if input.is_empty() { Stdio::null() } else { Stdio::piped() };
        let mut child =
            command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // Where virsh stops reading, it says itself why.
            let _ = stdin.write_all(input.as_bytes());
        }
        child.wait_with_output()
    }

    /// What virsh complained of, as one line of our own.
    fn complaint(&self, text: &str, domain: &str) -> Failure {
        let Self { uri } = self;
        let lines: Vec<_> =
            text.lines().map(|line| line.trim_start_matches("error: ").trim()).collect();
        let reason =
            lines.iter().rev().find(|line| !line.is_empty()).copied().unwrap_or("no reason given");
        if lines.iter().any(|line| line.starts_with("failed to get domain")) {
            return Failure::NotFound(format!(
                "There is no domain '{domain}' at {uri}; `virsh -c {uri} list --all` names those that there are"
            ));
        }
        if lines.iter().any(|line| line.starts_with("failed to connect to the hypervisor")) {
            return Failure::Local(format!(
                "Cannot reach libvirt at {uri}: {reason}; start it (`systemctl start libvirtd`), \
                 or name another with --connect"
            ));
        }
        Failure::Local(format!("libvirt refuses domain '{domain}': {reason}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn complaints_become_one_line_that_says_what_to_do() {
        let complaint = |text: &str| Virsh::at("qemu:///system").complaint(text, "vm1");
        let none = complaint("error: failed to get domain 'vm1'\n\n");
        assert_eq!(none.exit_status(), 4);
        assert!(none.to_string().starts_with("There is no domain 'vm1' at qemu:///system; `virsh"));
        let down = complaint(
            "error: failed to connect to the hypervisor\nerror: Failed to connect socket to \
             '/var/run/libvirt/libvirt-sock': No such file or directory\n",
        );
        assert_eq!(
            down.to_string(),
            "Cannot reach libvirt at qemu:///system: Failed to connect socket to \
             '/var/run/libvirt/libvirt-sock': No such file or directory; start it (`systemctl start \
             libvirtd`), or name another with --connect"
        );
        let other =
            complaint("error: Failed to define domain from /dev/stdin\nerror: XML error: x\n");
        assert_eq!(other.to_string(), "libvirt refuses domain 'vm1': XML error: x");
        assert_eq!(complaint("").exit_status(), 1);
    }
}
