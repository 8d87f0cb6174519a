//! vGPUs compared with a plain process on the same GPU in the same run: copies, a matrix product,
//! latency, total throughput, shares, a cap, and throughput of others when one vGPU misbehaves.
//!
//! `--parent nvidia` measures this machine's GPU and is skipped on machines without one. The
//! `shares` benchmark measures the software GPU; without `--bench`, this benchmark only tests that
//! it works.

mod against;
mod beside;
mod cuda;
mod diary;
mod eviction;
mod fleet;
mod gpu_kind;
mod interrupts;
mod jobs;
mod kernels;
mod load;
mod many;
mod misbehaviour;
mod paced;
mod pauses;
mod plain_client;
mod programs;
mod requests;
mod solo;
mod tenant;
mod trouble;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use serde_json::{Value, json};
use system_tests::outcome::{Outcome, measuring};
use vgpu_guest::programs::DEFAULT_CUBIN;

use self::beside::{Beside, BesideSpec};
use self::fleet::Fleet;
use self::gpu_kind::{GpuKind, nvidia_is_here};
use self::load::LoadSpec;
use self::tenant::{Order, Tenant, TenantArgs};
use self::trouble::Trouble;

const MIDDLE: Duration = Duration::from_micros(500);
const SHORT: Duration = Duration::from_micros(50);
const LONG: Duration = Duration::from_millis(20);
/// Guest RAM of a tenant in MiB: room for two copies and three matrices.
const RAM: u64 = 640;
const SMALL_RAM: u64 = 64;

/// Measures vGPUs against a plain client of the GPU.
#[derive(Debug, Parser)]
#[command(name = "gpu")]
struct Cli {
    /// Which GPU [default: this machine's, or else the software one]
    #[arg(long, value_enum, global = true)]
    parent: Option<GpuKind>,
    /// Machine code of the kernels
    #[arg(long, global = true, default_value = DEFAULT_CUBIN)]
    cubin: PathBuf,
    /// The program that `cuda.c` was made into: what kernels are set against
    #[arg(long)]
    cuda: Option<PathBuf>,
    /// The program that `programs.cu` was made into: CUDA programs on vGPUs
    #[arg(long)]
    programs: Option<PathBuf>,
    /// The program that `features.cu` was made into: features of CUDA on vGPUs
    #[arg(long)]
    features: Option<PathBuf>,
    /// Windows of so many milliseconds
    #[arg(long)]
    window: Option<u64>,
    /// Short windows
    #[arg(long)]
    quick: bool,
    /// Only these: jobs, owner, solo, interrupts, cuda, together, many, shares, blocks, beside,
    /// requests, cap, pauses, trouble, programs (or program-results, -features, -shares, -trouble),
    /// eviction. Those that run only if named: owner, blocks, pauses, eviction, and unless quick
    /// many and requests
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Only these kinds of trouble
    #[arg(long, value_enum, value_delimiter = ',')]
    trouble: Vec<Trouble>,
    /// Further options of the parent, as in `,doorbell=direct`
    #[arg(long, default_value = "")]
    options: String,
    /// GiB that a vGPU's guest imports before the vGPU ends [default: 3/4 of this machine's]
    #[arg(long)]
    gib: Option<u64>,
    /// Each kind of trouble so often
    #[arg(long, default_value_t = 1)]
    times: u32,
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

/// Measurements of a run.
struct Bench<'a> {
    kind: GpuKind,
    cubin: &'a Path,
    settle: Duration,
    window: Duration,
    /// Nanoseconds of 1000 iterations, and bytes copied per second, without other load.
    pace: f64,
    rows: Vec<[String; 4]>,
    facts: Vec<Value>,
    kept: bool,
    /// Options of the parent.
    options: &'a str,
    /// The program that tries features of CUDA.
    features: Option<&'a Path>,
}

fn run(cli: &Cli, kind: GpuKind) -> Result<Outcome> {
    let quick = cli.quick || !measuring();
    let (settle, window) = kind.times(quick);
    let window = cli.window.unwrap_or(window);
    let mut plain = Tenant::start(kind, &cli.cubin, None, RAM)
        .context("Cannot start the plain client of the GPU")?;
    let mut bench = Bench {
        kind,
        cubin: &cli.cubin,
        settle: Duration::from_millis(settle.min(window)),
        window: Duration::from_millis(window),
        pace: 1.0,
        rows: Vec::new(),
        facts: Vec::new(),
        kept: true,
        options: &cli.options,
        features: cli.features.as_deref(),
    };
    // A failed measurement is reported, and the others continue.
    let asked = |part: &str| cli.only.iter().any(|only| only == part);
    let wanted = |part: &str| cli.only.is_empty() || asked(part);
    if wanted("jobs") {
        bench.jobs("the plain client", &mut plain)?;
        let mut fleet = bench.fleet(RAM, &[json!([])])?;
        bench.jobs("a vGPU", &mut fleet.tenants[0])?;
    }
    if asked("owner") {
        bench.jobs("the plain client", &mut plain)?;
        let solo = plain.solo(&bench.solo_spec(quick))?;
        eprintln!("gpu: the plain client: {solo:?}");
    }
    bench.pace = plain.calibrate()?;
    if wanted("solo") {
        bench.attempt("copies, product and latency", |bench| bench.solo(&mut plain, quick));
    }
    if asked("pauses") {
        bench.attempt("rings after pauses", |bench| bench.pauses(&mut plain));
    }
    drop(plain);
    if wanted("interrupts") {
        bench.attempt("waits by interrupt", Bench::interrupts);
    }
    if wanted("cuda") && !quick {
        bench.attempt("kernels against CUDA's", |bench| bench.cuda(cli.cuda.as_deref()));
    }
    if wanted("together") {
        bench.attempt("several together", |bench| {
            bench.together(if quick { &[1, 2] } else { &[1, 2, 4, 8] })
        });
    }
    if wanted("shares") {
        bench.shares(quick);
    }
    if wanted("beside") {
        bench.attempt("channels beside busy ones", Bench::beside);
    }
    long_parts(&mut bench, cli, quick, |part| asked(part) || quick && wanted(part));
    if asked("blocks") {
        bench.blocks();
    }
    if wanted("cap") && !quick {
        bench.attempt("hard 25 alone", Bench::cap);
    }
    if wanted("trouble") {
        bench.troubles(quick, &cli.trouble, cli.times);
    }
    if asked("eviction") {
        let gib = cli.gib.map_or_else(eviction::available_gib, Ok);
        bench.attempt("the end of a vGPU with much memory", |bench| bench.eviction(gib?));
    }
    for (part, measure) in programs::PARTS {
        if (wanted("programs") || wanted(part)) && !quick && kind == GpuKind::Nvidia {
            let program = cli.programs.as_deref().context("nvcc is missing: nothing was compiled");
            bench.attempt(part, |bench| measure(bench, program?));
        }
    }
    Ok(bench.outcome(window))
}

/// Measures the parts that take minutes, unless they are quick.
fn long_parts(bench: &mut Bench<'_>, cli: &Cli, quick: bool, wanted: impl Fn(&str) -> bool) {
    if wanted("many") {
        bench.attempt("many busy vGPUs", |bench| bench.many(quick, cli.programs.as_deref()));
    }
    if wanted("requests") {
        bench.attempt("requests beside a busy vGPU", |bench| bench.requests(quick));
    }
}

impl Bench<'_> {
    /// Returns the table and the facts.
    fn outcome(&self, window: u64) -> Outcome {
        let mut table = comfy_table::Table::new();
        table.load_style(comfy_table::presets::UTF8_FULL_CONDENSED);
        table.set_header(["what", "plain client", "vGPU", "ratio or promise"]);
        for row in &self.rows {
            table.add_row(row);
        }
        Outcome {
            line: format!(
                "{} GPU, windows of {} ms, 500 us kernels at {:.2} ns an iteration\n{table}",
                self.kind.name(),
                window,
                self.pace / 1000.0
            ),
            facts: json!({ "parent": self.kind.name(), "window_ms": window, "measured": self.facts }),
            kept: self.kept,
        }
    }

    /// Returns whether promises apply: to measurements of NVIDIA GPUs. The software GPU shares two
    /// cores with its guests.
    fn promised(&self) -> bool {
        self.kind == GpuKind::Nvidia && measuring()
    }

    /// Adds a row of the table.
    fn row(&mut self, what: &str, plain: String, vgpu: String, verdict: String, kept: bool) {
        let kept_or_not_promised = kept || !self.promised();
        let mark = if kept_or_not_promised { "" } else { ": NOT KEPT" };
        self.kept &= kept_or_not_promised;
        eprintln!("gpu: {what}: {plain} | {vgpu} | {verdict}{mark}");
        self.facts.push(json!({
            "what": what, "owner": plain, "vgpu": vgpu, "verdict": verdict, "kept": kept,
        }));
        self.rows.push([what.to_owned(), plain, vgpu, verdict + mark]);
    }

    fn fleet(&self, ram: u64, attrs: &[Value]) -> Result<Fleet> {
        Fleet::start(self.kind, self.options, self.cubin, ram, attrs)
    }

    /// Starts more vGPUs than the software GPU has memory for by default.
    fn large_fleet(&self, attrs: &[Value]) -> Result<Fleet> {
        let options = self.options_for(attrs.len());
        Fleet::start(self.kind, &options, self.cubin, SMALL_RAM, attrs)
    }

    /// Returns options of a parent for so many vGPUs of 1 GiB.
    fn options_for(&self, count: usize) -> String {
        match self.kind {
            GpuKind::Soft => format!("{},vram={count}G", self.options),
            GpuKind::Nvidia => self.options.to_owned(),
        }
    }

    fn kernels(&self, kernel: Duration) -> LoadSpec {
        LoadSpec { kernel: Some(kernel), pace: self.pace, ..LoadSpec::default() }
    }

    /// Measures, and reports a measurement that fails.
    fn attempt(&mut self, what: &str, measure: impl FnOnce(&mut Self) -> Result<()>) {
        if let Err(error) = measure(self) {
            self.row(what, String::new(), String::new(), format!("FAILED: {error:#}"), false);
        }
    }

    /// Measures the client's kernels alone, the baseline for throughput.
    fn alone(&self) -> Result<f64> {
        let mut plain = Tenant::start(self.kind, self.cubin, None, SMALL_RAM)?;
        plain.load(self.kernels(MIDDLE))?;
        thread::sleep(self.settle);
        let one = tenant::measure(std::slice::from_mut(&mut plain), self.window)?;
        Ok(one[0].kernels)
    }

    /// Fails the benchmark unless each job's results equal the CPU's.
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

    /// Measures the total throughput of several busy vGPUs.
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
                // Clocks drift: the client is measured before and after.
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
        self.start_loads_of(&mut fleet.tenants, loads)
    }

    fn start_loads_of(&self, tenants: &mut [Tenant], loads: &[LoadSpec]) -> Result<()> {
        for (tenant, load) in tenants.iter_mut().zip(loads) {
            tenant.tell(&Order::Load(*load))?;
        }
        tenants.iter_mut().try_for_each(Tenant::hear)?;
        thread::sleep(self.settle);
        Ok(())
    }

    fn shares(&mut self, quick: bool) {
        let copy = self.copy_bytes();
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
            self.attempt(what, |bench| bench.share(what, cores, loads));
        }
    }

    /// Measures the benefit and the cost of preempting compute between blocks.
    fn blocks(&mut self) {
        if self.kind == GpuKind::Soft {
            return;
        }
        self.options = ",preempt=blocks";
        self.attempt("several together, preempt=blocks", |bench| bench.together(&[1, 4]));
        let (long, short) = (self.kernels(LONG), self.kernels(SHORT));
        for (what, loads) in [
            ("preempt=blocks, 80/20, kernels of 20 ms and 50 us", [long, short]),
            ("preempt=blocks, 80/20, kernels of 50 us and 20 ms", [short, long]),
        ] {
            self.attempt(what, |bench| bench.share(what, &[80, 20], &loads));
        }
        self.options = "";
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
        // Equal kernels show shares by their numbers. For different kernels and for copies, only
        // engine time does.
        let equal = loads.windows(2).all(|two| two[0] == two[1]) && loads[0].copy.is_none();
        let promised = if equal { "kernels" } else { "engine time" };
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
            let bound = if how == promised { " (1)" } else { "" };
            let verdict = format!("{off:.2} points off{bound}");
            let row = format!("{what}: share of {how}");
            let kept = off <= 1.0 || how != promised;
            self.row(&row, format!("asked {}", list(&asked)), list(&shares), verdict, kept);
        }
        Ok(())
    }

    /// Measures another channel of a vGPU whose rings never run empty, while two more vGPUs have
    /// the same load.
    fn beside(&mut self) -> Result<()> {
        let copies = LoadSpec { copy: Some(self.copy_bytes()), ..LoadSpec::default() };
        let kernels = self.kernels(MIDDLE);
        let sets = [
            ("a copy channel beside copies", copies, false),
            ("a compute channel beside copies", copies, true),
            ("a compute channel beside kernels", kernels, true),
        ];
        let mut fleet = self.fleet(SMALL_RAM, &three())?;
        for (what, load, compute) in sets {
            self.start_loads(&mut fleet, &[load; 3])?;
            fleet.tenants[0].tell(&Order::Beside(BesideSpec { compute, trips: 200 }))?;
            let Beside { made_ms, worst_ms } = fleet.tenants[0].hear()?;
            let line = format!("made in {made_ms:.0} ms, a command takes {worst_ms:.0} ms at most");
            self.row(what, String::new(), line, "1 s".to_owned(), made_ms.max(worst_ms) < 1000.0);
        }
        Ok(())
    }

    fn copy_bytes(&self) -> u64 {
        if self.kind == GpuKind::Soft { 1 << 20 } else { 16 << 20 }
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
}

/// Measures three vGPUs, the last of which misbehaves.
fn three() -> [Value; 3] {
    ["50", "30", "20"].map(|core| json!([{ "core": core }]))
}
