//! `cargo lab demo`: two VMs share one GPU 80 to 20, and the demo checks every claim.

pub mod cuda;
pub mod live;

use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use comfy_table::Table;
use serde::Serialize;
use serde_json::Value;

use crate::Lab;
use crate::build::{self, Programs};
use crate::bundle;
use crate::cleanup::Scratch;
use crate::host::{Host, MdevType, Parent};
use crate::nvcc;
use crate::picture::Picture;
use crate::place::{Bundle, layout};
use crate::progress::Progress;
use crate::qemu::{Vm, VmSpec};

/// The vGPUs: name of the VM, UUID, and requested share in percent.
const VGPUS: [(&str, &str, u8); 2] = [
    ("a", "5a3c1a52-0001-4c5e-9d2f-7e55e7a00080", 80),
    ("b", "5a3c1a52-0002-4c5e-9d2f-7e55e7a00020", 20),
];
/// Video memory of each vGPU in GiB.
const SIZE: &str = "1";
/// Tolerance of a share, in percentage points.
const TOLERANCE: f64 = 2.0;
/// Extra run time of the load before and after the measurement.
const MARGIN: Duration = Duration::from_millis(1500);
const JOB_LIMIT: Duration = Duration::from_secs(60);

/// Jobs that check their own results.
const JOBS: [&str; 4] = ["copy --size 4", "vadd --n 65536", "saxpy --n 65536", "sgemm --n 96"];

/// Options of the demo.
#[derive(Clone, Debug, clap::Args)]
pub struct Options {
    /// Write the facts to FILE
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Save the pictures in DIR
    #[arg(long, value_name = "DIR", default_value = "lab-out")]
    pub out: PathBuf,
    /// GPU: the software GPU, or this machine's
    #[arg(long, value_enum, default_value_t = Parent::Soft)]
    pub parent: Parent,
    /// Machine code of the kernels, if the GPU executes it [default: compiled from kernels.cu
    /// by nvcc]
    #[arg(long, value_name = "FILE")]
    pub cubin: Option<PathBuf>,
    /// Measure the shares over N seconds
    #[arg(long, value_name = "N", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..=600))]
    pub seconds: u32,
    /// CUDA programs in both VMs, with libcuda of this machine: after the other parts if this
    /// machine has an NVIDIA GPU and what they need, without the other parts, or not at all
    #[arg(long, value_enum, default_value_t = cuda::Choice::Auto)]
    pub cuda: cuda::Choice,
    /// A further library of this machine for the CUDA programs, such as libcublas.so.13
    #[arg(long = "library", value_name = "FILE")]
    pub libraries: Vec<PathBuf>,
    /// A Python of this machine with PyTorch, such as python3: runs in both VMs, which read
    /// this machine's files
    #[arg(long, value_name = "PROGRAM")]
    pub python: Option<String>,
    /// With --cuda only: kill a worker N times under CUDA programs, and N times under a
    /// training of PyTorch with --python, both on this machine and in a VM, instead of all else
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub kills: Option<u32>,
    /// Save a working VM with its vGPU, end everything, and restore the VM under another vgpud,
    /// N times; then give it a new QEMU N times; instead of all else. With --cuda only, a CUDA
    /// program works in the VM
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    #[arg(conflicts_with_all = ["kills", "python"])]
    pub live: Option<u32>,
}

/// Results of the demo.
#[derive(Clone, Debug, Serialize)]
pub struct Facts {
    /// GPU's name, as seen by the guests.
    pub gpu: String,
    /// Type of the vGPUs.
    pub mdev_type: String,
    /// Version of QEMU.
    pub qemu: String,
    /// Kernel version of the guests.
    pub guest_kernel: String,
    /// CPU emulation of the guests: `tcg` or `kvm`.
    pub accelerator: &'static str,
    /// Length of the share measurement.
    pub seconds: f64,
    /// GPU utilization during the measurement in percent, if the GPU reports it.
    pub gpu_busy: Option<f64>,
    /// Results of each VM.
    pub vms: Vec<VmFacts>,
    /// Results of CUDA programs in VMs, if they ran.
    pub cuda: Option<cuda::Facts>,
    /// Failed claims; empty on success.
    pub failures: Vec<String>,
    /// Run time of the demo, without preparation.
    pub demo_seconds: f64,
}

/// Results of one VM.
#[derive(Clone, Debug, Default, Serialize)]
pub struct VmFacts {
    /// Name of the VM.
    pub name: String,
    /// UUID of the vGPU.
    pub uuid: String,
    /// Guest driver bound to the vGPU.
    pub driver: String,
    /// Framebuffer of the console.
    pub framebuffer: String,
    /// Size of the framebuffer, such as `1920x1200`.
    pub resolution: String,
    /// Jobs with correct results.
    pub jobs_verified: u64,
    /// Units of the shared load with correct results.
    pub units_verified: u64,
    /// Requested share, in percent.
    pub share_asked: u8,
    /// Measured share of the engine time that both vGPUs used, in percent.
    pub share_measured: f64,
    /// Share of the work done while both vGPUs had work, in percent.
    pub share_of_work: f64,
    /// Doorbell writes under load.
    pub doorbells: u64,
    /// Trapped doorbell writes; each causes a VM exit.
    pub doorbells_trapped: u64,
    /// Doorbell writes trapped while earlier work was unfinished; should be zero.
    pub doorbells_trapped_while_busy: u64,
    /// Pictures of the screen.
    pub screenshots: Vec<PathBuf>,
}

/// Runs the demo. The facts' `failures` are empty if all claims hold.
pub fn run(options: &Options) -> Result<Facts> {
    let progress = Progress::new();
    std::fs::create_dir_all(&options.out)
        .with_context(|| format!("Cannot make the folder {}", options.out.display()))?;
    let scratch = Scratch::new()?;
    let (lab, programs) = open(options, scratch.path(), &progress)?;
    let start = Instant::now();

    let step = progress.step("Starting vgpud and two vGPUs of one GPU");
    let (mut demo, mdev_type) = Demo::start(&lab, &programs, options.parent)?;
    step.done();

    let step = progress.step(format!("Booting two VMs under QEMU {}", lab.root.qemu.version));
    for vm in &mut demo.vms {
        vm.wait_boot()?;
    }
    let guest_kernel = demo.vms[0].guest.run("uname -r", JOB_LIMIT)?.success()?.stdout;
    let info = demo.vms[0].guest.run_json("vgpu-guest --json info", JOB_LIMIT)?;
    let gpu = info["gpu"].as_str().unwrap_or_default().to_owned();
    if mdev_type.head {
        demo.displays()?;
        demo.screens(&options.out, "console", Picture::check_text);
    }
    step.done();

    let step = progress.step("Running jobs in both, and checking what they computed");
    for job in JOBS {
        demo.both(&format!("vgpu-guest --json {job}"), |facts, _| facts.jobs_verified += 1)?;
    }
    step.done();

    let seconds = options.seconds;
    let step = progress.step(format!("Loading the GPU from both for {seconds} s"));
    let (window, gpu_busy) =
        demo.load(Duration::from_secs(seconds.into())).map_err(|error| demo.gave_up(error))?;
    step.done();

    let step = progress.step("Drawing in both");
    let size = if mdev_type.head { "" } else { " --width 1024 --height 768" };
    demo.both(&format!("vgpu-guest --json mandelbrot{size}"), |facts, _| facts.jobs_verified += 1)?;
    if mdev_type.head {
        demo.screens(&options.out, "mandelbrot", Picture::check_mandelbrot);
    }
    step.done();

    let step = progress.step("Ending both VMs");
    let Demo { host, vms, facts, mut failures, .. } = demo;
    for vm in vms {
        vm.quit()?;
    }
    drop(host);
    step.done();
    let facts = Facts {
        cuda: cuda::after(&lab, &programs, options, &mut failures)?,
        gpu,
        mdev_type: mdev_type.name,
        qemu: lab.root.qemu.version.clone(),
        guest_kernel: guest_kernel.trim().to_owned(),
        accelerator: if lab.kvm { "kvm" } else { "tcg" },
        seconds: window,
        gpu_busy,
        vms: facts,
        failures,
        demo_seconds: start.elapsed().as_secs_f64(),
    };
    print(&facts);
    if let Some(path) = &options.json {
        write(&facts, path)?;
    }
    Ok(facts)
}

/// Returns the lab, whose VMs have kernels for the GPU, and the programs of the host.
fn open(options: &Options, folder: &Path, progress: &Progress) -> Result<(Lab, Programs)> {
    let (lab, programs) = Lab::open_with_host(progress)?;
    if options.parent == Parent::Soft {
        return Ok((lab, programs));
    }
    let step = progress.step("Compiling the kernels for this GPU");
    let cubin = match &options.cubin {
        Some(cubin) => cubin.clone(),
        None => nvcc::compile(&kernels(), folder)?,
    };
    let lab = lab.with_machine_code(&cubin, folder)?;
    step.done();
    Ok((lab, programs))
}

/// Writes the facts as JSON.
fn write(facts: &impl Serialize, path: &Path) -> Result<()> {
    let text = serde_json::to_string_pretty(facts)? + "\n";
    std::fs::write(path, text).with_context(|| format!("Cannot write {}", path.display()))
}

/// Path of the kernels' source.
fn kernels() -> PathBuf {
    match Bundle::find() {
        Some(bundle) => bundle.path(layout::KERNELS),
        None => build::workspace().join(bundle::SOURCE),
    }
}

#[derive(Debug)]
struct Demo {
    parent: Parent,
    host: Host,
    vms: Vec<Vm>,
    facts: Vec<VmFacts>,
    failures: Vec<String>,
}

impl Demo {
    /// Starts vgpud, and a VM with a vGPU for each row of [`VGPUS`].
    fn start(lab: &Lab, programs: &Programs, parent: Parent) -> Result<(Self, MdevType)> {
        let host = Host::start(programs, &[parent.argument()])?;
        let mdev_type = host.type_of_size(SIZE)?;
        let (mut vms, mut facts) = (Vec::new(), Vec::new());
        for (name, uuid, share_asked) in VGPUS {
            let socket = host.start_vgpu(uuid, &mdev_type.name, Some(share_asked))?;
            let spec = VmSpec { kvm: lab.kvm, ..VmSpec::new(name).with_vgpu(&socket) };
            vms.push(Vm::start(lab, &spec, &host.folder().join(name))?);
            let (name, uuid) = (name.to_owned(), uuid.to_owned());
            facts.push(VmFacts { name, uuid, share_asked, ..VmFacts::default() });
        }
        Ok((Self { parent, host, vms, facts, failures: Vec::new() }, mdev_type))
    }

    /// Records a failed claim.
    fn expect(&mut self, holds: bool, claim: impl FnOnce() -> String) {
        if !holds {
            self.failures.push(claim());
        }
    }

    /// Returns the error with the failures that preceded it.
    fn gave_up(&self, error: anyhow::Error) -> anyhow::Error {
        let before = self.failures.join("\n  ");
        if before.is_empty() { error } else { error.context(format!("Before that:\n  {before}\n")) }
    }

    /// Runs a command in both VMs in parallel; `note` receives each answer.
    fn both(&mut self, command: &str, note: impl Fn(&mut VmFacts, &Value)) -> Result<()> {
        for vm in &mut self.vms {
            vm.guest.start(command, JOB_LIMIT)?;
        }
        self.collect(command, note)
    }

    fn collect(&mut self, command: &str, note: impl Fn(&mut VmFacts, &Value)) -> Result<()> {
        for (vm, facts) in self.vms.iter_mut().zip(&mut self.facts) {
            let output = vm.guest.finish(JOB_LIMIT)?;
            let text = output.stdout.lines().last().unwrap_or_default();
            match serde_json::from_str(text) {
                Ok(answer) if output.status == 0 => note(facts, &answer),
                _ => self.failures.push(format!(
                    "VM {}: `{command}` failed with status {}: {}",
                    facts.name,
                    output.status,
                    output.stderr.trim()
                )),
            }
        }
        Ok(())
    }

    /// Checks the bound driver and the console's framebuffer.
    fn displays(&mut self) -> Result<()> {
        const ASK: &str = "for d in /sys/bus/pci/drivers/*/0000:*; do \
             [ $(cat $d/vendor) = 0x1234 ] && basename $(dirname $d); done; \
             cut -d' ' -f2 /proc/fb; tr , x < /sys/class/graphics/fb0/virtual_size; \
             grep -l 1 /sys/class/vtconsole/*/bind | while read f; do cat ${f%/bind}/name; done";
        for index in 0..self.vms.len() {
            let output = self.vms[index].guest.run(ASK, JOB_LIMIT)?;
            let mut lines = output.stdout.lines().map(str::to_owned);
            let facts = &mut self.facts[index];
            facts.driver = lines.next().unwrap_or_default();
            facts.framebuffer = lines.next().unwrap_or_default();
            facts.resolution = lines.next().unwrap_or_default();
            let console = lines.any(|line| line.contains("frame buffer"));
            let (name, driver) = (facts.name.clone(), facts.driver.clone());
            self.expect(driver == "bochs-drm", || {
                format!("VM {name}: the driver is {driver:?}, not bochs-drm")
            });
            self.expect(console, || format!("VM {name}: the console is not on the framebuffer"));
        }
        Ok(())
    }

    /// Saves both screens and checks their contents.
    fn screens(&mut self, out: &Path, what: &str, check: fn(&Picture) -> Result<()>) {
        for index in 0..self.vms.len() {
            let facts = &self.facts[index];
            let (name, file) = (facts.name.clone(), out.join(format!("{}-{what}.png", facts.name)));
            let saved = self.host.screenshot(&facts.uuid, &file);
            let checked = saved.and_then(|()| check(&Picture::read(&file)?));
            self.facts[index].screenshots.push(file);
            if let Err(error) = checked {
                self.failures.push(format!("VM {name}: picture of the {what}: {error:#}"));
            }
        }
    }

    /// Loads the GPU from both VMs in parallel and measures the shares. Returns the length of the
    /// measurement and the GPU utilization.
    fn load(&mut self, duration: Duration) -> Result<(f64, Option<f64>)> {
        let (seconds, margin) = ((duration + 2 * MARGIN).as_secs_f64(), MARGIN.as_secs_f64());
        // Long units with many in flight keep the ring full even if a guest gets little CPU time.
        // An emulated CPU submits and checks about 700 units per second; on a real GPU, the larger
        // vGPU needs 0.8 s of work per second.
        let kernel_us = if self.parent == Parent::Soft { 2000 } else { 4000 };
        let command = format!(
            "vgpu-guest --json bench --seconds {seconds} --margin {margin} --kernel-us {kernel_us}"
        );
        for vm in &mut self.vms {
            vm.guest.start(&command, duration + JOB_LIMIT)?;
        }
        match self.wait_for_load() {
            Ok(true) => thread::sleep(MARGIN / 2),
            Ok(false) => {}
            Err(error) => {
                // The guests report the cause.
                self.collect(&command, |_, _| ())?;
                return Err(error);
            }
        }
        let before = self.engine_ns()?;
        let start = Instant::now();
        thread::sleep(duration);
        let after = self.engine_ns()?;
        let window = start.elapsed().as_secs_f64();
        // Both vGPUs are always busy, so CPU time that the software GPU loses affects both. Shares
        // are relative to the GPU's actual engine time.
        let used: Vec<f64> = before.iter().zip(&after).map(|(b, a)| (a - b) as f64).collect();
        let total: f64 = used.iter().sum();
        for (facts, used) in self.facts.iter_mut().zip(&used) {
            facts.share_measured = used / total.max(1.0) * 100.0;
        }
        let busy = (total > 0.0).then(|| total / (window * 1e9) * 100.0);
        self.collect(&command, |facts, answer| {
            let number = |name: &str| answer[name].as_u64().unwrap_or_default();
            facts.share_of_work = answer["steady_work"].as_f64().unwrap_or_default();
            facts.units_verified = number("verified");
            facts.doorbells = number("doorbells");
            facts.doorbells_trapped = number("trapped");
            facts.doorbells_trapped_while_busy = number("wakes_while_busy");
        })?;
        let work: f64 = self.facts.iter().map(|facts| facts.share_of_work).sum();
        for facts in &mut self.facts {
            facts.share_of_work *= 100.0 / work.max(1.0);
            // Without engine time, shares are judged by completed work.
            if busy.is_none() {
                facts.share_measured = facts.share_of_work;
            }
        }
        for index in 0..self.facts.len() {
            let facts = self.facts[index].clone();
            let (name, asked) = (&facts.name, facts.share_asked);
            let distance = (facts.share_measured - f64::from(asked)).abs();
            self.expect(distance <= TOLERANCE, || {
                format!("VM {name}: asked for {asked} %, got {:.1} %", facts.share_measured)
            });
            self.expect(facts.units_verified > 0, || format!("VM {name}: no work was verified"));
            let (busy, rung) = (facts.doorbells_trapped_while_busy, facts.doorbells);
            self.expect(rung > 0 && busy == 0, || {
                format!("VM {name}: {busy} of {rung} doorbells were trapped while it had work")
            });
        }
        Ok((window, busy))
    }

    /// Waits until the load of both VMs runs on the GPU. Returns false if the GPU does not report
    /// engine time.
    fn wait_for_load(&self) -> Result<bool> {
        let before = self.engine_ns()?;
        let begun = Instant::now();
        let deadline = begun + Duration::from_secs(20);
        loop {
            thread::sleep(Duration::from_millis(100));
            let now = self.engine_ns()?;
            // More engine time than the preceding calibration uses.
            let busy = before.iter().zip(&now).all(|(before, now)| now - before > 100_000_000);
            if busy {
                return Ok(true);
            }
            if begun.elapsed() > 2 * MARGIN && now.iter().all(|ns| *ns == 0) {
                return Ok(false);
            }
            if Instant::now() > deadline {
                anyhow::bail!("The load did not start in both VMs within 20 s");
            }
        }
    }

    /// Returns the engine time used by each vGPU, in nanoseconds.
    fn engine_ns(&self) -> Result<Vec<u64>> {
        self.facts.iter().map(|facts| self.host.engine_ns(&facts.uuid)).collect()
    }
}

/// Returns what to do after the demo.
fn next_step() -> &'static str {
    if Bundle::find().is_some() {
        return "Next: `./run bench gpu` measures this GPU. VMs of your own need Tessera's package, built from its source.";
    }
    "Next: a vGPU for a VM of your own. `cargo lab deb` builds the package, and README.md goes on with\n\
     \"Attach your own VM\". `vgpuctl doctor` says what this host lacks."
}

fn print(facts: &Facts) {
    let screens = facts.vms.iter().any(|vm| !vm.screenshots.is_empty());
    let mut table = Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    let mut header = vec!["VM"];
    if screens {
        header.extend(["driver", "resolution"]);
    }
    header.extend(["work verified", "share asked", "share measured", "doorbells without an exit"]);
    table.set_header(header);
    for vm in &facts.vms {
        let free = vm.doorbells.saturating_sub(vm.doorbells_trapped);
        let mut row = vec![vm.name.clone()];
        if screens {
            row.extend([vm.driver.clone(), vm.resolution.clone()]);
        }
        row.extend([
            format!("{} jobs, {} units", vm.jobs_verified, vm.units_verified),
            format!("{} %", vm.share_asked),
            format!("{:.1} %", vm.share_measured),
            format!("{free} of {}", vm.doorbells),
        ]);
        table.add_row(row);
    }
    println!("{table}");
    let busy = facts.gpu_busy.map(|busy| format!(", GPU {busy:.1} % busy")).unwrap_or_default();
    println!(
        "Linux {} under QEMU {} ({}), {} of {}; shares over {:.1} s{busy}; {:.1} s in all",
        facts.guest_kernel,
        facts.qemu,
        facts.accelerator,
        facts.mdev_type,
        facts.gpu,
        facts.seconds,
        facts.demo_seconds
    );
    for path in facts.vms.iter().flat_map(|vm| &vm.screenshots) {
        println!("  {}", path.display());
    }
    if let Some(cuda) = &facts.cuda {
        cuda.print();
    }
    if facts.failures.is_empty() {
        println!("All of it held.\n\n{}", next_step());
    }
}
