//! A host with mdevctl and vgpuctl.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;

use anyhow::{Context, Result, ensure};
use lab::progress::Progress;
use serde_json::Value;
use system_tests::vgpuctl::{Done, path as vgpuctl_path};
use system_tests::{Vgpud, wait_for};
use vgpud_host::test_util::write_executable;

pub fn real() -> Result<&'static Path> {
    static PATH: OnceLock<std::result::Result<PathBuf, String>> = OnceLock::new();
    let path =
        PATH.get_or_init(|| lab::mdevctl::open(&Progress::new()).map_err(|e| format!("{e:#}")));
    path.as_deref().map_err(|error| anyhow::anyhow!("{error}"))
}

/// A host with mdevctl, whose sysfs describes the same types as our daemon, and the daemon.
pub struct Both {
    pub root: tempfile::TempDir,
    pub vgpud: Vgpud,
}

impl Both {
    pub fn new() -> Result<Self> {
        let vgpud = Vgpud::start_with(&["--scripts-dir", "/nonexistent"])?;
        let both = Self { root: tempfile::tempdir()?, vgpud };
        for folder in [
            "etc/mdevctl.d",
            "usr/lib/mdevctl/scripts.d/callouts",
            "usr/lib/mdevctl/scripts.d/notifiers",
        ] {
            fs::create_dir_all(both.root.path().join(folder))?;
        }
        fs::create_dir_all(both.vgpud.config_dir().join("scripts.d/notifiers"))?;
        fs::create_dir_all(both.vgpud.config_dir().join("scripts.d/callouts"))?;
        fs::create_dir_all(both.root.path().join("sys/bus/mdev/devices"))?;
        for parent in both.vgpud.get("/v1/types")?.as_array().context("A list")? {
            for offered in parent["types"].as_array().context("A list")? {
                let word =
                    |of: &Value, name: &str| of[name].as_str().unwrap_or_default().to_owned();
                let folder = both.type_folder(&word(parent, "parent"), &word(offered, "name"));
                fs::create_dir_all(&folder)?;
                for name in ["name", "description", "device_api"] {
                    fs::write(folder.join(name), word(offered, name) + "\n")?;
                }
                let left = offered["available_instances"].to_string();
                fs::write(folder.join("available_instances"), left)?;
            }
        }
        Ok(both)
    }

    pub fn type_folder(&self, parent: &str, mdev_type: &str) -> PathBuf {
        let parents = self.root.path().join("sys/class/mdev_bus");
        parents.join(parent).join("mdev_supported_types").join(mdev_type)
    }

    /// Adds a device to sysfs, as the kernel does when mdevctl starts one.
    pub fn appear(&self, uuid: &str, mdev_type: &str) -> Result<()> {
        let device = self.root.path().join("sys/devices/soft0").join(uuid);
        fs::create_dir_all(&device)?;
        symlink(self.type_folder("soft0", mdev_type), device.join("mdev_type"))?;
        Ok(symlink(&device, self.root.path().join("sys/bus/mdev/devices").join(uuid))?)
    }

    /// Runs mdevctl's start of a vGPU with attributes, in place of the kernel: `create` is a pipe.
    /// The device and a file for each attribute appear before the pipe is read. Returns what
    /// mdevctl wrote to each attribute.
    pub fn start_with(&self, uuid: &str, mdev_type: &str, attrs: &[&str]) -> Result<Vec<String>> {
        let create = self.type_folder("soft0", mdev_type).join("create");
        nix::unistd::mkfifo(&create, nix::sys::stat::Mode::S_IRWXU)?;
        let mut command = Command::new(real()?);
        command.args(["start", "-u", uuid]).env("MDEVCTL_ENV_ROOT", self.root.path());
        let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        // mdevctl has found no such device, and waits for the pipe's reader.
        let opening = libc::SYS_openat.to_string();
        let call = format!("/proc/{}/syscall", child.id());
        let mut waits = 0;
        wait_for("mdevctl creates the device", || {
            let call = fs::read_to_string(&call).unwrap_or_default();
            waits = if call.split(' ').next() == Some(&opening) { waits + 1 } else { 0 };
            waits == 5
        })?;
        self.appear(uuid, mdev_type)?;
        let device = self.root.path().join("sys/bus/mdev/devices").join(uuid);
        for name in attrs {
            fs::write(device.join(name), "")?;
        }
        let created = fs::read_to_string(&create)?;
        ensure!(created == uuid, "no device was created: {created:?}");
        let output = child.wait_with_output()?;
        ensure!(output.status.success() && output.stdout.is_empty(), "{output:?}");
        fs::remove_file(create)?;
        attrs.iter().map(|name| Ok(fs::read_to_string(device.join(name))?)).collect()
    }

    /// Removes a device from sysfs, as the kernel does when mdevctl stops one.
    pub fn vanish(&self, uuid: &str) -> Result<()> {
        fs::remove_file(self.root.path().join("sys/bus/mdev/devices").join(uuid))?;
        Ok(fs::remove_dir_all(self.root.path().join("sys/devices/soft0").join(uuid))?)
    }

    pub fn real(&self, words: &[&str]) -> Result<Done> {
        let mut command = Command::new(real()?);
        command.args(words).env("MDEVCTL_ENV_ROOT", self.root.path()).env("RUST_BACKTRACE", "0");
        done(&mut command)
    }

    pub fn ours(&self, words: &[&str]) -> Result<Done> {
        let mut command = Command::new(vgpuctl_path()?);
        done(command.arg("--socket").arg(self.vgpud.api_socket()).args(words))
    }

    /// Runs a command line with both programs and returns the output, which must be equal.
    pub fn same(&self, line: &str) -> Result<Done> {
        let words: Vec<_> = line.split(' ').collect();
        let (theirs, ours) = (self.real(&words)?, self.ours(&words)?);
        ensure!(
            theirs.stdout == ours.stdout && (theirs.status == 0) == (ours.status == 0),
            "{line}:\nmdevctl: {theirs:?}\nvgpuctl: {ours:?}"
        );
        // Usage errors and failures have different statuses.
        ensure!(theirs.status != 2 || ours.status == 2, "{line}: {theirs:?}, {ours:?}");
        let (theirs, mine) = (self.tree(true)?, self.tree(false)?);
        ensure!(theirs == mine, "after {line}:\nmdevctl: {theirs:?}\nvgpuctl: {mine:?}");
        Ok(ours)
    }

    pub fn works(&self, line: &str) -> Result<String> {
        let done = self.same(line)?;
        ensure!(done.status == 0, "{line}: {done:?}");
        Ok(done.stdout)
    }

    pub fn fails(&self, line: &str) -> Result<()> {
        let done = self.same(line)?;
        ensure!(done.status != 0 && done.stdout.is_empty(), "{line}: {done:?}");
        Ok(())
    }

    /// Returns all definitions, which must be equal byte for byte.
    pub fn tree(&self, theirs: bool) -> Result<Vec<(String, String)>> {
        let mine = self.vgpud.config_dir();
        let top = if theirs { self.root.path().join("etc/mdevctl.d") } else { mine };
        let mut files = Vec::new();
        for parent in fs::read_dir(&top)? {
            let parent = parent?.path();
            if parent.ends_with("scripts.d") {
                continue;
            }
            for file in fs::read_dir(&parent)? {
                let file = file?.path();
                let name = file.strip_prefix(&top)?.display().to_string();
                files.push((name, fs::read_to_string(&file)?));
            }
        }
        files.sort();
        Ok(files)
    }

    /// Returns the folders of callout scripts.
    pub fn scripts(&self) -> [PathBuf; 2] {
        [
            self.root.path().join("usr/lib/mdevctl/scripts.d"),
            self.vgpud.config_dir().join("scripts.d"),
        ]
    }

    /// Installs a script for both programs.
    pub fn script(&self, name: &str, text: &str) -> Result<()> {
        for folder in self.scripts() {
            let script = format!("#!/bin/sh\nLOG=\"$(dirname \"$0\")/../log\"\n{text}\n");
            write_executable(&folder.join(name), &script)?;
        }
        Ok(())
    }

    /// Returns what the scripts logged, which must be equal.
    pub fn log(&self) -> Result<String> {
        let [theirs, ours] =
            self.scripts().map(|folder| fs::read_to_string(folder.join("log")).unwrap_or_default());
        ensure!(theirs == ours, "mdevctl's:\n{theirs}\nours:\n{ours}");
        for folder in self.scripts() {
            let _ = fs::remove_file(folder.join("log"));
        }
        Ok(ours)
    }
}

pub fn done(command: &mut Command) -> Result<Done> {
    let output = command.output().with_context(|| format!("{command:?}"))?;
    Ok(Done {
        status: output.status.code().context("The command was killed")?,
        stdout: String::from_utf8(output.stdout)?,
        stderr: String::from_utf8(output.stderr)?,
    })
}
