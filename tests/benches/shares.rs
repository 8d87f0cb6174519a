//! Shares, caps, throughput and attacks: what is promised, and what was measured.
//!
//! `--quick` measures over short windows. Every figure is of the time that the host gave the engine, and is set against
//! a baseline of the same run.

#[path = "shares/bed.rs"]
mod bed;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use mdev_core::abi::control::reg;
use mdev_core::gpu::EngineKind;
use mdev_core::sched::{Core, Mode, Share};
use serde_json::{Value, json};
use system_tests::outcome::{Outcome, measuring, report};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::pushbuffer::Methods;
use vgpu_guest::work::Work;
use vgpu_guest::work::spin::Spin;

use self::bed::{Bed, Load, Window};

const LONG: Duration = Duration::from_millis(10);
const MIDDLE: Duration = Duration::from_micros(500);
const SHORT: Duration = Duration::from_micros(50);
/// Points of a hundred that a share may be off.
const OFF: f64 = 1.0;
/// Sets of hundredths asked for.
const WEIGHTS: [&[u8]; 5] = [
    &[80, 20],
    &[80, 10, 10],
    &[56, 28, 14],
    &[50, 30, 15, 5],
    &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 5, 5, 6, 6],
];

fn main() -> ExitCode {
    report("shares", run)
}

/// All measurements of a run.
struct Bench {
    settle: Duration,
    window: Duration,
    iterations: u32,
    lines: Vec<String>,
    facts: Vec<Value>,
    kept: bool,
}

fn run() -> Result<Outcome> {
    let quick = !measuring() || std::env::args().any(|argument| argument == "--quick");
    let (settle, window) = if quick { (300, 1000) } else { (1000, 10_000) };
    let mut bench = Bench {
        settle: Duration::from_millis(settle),
        window: Duration::from_millis(window),
        iterations: bed::calibrate()?,
        lines: Vec::new(),
        facts: Vec::new(),
        kept: true,
    };
    bench.weighted(if measuring() { &WEIGHTS } else { &WEIGHTS[..1] })?;
    if measuring() {
        let solo = bench.throughput()?;
        bench.caps(solo)?;
        bench.idle_neighbours()?;
        bench.live_change()?;
        bench.attacks()?;
    }
    Ok(Outcome {
        line: format!("windows of {window} ms\n  {}", bench.lines.join("\n  ")),
        facts: json!({ "window_ms": window, "measured": bench.facts }),
        kept: bench.kept,
    })
}

fn soft(core: u8) -> Result<Share> {
    Ok(Share::of(Some(Core::try_from(core)?)))
}

fn hard(core: u8) -> Result<Share> {
    Ok(Share { mode: Mode::Hard, ..soft(core)? })
}

impl Bench {
    fn note(&mut self, what: &str, measured: &str, promised: &str, kept: bool, window: &Window) {
        let verdict = if kept { "ok" } else { "NOT KEPT" };
        let line = format!(
            "{what}: {measured} (promised {promised}): {verdict}; host took {:.0} %",
            window.stolen
        );
        eprintln!("{line}");
        self.facts.push(json!({
            "what": what, "measured": measured, "promised": promised, "kept": kept,
            "stolen": window.stolen,
        }));
        self.lines.push(line);
        self.kept &= kept;
    }

    fn window(&self, guests: &[(Share, Load)]) -> Result<Window> {
        Bed::new(guests, self.iterations)?.measure(self.settle, self.window)
    }

    fn weighted(&mut self, sets: &[&[u8]]) -> Result<()> {
        for cores in sets {
            for bursty in [false, true] {
                let load = |index: usize| {
                    let kernel = if index.is_multiple_of(2) { LONG } else { SHORT };
                    if bursty { Load::Bursty(kernel) } else { Load::Steady(kernel) }
                };
                let guests = cores.iter().enumerate();
                let guests: Vec<(Share, Load)> = guests
                    .map(|(index, core)| Ok((soft(*core)?, load(index))))
                    .collect::<Result<_>>()?;
                let window = self.window(&guests)?;
                let sum: f64 = cores.iter().map(|core| f64::from(*core)).sum();
                let off = cores
                    .iter()
                    .zip(&window.shares)
                    .map(|(core, share)| (share - f64::from(*core) / sum * 100.0).abs());
                let off = off.fold(0.0, f64::max);
                let shares: Vec<String> =
                    window.shares.iter().map(|share| format!("{share:.1}")).collect();
                let names: Vec<String> = cores.iter().map(u8::to_string).collect();
                let what = format!(
                    "weighted {} {}, kernels of 10 ms and 50 us",
                    names.join("/"),
                    if bursty { "bursty" } else { "steady" }
                );
                let measured = format!("{}, {off:.2} points off", shares.join("/"));
                self.note(&what, &measured, "within 1 point", off <= OFF, &window);
            }
        }
        Ok(())
    }

    /// Throughput of several together; that of one alone is the result.
    fn throughput(&mut self) -> Result<f64> {
        let mut solo = 0.0;
        for count in [1, 2, 4, 8, 16] {
            let window = self.window(&vec![(Share::of(None), Load::Steady(MIDDLE)); count])?;
            let rate: f64 = window.rates.iter().sum();
            if count == 1 {
                solo = rate;
            }
            let part = rate / solo * 100.0;
            let what = format!("throughput of {count} busy");
            let measured = format!("{part:.1} % of one alone");
            self.note(&what, &measured, "98 % or more", part >= 98.0, &window);
        }
        Ok(solo)
    }

    fn caps(&mut self, solo: f64) -> Result<()> {
        let window = self.window(&[(hard(25)?, Load::Steady(MIDDLE))])?;
        let part = window.rates[0] / solo * 100.0;
        let measured =
            format!("{part:.2} % of solo throughput, {:.2} % of engine time", window.used);
        let kept = (part - 25.0).abs() <= OFF;
        self.note("hard 25 alone", &measured, "25 +- 1", kept, &window);
        let guests = [(hard(10)?, Load::Steady(MIDDLE)), (soft(90)?, Load::Steady(MIDDLE))];
        let window = self.window(&guests)?;
        let measured = format!(
            "{:.2} beside {:.2}, {:.1} % used",
            window.shares[0], window.shares[1], window.used
        );
        let kept = (window.shares[0] - 10.0).abs() <= OFF;
        self.note("hard 10 beside soft", &measured, "10 +- 1", kept, &window);
        Ok(())
    }

    fn idle_neighbours(&mut self) -> Result<()> {
        let guests =
            [(soft(20)?, Load::Steady(MIDDLE)), (soft(40)?, Load::Idle), (soft(40)?, Load::Idle)];
        let window = self.window(&guests)?;
        let measured = format!("{:.1} % of the GPU used", window.used);
        self.note(
            "soft 20 beside idle 40 and 40",
            &measured,
            "98 % or more",
            window.used >= 98.0,
            &window,
        );
        Ok(())
    }

    /// How long until a new share shows, in the worst of ten changes.
    fn live_change(&mut self) -> Result<()> {
        const SEEN: Duration = Duration::from_millis(25);
        let guests = [(soft(50)?, Load::Steady(MIDDLE)), (soft(50)?, Load::Steady(MIDDLE))];
        let mut bed = Bed::new(&guests, self.iterations)?;
        bed.tick(self.settle)?;
        let mut worst = Duration::ZERO;
        for round in 0..10 {
            let (first, second) = if round % 2 == 0 { (80, 20) } else { (20, 80) };
            // The smaller first, so that there is room for the larger.
            let order =
                if round % 2 == 0 { [(1, second), (0, first)] } else { [(0, first), (1, second)] };
            let asked = Instant::now();
            for (index, core) in order {
                bed.change(index, soft(core)?)?;
            }
            loop {
                let (from, before) = (asked.elapsed(), bed.used()?);
                thread::sleep(SEEN);
                let after = bed.used()?;
                let used: Vec<f64> = after.iter().zip(before).map(|(a, b)| a - b).collect();
                let share = used[0] / (used[0] + used[1]).max(1.0) * 100.0;
                if (share - f64::from(first)).abs() <= 10.0 {
                    worst = worst.max(from);
                    break;
                }
                if asked.elapsed() > Duration::from_secs(2) {
                    worst = asked.elapsed();
                    break;
                }
            }
            bed.tick(Duration::from_millis(300))?;
        }
        let measured = format!("{:.1} ms at most, of ten changes", worst.as_secs_f64() * 1e3);
        let kept = worst <= Duration::from_millis(50);
        self.note("live change from 80/20 to 20/80", &measured, "50 ms", kept, &Window::default());
        Ok(())
    }

    fn attacks(&mut self) -> Result<()> {
        let victims = [
            (soft(50)?, Load::Steady(MIDDLE)),
            (soft(30)?, Load::Steady(SHORT)),
            (soft(20)?, Load::Steady(MIDDLE)),
        ];
        let baseline = self.window(&victims)?;
        let guests = [victims[0], victims[1], (soft(20)?, Load::Idle)];
        let full: f64 = baseline.rates.iter().sum();
        for attack in [Attack::Endless, Attack::Doorbells, Attack::Mailbox, Attack::Maps] {
            let mut bed = Bed::new(&guests, self.iterations)?;
            let stop = Arc::new(AtomicBool::new(false));
            let (device, ends) = (bed.tenants[2].guest.device.clone(), Arc::clone(&stop));
            let attacker = thread::spawn(move || attack.run(&device, &ends));
            let window = bed.measure(self.settle, self.window);
            stop.store(true, Ordering::Relaxed);
            drop(attacker.join());
            let window = window?;
            let lost =
                (0..2).map(|index| (baseline.rates[index] - window.rates[index]) / full * 100.0);
            let lost = lost.fold(f64::MIN, f64::max);
            let what = format!("beside a vGPU with {}", attack.name());
            let measured = format!("the others lose {lost:.2} points at most");
            self.note(&what, &measured, "less than 2", lost < 2.0, &window);
        }
        Ok(())
    }
}

/// The worst that a guest can do.
#[derive(Clone, Copy, Debug)]
enum Attack {
    Endless,
    Doorbells,
    Mailbox,
    Maps,
}

impl Attack {
    fn name(self) -> &'static str {
        match self {
            Self::Endless => "an endless kernel",
            Self::Doorbells => "a storm of doorbells and wake-ups",
            Self::Mailbox => "a storm of mailbox requests",
            Self::Maps => "a storm of maps and unmaps",
        }
    }

    fn run(self, device: &Device, stop: &AtomicBool) -> Result<()> {
        let mut channel = Channel::new(device, EngineKind::Compute)?;
        let (name, mut methods) = (channel.name(), Methods::new());
        let spin = Spin::new(device, if matches!(self, Self::Endless) { u32::MAX } else { 100 })?;
        spin.push(&mut methods);
        channel.submit(&methods)?;
        let offset = device.take_vram(1 << 20)?;
        while !stop.load(Ordering::Relaxed) {
            match self {
                Self::Endless => thread::sleep(Duration::from_millis(10)),
                Self::Doorbells => {
                    device.platform().ring(name.token);
                    device.platform().write32(reg::WAKE, name.token);
                }
                Self::Mailbox => drop(device.query_channel(name.channel)?),
                Self::Maps => {
                    let va = device.map_vram(offset, 1 << 20)?;
                    device.unmap(va, 1 << 20)?;
                }
            }
        }
        Ok(())
    }
}
