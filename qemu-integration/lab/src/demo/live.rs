//! `cargo lab demo --live N`: a VM that works is saved with its vGPU, everything ends, and the VM
//! continues under another vgpud. Then it gets a new QEMU. What works is `vgpu-guest`, or a CUDA
//! program ([`super::cuda`]).

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};

use super::{Options, SIZE, VGPUS, open};
use crate::Lab;
use crate::build::Programs;
use crate::cleanup::Scratch;
use crate::guest::Guest;
use crate::host::{Host, MdevType, Parent};
use crate::picture::Picture;
use crate::progress::Progress;
use crate::qemu::{Vm, VmSpec};
use crate::successor::Successor;

/// Jobs of all kinds, each of which checks its results, one after the other. They are counted in
/// `/tmp/done`, and `/tmp/bad` gets what failed.
pub const WORK: &str = "(while :; do for job in 'sgemm --n 96' 'vadd --n 200000' 'copy --size 8' \
                        'spin --seconds 0.3'; do \
                        vgpu-guest $job > /tmp/last 2>&1 || cat /tmp/last >> /tmp/bad; \
                        echo $job >> /tmp/done; done; done) > /dev/null 2>&1 &";
/// Longest time until the guest has done another job, and for a command in it.
const LIMIT: Duration = Duration::from_secs(60);
/// The vGPU.
const VGPU: &str = VGPUS[0].1;

/// Runs this part alone, with so many restores and new QEMUs, and prints its figures.
pub fn run(options: &Options, cycles: u32) -> Result<()> {
    let progress = Progress::new();
    let scratch = Scratch::new()?;
    let (lab, programs) = open(options, scratch.path(), &progress)?;
    let step = progress.step("Booting a VM with a vGPU");
    let mut live = Live::boot(&lab, &programs, options.parent, SIZE, scratch.path())?;
    step.done();
    live.repeat(cycles, &progress)
}

fn median_and_longest(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |index: usize| times.get(index).map_or(0, Duration::as_millis);
    format!("p50 {} ms, longest {} ms", at(times.len() / 2), at(times.len().saturating_sub(1)))
}

/// A VM that works, its host, and what was measured.
#[derive(Debug)]
pub struct Live<'a> {
    lab: &'a Lab,
    programs: &'a Programs,
    parent: Parent,
    mdev_type: MdevType,
    spec: VmSpec,
    host: Host,
    vm: Vm,
    file: PathBuf,
    jobs: u32,
    saves: Vec<Duration>,
    restores: Vec<Duration>,
}

impl<'a> Live<'a> {
    /// Boots a VM with a vGPU of this size (`1` is 1 GiB) and lets it work. `folder` gets the file
    /// of the saved VM.
    pub fn boot(
        lab: &'a Lab,
        programs: &'a Programs,
        parent: Parent,
        size: &str,
        folder: &Path,
    ) -> Result<Self> {
        let host = Host::start(programs, &[parent.argument()])?;
        let mdev_type = host.type_of_size(size)?;
        let socket = host.start_vgpu(VGPU, &mdev_type.name, None)?;
        let spec = VmSpec { kvm: lab.kvm, replaceable: true, ..VmSpec::new("live") };
        let mut vm = Vm::boot(lab, &spec.clone().with_vgpu(&socket), &host.folder().join("vm"))?;
        let size = if mdev_type.head { "" } else { " --width 1024 --height 768" };
        vm.guest.run(&format!("vgpu-guest mandelbrot{size}"), LIMIT)?.success()?;
        vm.guest.run(WORK, LIMIT)?.success()?;
        Self::of((lab, programs, parent), mdev_type, spec, (host, vm), folder)
    }

    /// Takes over a VM that works as [`WORK`] does. `spec` is its configuration without the vGPU,
    /// which is the first of the demo's.
    pub fn of(
        (lab, programs, parent): (&'a Lab, &'a Programs, Parent),
        mdev_type: MdevType,
        spec: VmSpec,
        (host, vm): (Host, Vm),
        folder: &Path,
    ) -> Result<Self> {
        let (file, jobs, saves, restores) = (folder.join("vm.saved"), 0, Vec::new(), Vec::new());
        let mut live =
            Self { lab, programs, parent, mdev_type, spec, host, vm, file, jobs, saves, restores };
        live.check()?;
        Ok(live)
    }

    /// Saves and restores the VM some times, gives it as many new QEMUs, and prints the figures.
    pub fn repeat(&mut self, times: u32, progress: &Progress) -> Result<()> {
        let step = progress.step(format!(
            "Saving it, ending everything, and restoring it under another vgpud, {times} times"
        ));
        for _ in 0..times {
            self.save_and_restore()?;
        }
        step.done();
        let step = progress.step(format!("Giving it a new QEMU, {times} times"));
        let pauses = self.upgrade(times)?;
        step.done();
        println!("{}", self.figures()?);
        println!("paused for a new QEMU {times} times: {}", median_and_longest(pauses));
        Ok(())
    }

    /// Saves the VM, kills all processes of its host, and restores it on another one. Checks that
    /// it works on.
    pub fn save_and_restore(&mut self) -> Result<()> {
        // A different moment of the work each time.
        thread::sleep(Duration::from_millis(self.saves.len() as u64 * 37 % 500));
        let file = self.file.to_string_lossy().into_owned();
        let monitor = self.vm.keys().to_string_lossy().into_owned();
        let begun = Instant::now();
        self.host.vgpuctl(&["vm", "save", VGPU, "--monitor", &monitor, "-o", &file])?;
        self.saves.push(begun.elapsed());
        for process in self.host.processes() {
            let _ = kill(process, Signal::SIGKILL);
        }
        let host = Host::start(self.programs, &[self.parent.argument()])?;
        let socket = host.start_vgpu(VGPU, &self.mdev_type.name, None)?;
        let spec = VmSpec { awaits_state: true, ..self.spec.clone().with_vgpu(&socket) };
        let mut vm = Vm::start(self.lab, &spec, &host.folder().join("vm"))?;
        wait_for("the VM is attached", || Ok(!host.vgpu(VGPU)?["vm"].is_null()))?;
        let monitor = vm.keys().to_string_lossy().into_owned();
        let begun = Instant::now();
        let restored = host.vgpuctl(&["vm", "restore", VGPU, "--monitor", &monitor, "-i", &file]);
        restored.with_context(|| host.log())?;
        self.restores.push(begun.elapsed());
        vm.wait_running()?;
        (self.host, self.vm) = (host, vm);
        self.check()
    }

    /// Gives the VM a new QEMU some times. Returns the pauses.
    fn upgrade(&mut self, times: u32) -> Result<Vec<Duration>> {
        let spec = self.spec.clone().with_vgpu(&self.host.vgpu_socket(VGPU));
        let mut pauses = Vec::new();
        let mut monitor = self.vm.keys();
        let mut last = None;
        for number in 0..times {
            let folder = self.host.folder().join(format!("qemu{number}"));
            let (mut new, pause) =
                Successor::take_over((&self.host, self.lab), VGPU, &monitor, &spec, &folder)?;
            pauses.push(Duration::from_millis(pause));
            check_work(&mut new.guest, &mut self.jobs)?;
            check_picture(&self.host, &self.mdev_type)?;
            monitor = new.keys();
            last = Some(new);
        }
        drop(last);
        Ok(pauses)
    }

    /// Returns the number of jobs, the size of the file, and the times of saves and restores.
    pub fn figures(&self) -> Result<String> {
        Ok(format!(
            "{} restores, {} jobs; saved in {}, restored in {}, {} MiB",
            self.restores.len(),
            self.jobs,
            median_and_longest(self.saves.clone()),
            median_and_longest(self.restores.clone()),
            self.file.metadata()?.len() >> 20
        ))
    }

    fn check(&mut self) -> Result<()> {
        let checked = check_work(&mut self.vm.guest, &mut self.jobs)
            .and_then(|()| check_picture(&self.host, &self.mdev_type));
        checked.with_context(|| format!("after {} saves: {}", self.saves.len(), self.host.log()))
    }
}

/// Checks that the guest begins and ends another job, and that no job was wrong. `jobs` is the
/// number of jobs.
fn check_work(guest: &mut Guest, jobs: &mut u32) -> Result<()> {
    // One job may have begun before.
    let mut enough = None;
    wait_for("the guest does another job", || {
        let done = guest.run("wc -l < /tmp/done", LIMIT)?.stdout;
        *jobs = done.trim().parse().unwrap_or(0);
        Ok(*jobs >= *enough.get_or_insert(*jobs + 2))
    })?;
    let bad = guest.run("cat /tmp/bad 2> /dev/null", LIMIT)?.stdout;
    ensure!(bad.is_empty(), "A job failed: {bad}");
    Ok(())
}

/// Checks that the screen, if there is one, shows what the guest has drawn.
fn check_picture(host: &Host, mdev_type: &MdevType) -> Result<()> {
    if !mdev_type.head {
        return Ok(());
    }
    let screen = host.folder().join("screen.png");
    host.screenshot(VGPU, &screen)?;
    Picture::read(&screen)?.check_mandelbrot()
}

fn wait_for(what: &str, mut holds: impl FnMut() -> Result<bool>) -> Result<()> {
    let deadline = Instant::now() + LIMIT;
    while !holds()? {
        ensure!(Instant::now() < deadline, "Not within {} s: {what}", LIMIT.as_secs());
        thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
