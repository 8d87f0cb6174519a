//! QEMU that `vgpuctl vm upgrade` gives to a running VM.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::Lab;
use crate::guest::Guest;
use crate::host::Host;
use crate::qemu::{KEYS, VmSpec};

/// QEMU that has taken a VM over, killed when dropped.
#[derive(Debug)]
pub struct Successor {
    /// Command line in the guest.
    pub guest: Guest,
    pid: Pid,
    folder: PathBuf,
}

impl Successor {
    /// Gives the VM with this monitor and vGPU another QEMU, with the VM's configuration. `folder`
    /// is reserved for its sockets and logs. Returns how long the VM was paused, in milliseconds.
    pub fn take_over(
        (host, lab): (&Host, &Lab),
        vgpu: &str,
        monitor: &Path,
        spec: &VmSpec,
        folder: &Path,
    ) -> Result<(Self, u64)> {
        let output =
            host.command(&[])?.args(Self::args(lab, vgpu, monitor, spec, folder)?).output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}\n{}", said.trim(), host.log());
        let said: Value = serde_json::from_slice(&output.stdout)?;
        let pause = said["pause_ms"].as_u64().context("`vm upgrade` printed no pause")?;
        Ok((Self::of(&host.vgpu(vgpu)?, folder)?, pause))
    }

    /// Connects to the new QEMU, given the vGPU in `vgpuctl`'s JSON.
    pub fn of(vgpu: &Value, folder: &Path) -> Result<Self> {
        let guest = Guest::connect(&folder.join("agent.sock"))?;
        let pid = vgpu["vm"]["pid"].as_i64().context("The vGPU has no VM")?;
        Ok(Self { guest, pid: Pid::from_raw(i32::try_from(pid)?), folder: folder.to_owned() })
    }

    /// Returns the arguments of `vgpuctl` for that, which end with QEMU's command.
    pub fn args(
        lab: &Lab,
        vgpu: &str,
        monitor: &Path,
        spec: &VmSpec,
        folder: &Path,
    ) -> Result<Vec<OsString>> {
        let qemu = spec.command(lab, folder)?;
        let mut args: Vec<OsString> =
            ["vm", "upgrade", vgpu, "--output", "json"].map(Into::into).into();
        args.extend(["--monitor".into(), monitor.into(), "--new-monitor".into()]);
        args.extend([folder.join(KEYS).into(), "--".into(), "env".into()]);
        let envs = qemu.get_envs().filter_map(|(name, value)| Some((name, value?)));
        args.extend(envs.map(|(name, value)| {
            let mut set = name.to_owned();
            set.push("=");
            set.push(value);
            set
        }));
        args.push(qemu.get_program().to_owned());
        args.extend(qemu.get_args().map(ToOwned::to_owned));
        Ok(args)
    }

    /// Returns QEMU's process id.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Returns the socket of QEMU's monitor.
    pub fn keys(&self) -> PathBuf {
        self.folder.join(KEYS)
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        let _ = kill(self.pid, Signal::SIGKILL);
    }
}
