//! `vgpuctl run-vm` with the real daemon and the real QEMU.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result};
use integrate::qmp::Qmp;
use lab::progress::Progress;
use lab::root::Root;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use system_tests::vgpuctl::{path, vgpuctl};
use system_tests::{Vgpud, wait_for};

/// Boot sector that leaves QEMU with status 33 through `isa-debug-exit`: mov al, 16; out 0xf4, al.
const EXIT: &[u8] = &[0xb0, 0x10, 0xe6, 0xf4, 0xf4, 0xeb, 0xfd];
/// Boot sector that waits for ever: hlt; jmp.
const WAIT: &[u8] = &[0xf4, 0xeb, 0xfd];

/// A manager, QEMU and a folder for disks.
struct Host {
    vgpud: Vgpud,
    folder: tempfile::TempDir,
}

impl Host {
    fn new() -> Result<Self> {
        Ok(Self { vgpud: Vgpud::start()?, folder: tempfile::tempdir()? })
    }

    /// Writes a script that runs the lab's QEMU, which needs arguments of its own.
    fn qemu(&self) -> Result<PathBuf> {
        let command = Root::open(&Progress::new())?.qemu.command();
        let mut script = "#!/bin/sh\n".to_owned();
        for (name, value) in command.get_envs() {
            let value = value.unwrap_or_default().to_string_lossy();
            writeln!(script, "export {}='{value}'", name.to_string_lossy())?;
        }
        let words = std::iter::once(command.get_program()).chain(command.get_args());
        let words: Vec<_> = words.map(|word| format!("'{}'", word.to_string_lossy())).collect();
        writeln!(script, "exec {} \"$@\"", words.join(" "))?;
        let file = self.folder.path().join("qemu");
        vgpud_host::test_util::write_executable(&file, &script)?;
        Ok(file)
    }

    fn disk(&self, code: &[u8]) -> Result<PathBuf> {
        let mut image = vec![0; 1 << 20];
        image[..code.len()].copy_from_slice(code);
        image[510..512].copy_from_slice(&[0x55, 0xaa]);
        let file = self.folder.path().join("disk,1.raw");
        fs::write(&file, image)?;
        Ok(file)
    }

    fn command(&self, qemu: &Path, disk: &Path) -> Result<Command> {
        let mut command = Command::new(path()?);
        command.arg("--socket").arg(self.vgpud.api_socket()).arg("run-vm").arg(disk);
        command.args(["--name", "web1", "--core", "50", "--memory", "64", "--cpus", "1"]);
        command.arg("--qemu").arg(qemu).stdin(Stdio::null());
        Ok(command)
    }

    /// Starts a VM that waits, in a process group of its own as a shell does.
    fn start(&self) -> Result<Child> {
        let mut command = self.command(&self.qemu()?, &self.disk(WAIT)?)?;
        let monitor = self.folder.path().join("qmp.sock");
        command.args(["--", "-qmp", &format!("unix:{},server=on,wait=off", monitor.display())]);
        let child = command.process_group(0).spawn()?;
        // QEMU ends in order by a signal from here on.
        wait_for("the VM runs", || {
            let status = Qmp::connect(&monitor)
                .and_then(|mut monitor| monitor.execute("query-status", &json!({})));
            status.is_ok_and(|status| status["running"] == true)
        })?;
        Ok(child)
    }

    fn is_empty(&self) -> Result<bool> {
        Ok(self.vgpud.get("/v1/vgpus")? == json!([]))
    }
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_vm_has_a_vgpu_for_its_lifetime_and_returns_its_status() -> Result<()> {
    let host = Host::new()?;
    let mut command = host.command(&host.qemu()?, &host.disk(EXIT)?)?;
    let output = command.args(["--", "-device", "isa-debug-exit,iobase=0xf4,iosize=4"]).output()?;
    assert_eq!(output.status.code(), Some(33), "{output:?}");
    let said = String::from_utf8(output.stderr)?;
    let line = said.lines().next().context("No line")?;
    assert!(line.starts_with("vgpuctl: VM web1 with vGPU "), "{said}");
    assert!(line.contains(" of type SOFT-1Q on soft0, 64M of memory, 1 CPU, "), "{said}");
    assert!(line.ends_with("; its screen: `vgpuctl view web1`"), "{said}");
    assert!(host.is_empty()?);
    Ok(())
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn signals_end_the_vm_and_then_its_vgpu() -> Result<()> {
    let host = Host::new()?;
    for (signal, to_group) in [(Signal::SIGINT, true), (Signal::SIGTERM, false)] {
        let mut child = host.start()?;
        let vgpu = host.vgpud.show("web1")?;
        assert_eq!((&vgpu["vm_name"], &vgpu["warnings"]), (&json!("web1"), &json!([])));
        assert_eq!(vgpu["live_attrs"][0], json!({ "core": "50" }));
        let listed = vgpuctl(&host.vgpud, "list -v web1")?;
        assert!(listed.contains("VM: \"web1\", process "), "{listed}");
        let pid = Pid::from_raw(child.id().cast_signed());
        // A terminal sends Ctrl-C to all processes of the group.
        kill(if to_group { Pid::from_raw(-pid.as_raw()) } else { pid }, signal)?;
        let status = child.wait()?;
        assert_eq!(status.code(), Some(0), "QEMU ends in order: {status}");
        assert!(host.is_empty()?);
    }
    Ok(())
}

#[test]
fn mistakes_leave_no_vgpu() -> Result<()> {
    let host = Host::new()?;
    let disk = host.disk(WAIT)?;
    let nowhere = Path::new("/nonexistent/qemu");
    let no_name = Path::new(OsStr::from_bytes(b"/tmp/\xff"));
    for (command, status, words) in [
        (host.command(nowhere, &disk)?, 1, "Cannot run /nonexistent/qemu: No such file"),
        (host.command(nowhere, Path::new("/nonexistent.raw"))?, 4, "There is no disk image /none"),
        (host.command(nowhere, no_name)?, 2, "is not UTF-8; rename the disk image"),
    ] {
        let mut command = command;
        let output = command.output()?;
        let said = String::from_utf8(output.stderr)?;
        assert_eq!(output.status.code(), Some(status), "{said}");
        assert!(said.contains(words), "{said}");
        assert!(host.is_empty()?);
    }
    Ok(())
}
