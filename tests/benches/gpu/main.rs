//! vGPUs against a plain process on the same GPU, in the same run: copies, a matrix product, latency, throughput of
//! several together, shares, a cap, and what is left to the others when one misbehaves.
//!
//! `--parent nvidia` measures this machine's GPU, and says that it was skipped where there is none. The software GPU is
//! measured otherwise; without `--bench`, only that all of this works.

mod fleet;
mod jobs;
mod load;
mod owner;
mod solo;
mod tenant;
mod trouble;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand, ValueEnum};
use serde_json::{Value, json};
use system_tests::outcome::{Outcome, measuring};
use vgpu_guest::programs::DEFAULT_CUBIN;

use self::fleet::Fleet;
use self::load::{LoadSpec, Progress};
use self::solo::{Solo, SoloSpec};
use self::tenant::{Order, Tenant, TenantArgs};
use self::trouble::{Told, Trouble};

const MIDDLE: Duration = Duration::from_micros(500);
const SHORT: Duration = Duration::from_micros(50);
const LONG: Duration = Duration::from_millis(20);
/// Guest RAM of a tenant in MiB: room for two copies and three matrices.
const RAM: u64 = 640;
const SMALL_RAM: u64 = 64;

/// Which GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GpuKind {
    /// The software GPU.
    Soft,
    /// This machine's NVIDIA GPU.
    Nvidia,
}

impl GpuKind {
    /// As `--parent` has it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Soft => "soft",
            Self::Nvidia => "nvidia",
        }
    }

    /// As `vgpud --parent` has it.
    pub const fn argument(self) -> &'static str {
        match self {
            Self::Soft => "soft:soft0",
            Self::Nvidia => "nvidia",
        }
    }

    fn here() -> Self {
        // A test only shows that the benchmark works, wherever it runs and as whomever.
        if measuring() && nvidia_is_here() { Self::Nvidia } else { Self::Soft }
    }
}

fn nvidia_is_here() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// Measures vGPUs against the GPU's plain owner.
#[derive(Debug, Parser)]
#[command(name = "gpu")]
struct Cli {
    /// Which GPU [default: this machine's, or else the software one]
    #[arg(long, value_enum, global = true)]
    parent: Option<GpuKind>,
    /// Machine code of the kernels
    #[arg(long, global = true, default_value = DEFAULT_CUBIN)]
    cubin: PathBuf,
    /// Short windows
    #[arg(long)]
    quick: bool,
    /// Only these: jobs, owner, solo, together, shares, cap, trouble
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// A measurement, not a test (cargo says so)
    #[arg(long, hide = true)]
    bench: bool,
    #[command(subcommand)]
    role: Option<Role>,
}

#[derive(Debug, Subcommand)]
enum Role {
    /// A process that uses the GPU (started by the benchmark)
    #[command(hide = true)]
    Tenant(TenantArgs),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let kind = cli.parent.unwrap_or_else(GpuKind::here);
    if let Some(Role::Tenant(args)) = &cli.role {
        return match tenant::serve(kind, &cli.cubin, args) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                println!("{}", json!({ "Err": format!("{error:#}") }));
                ExitCode::FAILURE
            }
        };
    }
    if kind == GpuKind::Nvidia && !nvidia_is_here() {
        println!("skipped: gpu: this machine has no NVIDIA GPU: /dev/nvidiactl is not there");
        return ExitCode::SUCCESS;
    }
    system_tests::outcome::report("gpu", || run(&cli, kind))
}

/// All measurements of a run.
struct Bench<'a> {
    kind: GpuKind,
    cubin: &'a Path,
    settle: Duration,
    window: Duration,
    /// Nanoseconds of 1000 iterations, and bytes copied per second, alone.
    pace: f64,
    rows: Vec<[String; 4]>,
    facts: Vec<Value>,
    kept: bool,
}

fn run(cli: &Cli, kind: GpuKind) -> Result<Outcome> {
    let quick = cli.quick || !measuring();
    let (settle, window) = match (quick, kind) {
        (true, _) => (200, 500),
        (false, GpuKind::Nvidia) => (500, 3000),
        (false, GpuKind::Soft) => (500, 4000),
    };
    let mut owner = Tenant::start(kind, &cli.cubin, None, RAM)
        .context("The plain owner of the GPU cannot be")?;
    let mut bench = Bench {
        kind,
        cubin: &cli.cubin,
        settle: Duration::from_millis(settle),
        window: Duration::from_millis(window),
        pace: 1.0,
        rows: Vec::new(),
        facts: Vec::new(),
        kept: true,
    };
    // What fails is told, and the rest is measured all the same.
    let wanted = |part: &str| cli.only.is_empty() || cli.only.iter().any(|only| only == part);
    if wanted("jobs") {
        bench.jobs("the owner", &mut owner)?;
        let mut fleet = bench.fleet(RAM, &[json!([])])?;
        bench.jobs("a vGPU", &mut fleet.tenants[0])?;
    }
    if cli.only.iter().any(|only| only == "owner") {
        bench.jobs("the owner", &mut owner)?;
        let solo = owner.solo(&bench.solo_spec(quick))?;
        eprintln!("gpu: the owner: {solo:?}");
    }
    bench.pace = owner.calibrate()?;
    if wanted("solo") {
        let done = bench.solo(&mut owner, quick);
        bench.attempt("copies, product and latency", done);
    }
    drop(owner);
    if wanted("together") {
        let done = bench.together(if quick { &[1, 2] } else { &[1, 2, 4, 8] });
        bench.attempt("several together", done);
    }
    if wanted("shares") {
        bench.shares(quick);
    }
    if wanted("cap") && !quick {
        let done = bench.cap();
        bench.attempt("hard 25 alone", done);
    }
    if wanted("trouble") {
        bench.troubles(quick);
    }
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
    table.set_header(["what", "plain owner", "vGPU", "ratio or promise"]);
    for row in &bench.rows {
        table.add_row(row);
    }
    Ok(Outcome {
        line: format!(
            "{} GPU, windows of {} ms, 500 us kernels at {:.2} ns an iteration\n{table}",
            kind.name(),
            window,
            bench.pace / 1000.0
        ),
        facts: json!({ "parent": kind.name(), "window_ms": window, "measured": bench.facts }),
        kept: bench.kept,
    })
}

impl Bench<'_> {
    /// A row of the table. Promises are an NVIDIA GPU's: the software one shares two cores with its guests.
    fn row(&mut self, what: &str, owner: String, vgpu: String, verdict: String, kept: bool) {
        let promised = self.kind == GpuKind::Nvidia && measuring();
        let mark = if kept || !promised { "" } else { ": NOT KEPT" };
        self.kept &= kept || !promised;
        eprintln!("gpu: {what}: {owner} | {vgpu} | {verdict}{mark}");
        self.facts.push(json!({
            "what": what, "owner": owner, "vgpu": vgpu, "verdict": verdict, "kept": kept,
        }));
        self.rows.push([what.to_owned(), owner, vgpu, verdict + mark]);
    }

    fn fleet(&self, ram: u64, attrs: &[Value]) -> Result<Fleet> {
        Fleet::start(self.kind, self.cubin, ram, attrs)
    }

    fn kernels(&self, kernel: Duration) -> LoadSpec {
        LoadSpec { kernel: Some(kernel), pace: self.pace, copy: None }
    }

    /// Notes what could not be measured.
    fn attempt(&mut self, what: &str, done: Result<()>) {
        if let Err(error) = done {
            self.row(what, String::new(), String::new(), format!("FAILED: {error:#}"), false);
        }
    }

    /// What the owner's kernels get alone, which throughput is set against.
    fn alone(&self) -> Result<f64> {
        let mut owner = Tenant::start(self.kind, self.cubin, None, SMALL_RAM)?;
        owner.load(self.kernels(MIDDLE))?;
        thread::sleep(self.settle);
        let one = tenant::measure(std::slice::from_mut(&mut owner), self.window)?;
        Ok(one[0].kernels)
    }

    /// Each job's results are those of the CPU, or the benchmark has failed.
    fn jobs(&mut self, whose: &str, tenant: &mut Tenant) -> Result<()> {
        for (name, result) in tenant.jobs()? {
            let (line, good) = match result {
                Ok(line) => (line, true),
                Err(error) => (error, false),
            };
            eprintln!("gpu: {whose}: {name}: {line}");
            self.facts.push(json!({ "job": name, "of": whose, "result": line, "kept": good }));
            self.kept &= good;
            if !good {
                let what = format!("{name}, {whose}");
                self.row(&what, String::new(), line, "NOT RIGHT".to_owned(), false);
            }
        }
        Ok(())
    }

    fn solo_spec(&self, quick: bool) -> SoloSpec {
        match (quick, self.kind) {
            (true, _) => {
                SoloSpec { bytes: 2 << 20, time: Duration::from_millis(50), rows: 64, trips: 200 }
            }
            (false, GpuKind::Soft) => {
                SoloSpec { bytes: 64 << 20, time: Duration::from_secs(1), rows: 256, trips: 20_000 }
            }
            (false, GpuKind::Nvidia) => SoloSpec {
                bytes: 128 << 20,
                time: Duration::from_millis(700),
                rows: 2048,
                trips: 10_000,
            },
        }
    }

    fn solo(&mut self, owner: &mut Tenant, quick: bool) -> Result<()> {
        let spec = self.solo_spec(quick);
        let one = owner.solo(&spec)?;
        let trapped = json!([{ "doorbell": "trapped" }]);
        let mut fleet = self.fleet(RAM, &[json!([])])?;
        let other = fleet.tenants[0].solo(&spec)?;
        drop(fleet);
        let rates = [
            ("copy, video memory to video memory", one.video, other.video, "GB/s"),
            ("copy, RAM to video memory", one.to_video, other.to_video, "GB/s"),
            ("copy, video memory to RAM", one.from_video, other.from_video, "GB/s"),
            ("matrix product", one.product, other.product, "GFLOP/s"),
        ];
        for (what, a, b, unit) in rates {
            let ratio = b / a;
            let show = |rate: f64| format!("{rate:.1} {unit}");
            self.row(what, show(a), show(b), format!("{ratio:.3} (0.99)"), ratio >= 0.99);
        }
        let show = |solo: &Solo| format!("{:.2} / {:.2} us", solo.p50, solo.p99);
        let ratio = other.p50 / one.p50;
        let verdict = format!("{ratio:.2} (1.1)");
        let what = "doorbell to semaphore, p50 / p99, mapped";
        self.row(what, show(&one), show(&other), verdict, ratio <= 1.1);
        let mut fleet = self.fleet(RAM, &[trapped])?;
        let spec = SoloSpec { time: Duration::from_millis(50), trips: spec.trips / 5, ..spec };
        let other = fleet.tenants[0].solo(&spec)?;
        let verdict = format!("{:.2}", other.p50 / one.p50);
        self.row("the same, trapped", show(&one), show(&other), verdict, true);
        Ok(())
    }

    /// Throughput of several that all have work.
    fn together(&mut self, counts: &[usize]) -> Result<()> {
        let before = self.alone()?;
        let mut solo = before;
        for &count in counts {
            let mut fleet = self.fleet(SMALL_RAM, &vec![json!([]); count])?;
            self.start_loads(&mut fleet, &vec![self.kernels(MIDDLE); count])?;
            let done = tenant::measure(&mut fleet.tenants, self.window)?;
            let total: f64 = done.iter().map(|one| one.kernels).sum();
            if count == 1 {
                drop(fleet);
                // Clocks drift: the owner comes before and after.
                let alone = f64::midpoint(before, self.alone()?);
                let ratio = total / alone;
                let verdict = format!("{ratio:.3} (0.99)");
                let (a, b) = (self.busy(alone), self.busy(total));
                self.row("kernels of 500 us", a, b, verdict, ratio >= 0.99);
                solo = total;
                continue;
            }
            let ratio = total / solo;
            let verdict = format!("{ratio:.3} of one (0.97)");
            let what = format!("{count} vGPUs together");
            self.row(&what, String::new(), self.busy(total), verdict, ratio >= 0.97);
        }
        Ok(())
    }

    fn busy(&self, kernels: f64) -> String {
        format!("{:.1} % busy", kernels / self.window.as_secs_f64() * 100.0)
    }

    fn start_loads(&self, fleet: &mut Fleet, loads: &[LoadSpec]) -> Result<()> {
        for (tenant, load) in fleet.tenants.iter_mut().zip(loads) {
            tenant.tell(&Order::Load(*load))?;
        }
        fleet.tenants.iter_mut().try_for_each(Tenant::hear)?;
        thread::sleep(self.settle);
        Ok(())
    }

    fn shares(&mut self, quick: bool) {
        let copy = if self.kind == GpuKind::Soft { 1 << 20 } else { 16 << 20 };
        let even = [self.kernels(MIDDLE); 3];
        let mixed = even.map(|load| LoadSpec { copy: Some(copy), ..load });
        let uneven = [self.kernels(LONG), self.kernels(SHORT)];
        let uneven_back = [uneven[1], uneven[0]];
        let sets: [(&str, &[u8], &[LoadSpec]); 6] = [
            ("80/20, kernels of 500 us", &[80, 20], &even),
            ("80/20, kernels of 20 ms and 50 us", &[80, 20], &uneven),
            ("80/20, kernels of 50 us and 20 ms", &[80, 20], &uneven_back),
            ("80/10/10, kernels of 500 us", &[80, 10, 10], &even),
            ("80/10/10, kernels and copies", &[80, 10, 10], &mixed),
            ("4/2/1, kernels and copies", &[56, 28, 14], &mixed),
        ];
        for (what, cores, loads) in &sets[..if quick { 1 } else { sets.len() }] {
            let done = self.share(what, cores, loads);
            self.attempt(what, done);
        }
    }

    fn share(&mut self, what: &str, cores: &[u8], loads: &[LoadSpec]) -> Result<()> {
        let attrs: Vec<Value> =
            cores.iter().map(|core| json!([{ "core": core.to_string() }])).collect();
        let mut fleet = self.fleet(SMALL_RAM, &attrs)?;
        self.start_loads(&mut fleet, loads)?;
        let before = fleet.used()?;
        let done = tenant::measure(&mut fleet.tenants, self.window)?;
        let after = fleet.used()?;
        let engine: Vec<f64> = before.iter().zip(&after).map(|(b, a)| a - b).collect();
        let kernels: Vec<f64> = done.iter().map(|one| one.kernels).collect();
        let bytes: Vec<f64> = done.iter().map(|one| one.bytes).collect();
        let sum: f64 = cores.iter().map(|core| f64::from(*core)).sum();
        let asked: Vec<f64> = cores.iter().map(|core| f64::from(*core) / sum * 100.0).collect();
        for (how, amounts) in [("kernels", kernels), ("copies", bytes), ("engine time", engine)] {
            let total: f64 = amounts.iter().sum();
            if total == 0.0 {
                continue;
            }
            let shares: Vec<f64> = amounts.iter().map(|one| one / total * 100.0).collect();
            let off = shares.iter().zip(&asked).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            let list = |all: &[f64]| {
                all.iter().map(|one| format!("{one:.1}")).collect::<Vec<_>>().join(" / ")
            };
            let verdict = format!("{off:.2} points off (1)");
            let row = format!("{what}: share of {how}");
            // What the GPU says of itself is shown beside what was done in it.
            let kept = off <= 1.0 || how == "engine time";
            self.row(&row, format!("asked {}", list(&asked)), list(&shares), verdict, kept);
        }
        Ok(())
    }

    fn cap(&mut self) -> Result<()> {
        let alone = self.alone()?;
        let mut fleet = self.fleet(SMALL_RAM, &[json!([{ "core": "25" }, { "mode": "hard" }])])?;
        self.start_loads(&mut fleet, &[self.kernels(MIDDLE)])?;
        let done = tenant::measure(&mut fleet.tenants, self.window)?;
        let part = done[0].kernels / alone * 100.0;
        let verdict = "25 +- 2".to_owned();
        let kept = (part - 25.0).abs() <= 2.0;
        self.row("hard 25 alone", "100 %".to_owned(), format!("{part:.1} %"), verdict, kept);
        Ok(())
    }

    /// One vGPU misbehaves while two others work.
    fn troubles(&mut self, quick: bool) {
        let all = [
            Trouble::Fault,
            Trouble::Hang,
            Trouble::FaultStorm,
            Trouble::DoorbellFlood,
            Trouble::GarbageRing,
        ];
        for trouble in all.into_iter().take(if quick { 1 } else { all.len() }) {
            // An endless kernel of the software GPU is preempted, and told of after a minute only.
            if self.kind == GpuKind::Soft && trouble == Trouble::Hang {
                continue;
            }
            let done = self.trouble_of(trouble);
            self.attempt(trouble.name(), done);
        }
        let done = self.killed();
        self.attempt("a worker killed -9", done);
    }

    fn trouble_of(&mut self, trouble: Trouble) -> Result<()> {
        let mut fleet = self.fleet(SMALL_RAM, &three())?;
        let load = [self.kernels(MIDDLE); 2];
        let mut bad = fleet.tenants.pop().context("There are three")?;
        self.start_loads(&mut fleet, &load)?;
        let before = tenant::measure(&mut fleet.tenants, self.window)?;
        bad.tell(&Order::Trouble(trouble, self.window))?;
        let during = tenant::measure(&mut fleet.tenants, self.window)?;
        let told = bad.hear::<Told>();
        self.trouble(trouble.name(), &before, &during, &format_told(trouble, told.as_ref()));
        Ok(())
    }

    fn killed(&mut self) -> Result<()> {
        let mut fleet = self.fleet(SMALL_RAM, &three())?;
        self.start_loads(&mut fleet, &[self.kernels(MIDDLE); 3])?;
        let mut killed = fleet.tenants.pop().context("There are three")?;
        let before = tenant::measure(&mut fleet.tenants, self.window)?;
        fleet.kill(2)?;
        let during = tenant::measure(&mut fleet.tenants, self.window)?;
        killed.tell(&Order::Measure(Duration::ZERO))?;
        let told = killed.hear::<Progress>().map_or("gone", |_| "still there?");
        self.trouble("a worker killed -9", &before, &during, told);
        Ok(())
    }

    /// What the others had before and while it happened.
    fn trouble(&mut self, what: &str, before: &[Progress], during: &[Progress], told: &str) {
        let ratio = |(before, during): (&Progress, &Progress)| during.kernels / before.kernels;
        let least = before.iter().zip(during).map(ratio).fold(f64::MAX, f64::min);
        let stall = during.iter().map(|one| one.stall_ms).fold(0.0, f64::max);
        let usual = before.iter().map(|one| one.stall_ms).fold(0.0, f64::max);
        let row = format!("beside {what} ({told})");
        let owner = format!("stall {usual:.0} ms before");
        let vgpu = format!("others do {:.1} %, stall {stall:.0} ms", least * 100.0);
        self.row(&row, owner, vgpu, "95 %, 150 ms".to_owned(), least >= 0.95 && stall < 150.0);
    }
}

/// Three vGPUs, the last of which misbehaves.
fn three() -> [Value; 3] {
    ["50", "30", "20"].map(|core| json!([{ "core": core }]))
}

fn format_told(trouble: Trouble, told: Result<&Told, &anyhow::Error>) -> String {
    match told {
        Ok(told) if matches!(trouble, Trouble::Fault | Trouble::Hang) => {
            format!("told {} after {:.0} ms", told.code, told.after_ms)
        }
        Ok(told) => format!("{} times", told.rounds),
        Err(error) => format!("{error:#}"),
    }
}
