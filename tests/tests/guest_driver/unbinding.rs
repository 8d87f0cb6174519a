//! Programs that use each file operation while the vGPU goes and comes back.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use lab::cleanup::Scratch;
use lab::initramfs;
use lab::kernel::Kernel;
use serde_json::json;
use system_tests::Vgpud;
use system_tests::guest_vm::{self, Guest, Size};

use crate::inside::{self, GO, READY};
use crate::kernels;

/// Type of the vGPUs.
const TYPE: &str = "SOFT-1C";

const DRIVER: &str = "/sys/bus/pci/drivers/tessera_guest";

/// Times that the vGPU goes while the programs run.
const ROUNDS: u32 = 12;

/// A VM with this program, whose vGPU the module has.
pub struct RaceVm {
    pub guest: Guest,
    /// PCI address of the vGPU.
    device: String,
    _vgpud: Vgpud,
    _scratch: Scratch,
}

impl RaceVm {
    /// Boots a kernel with a module.
    pub fn boot(kernel: &Kernel, module: &Path, size: Size) -> Result<Self> {
        let scratch = Scratch::new()?;
        let vgpud = Vgpud::start_with_log(&[], &scratch.path().join("log"))?;
        let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true }))?;
        let program = initramfs::stripped(&std::env::current_exe()?, scratch.path())?;
        let mut files = vec![("bin/race".to_owned(), program.clone())];
        files.extend(guest_vm::linked(&program)?);
        let socket = vgpud.vfio_socket(&uuid);
        let folder = scratch.path();
        let mut guest = Guest::boot_with(kernel, module, &files, Some(&socket), folder, size)?;
        guest.run("insmod /module.ko")?;
        let device = guest.run(&format!("cd {DRIVER} && echo 0000:*"))?.trim().to_owned();
        Ok(Self { guest, device, _vgpud: vgpud, _scratch: scratch })
    }

    /// Boots Debian's kernel, unless it cannot be fetched.
    fn boot_debian() -> Result<Option<Self>> {
        let Some(kernels) = kernels()? else { return Ok(None) };
        let target = kernels.stable()?;
        let module = kernels.build(&target)?;
        Self::boot(&target.kernel, &module, Size { cpus: 2, ..Size::default() }).map(Some)
    }

    /// Starts one of [`inside`], and waits until it is ready. Returns its process id.
    fn start(&mut self, name: &str, log: &str) -> Result<String> {
        self.start_after("true", name, log)
    }

    /// Starts one of [`inside`] after a command in the same process.
    fn start_after(&mut self, first: &str, name: &str, log: &str) -> Result<String> {
        let mark = inside::MARK;
        let command =
            format!("env {mark}=1 /bin/race --exact inside::{name} --ignored --nocapture");
        let pid = self.guest.run(&format!(
            "rm -f {READY} {GO}; sh -c '{first}; exec {command}' > {log} 2>&1 & echo $!"
        ))?;
        let pid = pid.trim().to_owned();
        let ready = format!("while [ ! -e {READY} ] && kill -0 {pid}; do sleep 0.1; done");
        self.guest.run(&format!("{ready}; [ -e {READY} ] || {{ cat {log} >&2; false; }}"))?;
        Ok(pid)
    }

    /// Ends such a program, which must pass, and returns what it prints.
    fn finish(&mut self, pid: &str, log: &str) -> Result<String> {
        self.guest
            .run(&format!("touch {GO}; while kill -0 {pid} 2> /dev/null; do sleep 0.1; done"))?;
        let output = self.guest.run(&format!("cat {log}"))?;
        ensure!(output.contains("1 passed"), "{output}\n{}", self.guest.vm.console());
        Ok(output)
    }

    fn unbind(&mut self) -> Result<()> {
        let device = &self.device;
        self.guest.run(&format!("echo {device} > {DRIVER}/unbind")).map(drop)
    }

    fn bind(&mut self) -> Result<()> {
        let device = &self.device;
        self.guest.run(&format!("echo {device} > {DRIVER}/bind")).map(drop)
    }

    fn reset(&mut self) -> Result<()> {
        let device = &self.device;
        self.guest.run(&format!("echo 1 > /sys/bus/pci/devices/{device}/reset")).map(drop)
    }

    /// Lets an ioctl wait for its argument while the vGPU goes: first for good, then until another
    /// session has begun.
    pub fn withheld(&mut self) -> Result<()> {
        for again in [false, true] {
            let pid = self.start("withholds_an_argument", "/tmp/log")?;
            self.unbind()?;
            if again {
                self.bind()?;
                self.guest.run(": < /dev/nvidiactl")?;
            }
            self.finish(&pid, "/tmp/log")?;
            self.guest.check_log()?;
            if !again {
                self.bind()?;
            }
        }
        Ok(())
    }

    /// Runs all operations while the vGPU goes `rounds` times, by unbinding and by reset. A second
    /// program is killed each time. Checks that each operation succeeded and failed meanwhile.
    pub fn race(&mut self, rounds: u32) -> Result<()> {
        let pid = self.start("races", "/tmp/race")?;
        for round in 0..rounds {
            let command = format!("{}=1 /bin/race --exact inside::races --ignored", inside::MARK);
            let pause = format!("0.{:02}", 20 + round * 37 % 80);
            let other = format!("env {command} > /dev/null 2>&1 & echo $! > /tmp/other");
            self.guest.run(&format!("{other}; sleep {pause}"))?;
            if round % 3 == 2 {
                self.reset()?;
            } else {
                self.unbind()?;
                self.bind()?;
            }
            self.guest.run(&format!("sleep {pause}; kill -9 $(cat /tmp/other)"))?;
            self.guest.check_log().with_context(|| format!("In round {round}"))?;
        }
        let output = self.finish(&pid, "/tmp/race")?;
        println!("{output}");
        let counts = counts(&output);
        for (name, _) in inside::OPERATIONS {
            let done = counts.get(name).with_context(|| format!("No count of {name}: {output}"))?;
            ensure!(*done > 0, "No operation `{name}` succeeded: {output}");
        }
        self.guest.run("while fuser /dev/nvidia* > /dev/null 2>&1; do sleep 0.1; done")?;
        self.guest.run("rmmod tessera_guest")?;
        self.guest.check_log()
    }
}

/// Returns how often each operation succeeded.
fn counts(output: &str) -> BTreeMap<&str, u32> {
    let pairs = output.lines().filter_map(|line| line.split_once('='));
    pairs.filter_map(|(name, rest)| Some((name, rest.split(' ').next()?.parse().ok()?))).collect()
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn an_ioctl_whose_argument_is_withheld_fails_when_the_vgpu_has_gone() -> Result<()> {
    let Some(mut vm) = RaceVm::boot_debian()? else { return Ok(()) };
    vm.withheld()?;
    vm.guest.run("rmmod tessera_guest")?;
    vm.guest.check_log()
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_reader_whose_memory_is_withheld_keeps_no_program_from_the_vgpu() -> Result<()> {
    let Some(mut vm) = RaceVm::boot_debian()? else { return Ok(()) };
    let pid = vm.start("withholds_the_memory_of_a_read", "/tmp/log")?;
    vm.reset()?;
    // Starts a session, which replaces the files' content.
    vm.guest.run("timeout 30 sh -c ': < /dev/nvidiactl'")?;
    vm.finish(&pid, "/tmp/log")?;
    vm.guest.run("grep NVRM /proc/driver/nvidia/version && rmmod tessera_guest")?;
    vm.guest.check_log()
}

/// Length of a request's buffer, with the page that has the addresses of the others.
const BUFFER: u64 = 33 << 12;

/// Number of buffers that the module keeps for later requests, of any program.
const KEPT: u64 = 8;

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn requests_count_for_the_control_group_of_their_program() -> Result<()> {
    const GROUP: &str = "/tmp/cgroup/program";
    let Some(mut vm) = RaceVm::boot_debian()? else { return Ok(()) };
    vm.guest.run(&format!(
        "mkdir /tmp/cgroup && mount -t cgroup2 none /tmp/cgroup && mkdir {GROUP} && \
         echo +memory > /tmp/cgroup/cgroup.subtree_control"
    ))?;
    let join = format!("echo $$ > {GROUP}/cgroup.procs");
    let pid = vm.start_after(&join, "withholds_many_arguments", "/tmp/log")?;
    let charged = vm.guest.run(&format!("grep ^vmalloc {GROUP}/memory.stat"))?;
    let charged: u64 = charged.trim().trim_start_matches("vmalloc ").parse()?;
    ensure!(charged >= (inside::REQUESTS as u64 - KEPT) * BUFFER, "{charged} bytes are charged");
    vm.finish(&pid, "/tmp/log")?;
    vm.guest.check_log()
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn every_file_operation_races_with_unbinding() -> Result<()> {
    let Some(mut vm) = RaceVm::boot_debian()? else { return Ok(()) };
    vm.race(ROUNDS)
}
