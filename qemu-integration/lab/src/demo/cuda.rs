//! CUDA in the demo's VMs: NVIDIA's libcuda of this machine runs unmodified in two VMs that share
//! its GPU, over the guest's Linux module.

mod deaths;
mod files;
mod numbers;
mod python;
mod saves;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use comfy_table::Table;
use serde::Serialize;

use self::files::{LIBRARIES, Needs, PROGRAM};
use self::numbers::{Numbers, TIME, numbers, results_and_times};
use self::python::Python;
use super::{Options, TOLERANCE, VGPUS, write};
use crate::Lab;
use crate::build::Programs;
use crate::cleanup::Scratch;
use crate::guest::last_lines;
use crate::guest_driver::MODULE;
use crate::host::{Host, MdevType, Parent};
use crate::initramfs;
use crate::progress::Progress;
use crate::qemu::{Vm, VmSpec};
use crate::shared_folder::SharedFolder;

/// Video memory of each vGPU in GiB. A context takes some 600 MiB.
const SIZE: &str = "4";
/// Memory of a VM without the files of its root, in MiB.
const MEMORY: u64 = 1536;
/// Promised parts of the speed without a VM.
const KERNELS_OF_NATIVE: f64 = 0.98;
const COPIES_OF_NATIVE: f64 = 0.95;
/// Measurements of times and rates.
const TURNS: u32 = 5;
/// Length of the kernels for the shares, in microseconds.
const KERNEL_US: u32 = 10_000;
/// Longest time of a command. libcuda starts slowly on an emulated CPU.
const LIMIT: Duration = Duration::from_secs(180);
/// Time of a load before and after the measurement.
const MARGIN: Duration = Duration::from_secs(1);
/// Whether to run CUDA programs in VMs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// After the other parts, if this machine has what the programs need.
    Auto,
    /// Without the other parts.
    Only,
    /// Not at all.
    No,
}

/// Results of the CUDA programs.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    /// Version of NVIDIA's driver, as the VMs see it.
    pub driver: String,
    /// Type of the vGPUs.
    pub mdev_type: String,
    /// Times by the GPU's clock without a VM.
    pub native: Numbers,
    /// Results of each VM.
    pub vms: Vec<VmFacts>,
}

/// Results of one VM.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VmFacts {
    /// Name of the VM.
    pub name: String,
    /// Programs by name: 1 if its result is right.
    pub results: Numbers,
    /// Times by the GPU's clock, with the GPU to itself.
    pub times: Numbers,
    /// Requested share, in percent.
    pub share_asked: u8,
    /// Measured share of the engine time that both vGPUs used, in percent.
    pub share_measured: f64,
    /// Work beside the other VM in percent of the work alone.
    pub share_of_work: f64,
}

/// Runs the demo's CUDA programs alone, and prints the results. Returns the failed claims.
pub fn only(options: &Options) -> Result<Vec<String>> {
    ensure!(
        options.parent == Parent::Nvidia,
        "CUDA programs in VMs need an NVIDIA GPU: add --parent nvidia"
    );
    let progress = Progress::new();
    let (lab, programs) = Lab::open_with_host(&progress)?;
    let scratch = Scratch::new()?;
    let needs = Needs::find(&lab, options, scratch.path(), &progress)?;
    let mut failures = Vec::new();
    if let Some(kills) = options.kills {
        let place = (&needs, scratch.path());
        deaths::run(&lab, &programs, options, place, kills, &mut failures)?;
        return Ok(failures);
    }
    if let Some(cycles) = options.live {
        saves::run(&lab, &programs, options, (&needs, scratch.path()), cycles)?;
        return Ok(failures);
    }
    let facts = run(&lab, &programs, options, &needs, scratch.path(), &mut failures)?;
    facts.print();
    if let Some(path) = &options.json {
        write(&facts, path)?;
    }
    if failures.is_empty() {
        println!("All of it held.");
    }
    Ok(failures)
}

/// Runs the CUDA programs after the demo's other parts, if this machine has what they need.
pub(super) fn after(
    lab: &Lab,
    programs: &Programs,
    options: &Options,
    failures: &mut Vec<String>,
) -> Result<Option<Facts>> {
    if options.parent == Parent::Soft || options.cuda == Choice::No {
        return Ok(None);
    }
    let scratch = Scratch::new()?;
    match Needs::find(lab, options, scratch.path(), &Progress::new()) {
        Ok(needs) => run(lab, programs, options, &needs, scratch.path(), failures).map(Some),
        Err(reason) => {
            eprintln!("CUDA in VMs is left out: {reason:#}");
            Ok(None)
        }
    }
}

fn run(
    lab: &Lab,
    programs: &Programs,
    options: &Options,
    needs: &Needs,
    folder: &Path,
    failures: &mut Vec<String>,
) -> Result<Facts> {
    let progress = Progress::new();
    let mut native = Numbers::new();
    if let Some(python) = &needs.python {
        let step = progress.step("Running PyTorch without a VM");
        native.extend(results_and_times(&output_of(&mut python.native(folder))?).1);
        step.done();
    }
    let step = progress.step("Booting two VMs with NVIDIA's libcuda of this machine");
    let mut cuda = Cuda::boot(lab, programs, options, needs, folder, &VGPUS)?;
    step.done();
    let step = progress.step("Running CUDA programs in both, and checking what they computed");
    cuda.results()?;
    step.done();
    let step = progress.step("Measuring kernels and copies, without a VM and in each");
    cuda.times(&needs.program, &mut native)?;
    step.done();
    if let Some(python) = &needs.python {
        let step = progress.step("Running PyTorch in each");
        cuda.pytorch(python)?;
        step.done();
    }
    let step = progress.step("Sharing the GPU between the CUDA programs of both");
    cuda.shares(Duration::from_secs(options.seconds.into()))?;
    step.done();
    let driver = cuda.vms[0].guest.run("cat /proc/driver/nvidia/version", LIMIT)?.stdout;
    let driver = driver.split_whitespace().find(|word| word.matches('.').count() == 2);
    let driver = driver.unwrap_or_default().to_owned();
    let Cuda { host, vms, facts, mdev_type, .. } = cuda;
    for vm in vms {
        vm.quit()?;
    }
    drop(host);
    let facts = Facts { driver, mdev_type: mdev_type.name, native, vms: facts };
    facts.check(failures);
    Ok(facts)
}

/// Running VMs.
struct Cuda {
    /// Lab with the files of CUDA programs.
    lab: Lab,
    host: Host,
    vms: Vec<Vm>,
    /// Configurations without the vGPUs.
    specs: Vec<VmSpec>,
    facts: Vec<VmFacts>,
    mdev_type: MdevType,
}

impl Cuda {
    fn boot(
        lab: &Lab,
        programs: &Programs,
        options: &Options,
        needs: &Needs,
        folder: &Path,
        vgpus: &[(&str, &str, u8)],
    ) -> Result<Self> {
        let files = needs.files(&lab.root.kernel)?;
        let bytes: u64 =
            files.iter().filter_map(|(_, path)| Some(fs::metadata(path).ok()?.len())).sum();
        let initramfs = folder.join("cuda.cpio");
        initramfs::write(&initramfs, &[fs::read(&lab.initramfs)?, initramfs::extra(&files)?])?;
        let lab = Lab { initramfs, ..lab.clone() };
        let host = Host::start(programs, &[options.parent.argument()])?;
        let mdev_type = host.type_without_display(SIZE)?;
        let (mut vms, mut specs, mut facts) = (Vec::new(), Vec::new(), Vec::new());
        for &(name, uuid, share_asked) in vgpus {
            let socket = host.start_vgpu(uuid, &mdev_type.name, Some(share_asked))?;
            let mut spec = VmSpec { kvm: lab.kvm, replaceable: true, ..VmSpec::new(name) };
            // While the VM boots, the archive and the files of its root are both in memory.
            spec.memory_mib = u32::try_from(MEMORY + 2 * (bytes >> 20))?;
            if needs.python.is_some() {
                spec.memory_mib += python::MEMORY;
                spec.folder = Some(SharedFolder::read_only(Path::new("/")));
                // PyTorch needs later instructions than the lab's usual CPU has.
                spec.cpu = "max";
            }
            let folder = host.folder().join(name);
            vms.push(Vm::start(&lab, &spec.clone().with_vgpu(&socket), &folder)?);
            specs.push(spec);
            facts.push(VmFacts { name: name.to_owned(), share_asked, ..VmFacts::default() });
        }
        let mut cuda = Self { lab, host, vms, specs, facts, mdev_type };
        for vm in &mut cuda.vms {
            vm.wait_boot()?;
        }
        cuda.both(&format!(
            "insmod /{MODULE} && mkdir -p /dev/shm && mount -t tmpfs none /dev/shm && \
             until [ -e /dev/nvidia0 ]; do sleep 0.1; done"
        ))?;
        if needs.python.is_some() {
            cuda.both(&python::prepare())?;
        }
        Ok(cuda)
    }

    /// Runs a command in both VMs in parallel, which must succeed. Returns what they print.
    fn both(&mut self, command: &str) -> Result<Vec<String>> {
        for vm in &mut self.vms {
            vm.guest.start(command, LIMIT)?;
        }
        let finish = |vm: &mut Vm| {
            let done = vm.guest.finish(LIMIT)?.success();
            let done =
                done.with_context(|| format!("`{command}`\n{}", last_lines(&vm.console(), 12)));
            anyhow::Ok(done?.stdout)
        };
        self.vms.iter_mut().map(finish).collect::<Result<_>>().with_context(|| self.host.log())
    }

    fn results(&mut self) -> Result<()> {
        let printed = self.both(&command("results"))?;
        for (facts, printed) in self.facts.iter_mut().zip(printed) {
            facts.results = numbers(&printed);
        }
        Ok(())
    }

    /// Measures a program without a VM and then in each VM, in turns, and keeps the best of each:
    /// other users of the host's memory slow copies down for seconds.
    fn times(&mut self, program: &Path, native: &mut Numbers) -> Result<()> {
        for _ in 0..TURNS {
            let output = output_of(Command::new(program).arg("device-times"))?;
            numbers::keep_best(native, numbers(&output));
            for (vm, facts) in self.vms.iter_mut().zip(&mut self.facts) {
                let output = vm.guest.run(&command("device-times"), LIMIT)?.success()?;
                numbers::keep_best(&mut facts.times, numbers(&output.stdout));
            }
        }
        Ok(())
    }

    /// Runs PyTorch in both VMs, and measures its times in one after the other.
    fn pytorch(&mut self, python: &Python) -> Result<()> {
        let prepare = in_background(&python.in_vm(), "pytorch", python::GO);
        for vm in &mut self.vms {
            vm.guest.start(&prepare, python::LIMIT)?;
        }
        for vm in &mut self.vms {
            vm.guest.finish(python::LIMIT)?.success()?;
        }
        let until = |line| format!("until grep -q '{line}' /tmp/pytorch; do sleep 0.1; done");
        for vm in &mut self.vms {
            let measure = format!("touch {}; {}", python::GO, until("product_ms\\|^exit"));
            vm.guest.run(&measure, LIMIT)?.success()?;
        }
        for (vm, facts) in self.vms.iter_mut().zip(&mut self.facts) {
            let end = format!(
                "{}; cat /tmp/pytorch; grep -q '^exit 0' /tmp/pytorch || ! cat /tmp/pytorch >&2",
                until("^exit")
            );
            let output = vm.guest.run(&end, LIMIT)?.success()?;
            let (results, times) = results_and_times(&output.stdout);
            facts.results.extend(results);
            facts.times.extend(times);
        }
        Ok(())
    }

    /// Measures the work of each VM alone, and of both together.
    fn shares(&mut self, duration: Duration) -> Result<()> {
        let alone: Vec<f64> = (0..self.vms.len())
            .map(|index| Ok(self.load(&[index], duration)?[0].0))
            .collect::<Result<_>>()?;
        let together = self.load(&[0, 1], duration)?;
        let total: f64 = together.iter().map(|(_, engine)| engine).sum();
        for ((facts, alone), (work, engine)) in self.facts.iter_mut().zip(alone).zip(together) {
            facts.share_of_work = work / alone * 100.0;
            facts.share_measured = engine / total.max(1.0) * 100.0;
        }
        Ok(())
    }

    /// Loads the GPU from some of the VMs. Returns the work of a second and the engine time of
    /// each.
    fn load(&mut self, indices: &[usize], duration: Duration) -> Result<Vec<(f64, f64)>> {
        let seconds = (duration + 2 * MARGIN).as_secs_f64();
        let load = command(&format!("load {KERNEL_US} {seconds} /tmp/go"));
        let prepare = in_background(&load, "load", "/tmp/go");
        for index in indices {
            self.vms[*index].guest.run(&prepare, LIMIT)?.success()?;
        }
        for index in indices {
            self.vms[*index].guest.start("touch /tmp/go", LIMIT)?;
        }
        for index in indices {
            self.vms[*index].guest.finish(LIMIT)?.success()?;
        }
        thread::sleep(MARGIN);
        let before = self.engine_ns(indices)?;
        thread::sleep(duration);
        let after = self.engine_ns(indices)?;
        let mut done = Vec::new();
        for (place, index) in indices.iter().enumerate() {
            let wait = "until grep -q longest_wait /tmp/load; do sleep 0.1; done; cat /tmp/load";
            let output = self.vms[*index].guest.run(wait, LIMIT)?.success()?;
            let work = numbers(&output.stdout).get("work").copied();
            let work = work.context("A load did not tell its work")?;
            done.push((work, (after[place] - before[place]) as f64));
        }
        Ok(done)
    }

    /// Returns the engine time of some vGPUs in nanoseconds.
    fn engine_ns(&self, indices: &[usize]) -> Result<Vec<u64>> {
        indices.iter().map(|index| self.host.engine_ns(VGPUS[*index].1)).collect()
    }
}

impl Facts {
    /// Records failed claims.
    fn check(&self, failures: &mut Vec<String>) {
        for vm in &self.vms {
            let name = &vm.name;
            for program in ["vector_addition", "launches_by_kernels"] {
                if !vm.results.contains_key(program) {
                    failures.push(format!("VM {name}: the CUDA program {program} did not run"));
                }
            }
            for (program, result) in vm.results.iter().filter(|(_, result)| !is_right(**result)) {
                failures.push(format!("VM {name}: the CUDA program {program} is wrong: {result}"));
            }
            for (time, native) in &self.native {
                let measured = vm.times.get(time).copied().unwrap_or(f64::NAN);
                let (part, promise) = if time.ends_with(TIME) {
                    (native / measured, KERNELS_OF_NATIVE)
                } else {
                    (measured / native, COPIES_OF_NATIVE)
                };
                // Also if there is no number.
                if part.is_nan() || part < promise {
                    let claim = format!("{time} is {part:.3} of native, promised {promise}");
                    failures.push(format!("VM {name}: {claim}"));
                }
            }
            for (what, share) in [("engine time", vm.share_measured), ("work", vm.share_of_work)] {
                let asked = vm.share_asked;
                if (share - f64::from(asked)).abs() > TOLERANCE {
                    let claim = format!("asked for {asked} % of CUDA, got {share:.1} % of {what}");
                    failures.push(format!("VM {name}: {claim}"));
                }
            }
        }
    }

    /// Prints the facts as a table.
    pub fn print(&self) {
        let mut table = Table::new();
        table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
        let mut header = vec!["VM".to_owned(), "CUDA programs right".to_owned()];
        header.extend(self.native.keys().cloned());
        header.extend(["share asked", "engine time", "work"].map(str::to_owned));
        table.set_header(header);
        let times = |numbers: &Numbers| -> Vec<String> {
            let of = |name| numbers.get(name).map_or(String::new(), |time| format!("{time:.3}"));
            self.native.keys().map(of).collect()
        };
        let mut native = vec!["(none)".to_owned(), String::new()];
        native.extend(times(&self.native));
        table.add_row(native);
        for vm in &self.vms {
            let right = vm.results.values().filter(|result| is_right(**result)).count();
            let mut row = vec![vm.name.clone(), format!("{right} of {}", vm.results.len())];
            row.extend(times(&vm.times));
            row.extend([
                format!("{} %", vm.share_asked),
                format!("{:.1} %", vm.share_measured),
                format!("{:.1} %", vm.share_of_work),
            ]);
            table.add_row(row);
        }
        println!("{table}");
        println!("libcuda {} on {}, times by the GPU's clock", self.driver, self.mdev_type);
    }
}

/// Returns whether a program found its result right.
fn is_right(result: f64) -> bool {
    (result - 1.0).abs() < f64::EPSILON
}

/// Returns a shell command that runs a CUDA program in a VM.
fn command(words: &str) -> String {
    format!("LD_LIBRARY_PATH=/{LIBRARIES} /{PROGRAM} {words}")
}

/// Returns a shell command that starts a program and waits until it is ready. Its output goes to a
/// file in `/tmp`, and its exit status; it goes on when the file `go` exists.
fn in_background(program: &str, output: &str, go: &str) -> String {
    format!(
        "rm -f {go}; {{ {program}; echo exit $?; }} > /tmp/{output} 2>&1 & p=$!; until grep -q ready /tmp/{output}; do \
         kill -0 $p || {{ cat /tmp/{output} >&2; exit 1; }}; sleep 0.1; done"
    )
}

fn output_of(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("Cannot run {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed: {}", errors.trim());
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_results_missed_shares_and_slow_work_are_failures() {
        let results: Numbers = numbers("vector_addition 1\nlaunches_by_kernels 1\nptx 1\nnoise\n");
        let vm = |share_asked, share| VmFacts {
            name: "a".to_owned(),
            results: results.clone(),
            share_asked,
            share_measured: share,
            share_of_work: share,
            times: numbers("kernel_ms 10.1\npinned_up_gbs 54"),
        };
        let mut facts = Facts {
            driver: String::new(),
            mdev_type: String::new(),
            native: numbers("kernel_ms 10.0\npinned_up_gbs 55"),
            vms: vec![vm(80, 79.0), vm(20, 21.0)],
        };
        let failures = |facts: &Facts| {
            let mut failures = Vec::new();
            facts.check(&mut failures);
            failures.len()
        };
        assert_eq!(failures(&facts), 0);
        facts.vms[0].results.insert("ptx".to_owned(), 0.0);
        facts.vms[0].results.remove("vector_addition");
        facts.vms[1].share_of_work = 25.0;
        assert_eq!(failures(&facts), 3);
        facts.vms[0].times = numbers("kernel_ms 10.3");
        assert_eq!(failures(&facts), 5);
    }
}
