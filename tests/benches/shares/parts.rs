//! Parts of the benchmark: one promise each.

use std::time::{Duration, Instant};

use anyhow::Result;
use mdev_core::sched::{Core, Mode, ShareRequest};
use vgpu_guest::work::spin::BLOCKS;

use super::Bench;
use super::bed::{Bed, Reading, Window};
use super::load::Load;
use super::storm::{Attack, Storm};

const LONG: Duration = Duration::from_millis(10);
const MIDDLE: Duration = Duration::from_micros(500);
const SHORT: Duration = Duration::from_micros(50);
/// Tolerance of a share in percentage points.
const OFF: f64 = 1.0;
/// Percentage points that vGPUs may lose to an attacker.
const LOST: f64 = 2.0;
/// Promised percentage of used time, and of one vGPU's throughput for many together.
const USED: f64 = 98.0;
/// Time limit until a changed share is in force.
const IN_FORCE: Duration = Duration::from_millis(50);
/// Rounds of compared measurements.
const TURNS: u32 = 9;
/// Sets of requested percentages.
const WEIGHTS: [(&str, &[u8]); 5] = [
    ("80/20", &[80, 20]),
    ("80/10/10", &[80, 10, 10]),
    ("4/2/1", &[56, 28, 14]),
    ("50/30/15/5", &[50, 30, 15, 5]),
    ("sixteen unequal", &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 5, 5, 6, 6]),
];

fn soft(core: u8) -> Result<ShareRequest> {
    Ok(ShareRequest::with_core(Some(Core::try_from(core)?)))
}

fn hard(core: u8) -> Result<ShareRequest> {
    Ok(ShareRequest { mode: Mode::Hard, ..soft(core)? })
}

fn names(values: &[f64]) -> String {
    let texts: Vec<String> = values.iter().map(|value| format!("{value:.1}")).collect();
    texts.join("/")
}

/// Weights under constant load, with long and short kernels.
pub fn steady(bench: &mut Bench) -> Result<()> {
    weighted(bench, "always busy", |index, _| Load::Steady(kernel(index)))
}

/// Weights under load in bursts: without pauses, and with pauses for every other vGPU.
pub fn bursty(bench: &mut Bench) -> Result<()> {
    weighted(bench, "refilled in bursts", |index, _| Load::Refilled(kernel(index)))?;
    // A burst takes 150 ms at its share. Each half has both kinds of kernels.
    weighted(bench, "on and off", |index, core| match index % 4 {
        1 | 2 => Load::OnOff(kernel(index), Duration::from_micros(1500) * u32::from(core)),
        _ => Load::Steady(kernel(index)),
    })
}

fn kernel(index: usize) -> Duration {
    if index.is_multiple_of(2) { LONG } else { SHORT }
}

fn weighted(bench: &mut Bench, what: &str, load: impl Fn(usize, u8) -> Load) -> Result<()> {
    for (name, cores) in WEIGHTS {
        let guests = cores.iter().enumerate();
        let guests: Vec<(ShareRequest, Load)> = guests
            .map(|(index, core)| Ok((soft(*core)?, load(index, *core))))
            .collect::<Result<_>>()?;
        let window = Bed::new(&guests, bench.iterations)?.measure(bench.settle, bench.window)?;
        let off = window.errors().into_iter().map(f64::abs).fold(0.0, f64::max);
        // Shares are promised to guests with work: a load that failed to submit work proves
        // nothing.
        let hungry = guests.iter().zip(&window.busy).filter(|((_, load), busy)| {
            !matches!(load, Load::OnOff(..)) && **busy < 0.9 * window.wall
        });
        let hungry = hungry.count();
        let off_by = format!("{off:.2} points off");
        let measured = match hungry {
            0 if cores.len() <= 4 => format!("{}: {off_by}", names(&window.shares())),
            0 => off_by,
            hungry => format!("{off_by}, and {hungry} had too little work"),
        };
        bench.note(
            format!("{name}, {what}: within {OFF} point of the GPU"),
            measured,
            off <= OFF && hungry == 0,
            window.stolen(),
        );
    }
    Ok(())
}

/// Measures the loads of two beds alternately, so that other load on the host affects both, and
/// returns pairs of windows.
fn compare(bench: &Bench, first: &mut Bed, second: &mut Bed) -> Result<Vec<(Window, Window)>> {
    first.pause(true);
    second.pause(true);
    let turn = |bed: &mut Bed| {
        bed.pause(false);
        let window = bed.measure(bench.settle / 4, bench.window / TURNS)?;
        bed.pause(true);
        // Drains the queues before the other bed begins.
        drain(bed)?;
        anyhow::Ok(window)
    };
    (0..TURNS).map(|_| Ok((turn(first)?, turn(second)?))).collect()
}

/// Returns the median of the rounds.
fn median(turns: impl Iterator<Item = f64>) -> f64 {
    let mut turns: Vec<f64> = turns.collect();
    turns.sort_by(f64::total_cmp);
    turns[turns.len() / 2]
}

fn stolen(turns: &[(Window, Window)]) -> f64 {
    let sum = turns.iter().flat_map(|(a, b)| [a.stolen(), b.stolen()]).sum::<f64>();
    sum / (2 * turns.len()) as f64
}

fn drain(bed: &mut Bed) -> Result<()> {
    loop {
        let before = bed.read()?;
        std::thread::sleep(Duration::from_millis(20));
        if bed.read()?.engine == before.engine {
            return Ok(());
        }
    }
}

/// One vGPU alone compared with several: the cost of switching.
pub fn throughput(bench: &mut Bench) -> Result<()> {
    let one = [(ShareRequest::with_core(None), Load::Steady(MIDDLE))];
    let mut alone = Bed::new(&one, bench.iterations)?;
    for count in [2, 4, 8, 16] {
        let mut many = Bed::new(&vec![one[0]; count], bench.iterations)?;
        let turns = compare(bench, &mut alone, &mut many)?;
        let part = median(turns.iter().map(|(solo, all)| all.rate() / solo.rate() * 100.0));
        bench.note(
            format!("{count} busy do {USED} % or more of what one does alone"),
            format!("{part:.1} %"),
            part >= USED,
            stolen(&turns),
        );
    }
    Ok(())
}

/// Caps: alone, and beside a vGPU that takes the rest.
pub fn caps(bench: &mut Bench) -> Result<()> {
    let mut solo =
        Bed::new(&[(ShareRequest::with_core(None), Load::Steady(MIDDLE))], bench.iterations)?;
    let mut capped = Bed::new(&[(hard(25)?, Load::Steady(MIDDLE))], bench.iterations)?;
    let turns = compare(bench, &mut solo, &mut capped)?;
    let part = median(turns.iter().map(|(solo, capped)| capped.rate() / solo.rate() * 100.0));
    let time = median(turns.iter().map(|(_, capped)| capped.utilisation()));
    bench.note(
        "hard 25 alone: 25 +- 1 % of solo throughput".to_owned(),
        format!("{part:.2} %, in {time:.2} % of the time"),
        (part - 25.0).abs() <= OFF,
        stolen(&turns),
    );
    let guests = [(hard(10)?, Load::Steady(MIDDLE)), (soft(90)?, Load::Steady(MIDDLE))];
    let window = Bed::new(&guests, bench.iterations)?.measure(bench.settle, bench.window)?;
    let part = window.used[0] / window.available() * 100.0;
    bench.note(
        "hard 10 beside soft 90: 10 +- 1 %".to_owned(),
        format!("{part:.2} %; {:.1} % used by both", window.utilisation()),
        (part - 10.0).abs() <= OFF,
        window.stolen(),
    );
    Ok(())
}

/// Use of time that its owners leave.
pub fn idle_neighbours(bench: &mut Bench) -> Result<()> {
    let guests =
        [(soft(20)?, Load::Steady(MIDDLE)), (soft(40)?, Load::Idle), (soft(40)?, Load::Idle)];
    let window = Bed::new(&guests, bench.iterations)?.measure(bench.settle, bench.window)?;
    let used = window.utilisation();
    bench.note(
        format!("soft 20 beside idle 40 and 40: {USED} % of the GPU used"),
        format!("{used:.1} %"),
        used >= USED,
        window.stolen(),
    );
    Ok(())
}

/// Requests: length, number a second, and the promised 99th percentile of their waits.
const REQUESTS: [(Duration, u32, Duration); 4] = [
    (Duration::from_micros(300), 20, Duration::from_millis(1)),
    (Duration::from_micros(300), 100, Duration::from_millis(1)),
    (Duration::from_micros(100), 400, Duration::from_millis(1)),
    (Duration::from_millis(5), 20, Duration::from_millis(1)),
];
/// Percentage of what requests leave that a busy vGPU beside them uses.
const USED_BESIDE: f64 = 97.0;

/// Brief work beside a vGPU that is always busy: it runs at once, is charged what it used, and
/// costs the other one nothing else.
pub fn brief(bench: &mut Bench) -> Result<()> {
    for (length, hz, promised) in REQUESTS {
        let load = Load::Requests(length, Duration::from_secs(1) / hz);
        let guests = [(soft(50)?, Load::Steady(MIDDLE)), (soft(50)?, load)];
        let mut bed = Bed::new(&guests, bench.iterations)?;
        let window = bed.measure(bench.settle, bench.window)?;
        let waited = bed.wait_p99(1)?;
        let what = format!("{hz} requests of {length:?} a second beside a busy vGPU");
        bench.note(
            format!("{what}: p99 of their waits at most {promised:?}"),
            format!("{waited:?}"),
            waited <= promised,
            window.stolen(),
        );
        // The kernels' time follows from their work, whatever was charged: all blocks of a launch
        // with these iterations take 10 ms together.
        let worked = window.work[1] / f64::from(BLOCKS * bench.iterations) * 1e7;
        let off = (window.used[1] - worked) / window.wall * 100.0;
        bench.note(
            format!("{what}: charged within {OFF} point"),
            format!("{off:.2} points"),
            off.abs() <= OFF,
            window.stolen(),
        );
        let part = window.used[0] / (window.available() - window.used[1]) * 100.0;
        bench.note(
            format!("{what}: {USED_BESIDE} % of the rest used"),
            format!("{part:.1} %"),
            part >= USED_BESIDE,
            window.stolen(),
        );
    }
    Ok(())
}

/// Time until a changed share is in force: from the request until usage follows the new share.
pub fn live_change(bench: &mut Bench) -> Result<()> {
    let steady = [Load::Steady(MIDDLE), Load::Steady(SHORT)];
    let guests = [(soft(80)?, steady[0]), (soft(20)?, steady[1])];
    let mut bed = Bed::new(&guests, bench.iterations)?;
    let mut worst = worst_of(bench, &mut bed, |round| {
        let (first, second) = if round % 2 == 0 { (20, 80) } else { (80, 20) };
        // The smaller share first, so that there is room for the larger one.
        let mut order = [(0, first), (1, second)];
        order.sort_by_key(|(_, core)| *core);
        let changes = order.map(|(index, core)| Ok((index, soft(core)?)));
        Change {
            changes: changes.into_iter().collect(),
            before: 1.0 - f64::from(first) / 100.0,
            after: f64::from(first) / 100.0,
            of_time: false,
        }
    })?;
    note_change(bench, "both ways between 80/20 and 20/80", &worst);
    worst = worst_of(bench, &mut bed, |round| {
        let (before, after, first) = if round % 2 == 0 { (0.8, 0.5, 20) } else { (0.5, 0.8, 80) };
        let changes = soft(first).map(|share| vec![(0, share)]);
        Change { changes, before, after, of_time: false }
    })?;
    note_change(bench, "of one, from 80 to 20 and back beside another's 20", &worst);
    drop(bed);
    let mut bed = Bed::new(&[(hard(50)?, Load::Steady(MIDDLE))], bench.iterations)?;
    worst = worst_of(bench, &mut bed, |round| {
        let (before, after, first) = if round % 2 == 0 { (0.5, 0.25, 25) } else { (0.25, 0.5, 50) };
        let changes = hard(first).map(|share| vec![(0, share)]);
        Change { changes, before, after, of_time: true }
    })?;
    note_change(bench, "of a cap, from 50 to 25 and back", &worst);
    Ok(())
}

/// A change of shares, and the first guest's usage.
struct Change {
    changes: Result<Vec<(usize, ShareRequest)>>,
    /// The guest's part before and after.
    before: f64,
    after: f64,
    /// Part of all time, not of the used time.
    of_time: bool,
}

fn note_change(bench: &mut Bench, what: &str, (worst, stolen): &(Option<Duration>, f64)) {
    let measured = match worst {
        Some(worst) => format!("{:.1} ms at most, of ten", worst.as_secs_f64() * 1e3),
        None => "not within 250 ms".to_owned(),
    };
    let kept = worst.is_some_and(|worst| worst <= IN_FORCE);
    bench.note(format!("A live change {what}: in force within 50 ms"), measured, kept, *stolen);
}

/// Returns the longest time of ten changes until each was in force, and the time that the host took
/// meanwhile.
fn worst_of(
    bench: &Bench,
    bed: &mut Bed,
    change: impl Fn(u32) -> Change,
) -> Result<(Option<Duration>, f64)> {
    std::thread::sleep(bench.settle);
    let (mut worst, first) = (Some(Duration::ZERO), bed.read()?);
    for round in 0..10 {
        let change = change(round);
        // At varying phases of the manager's interval.
        std::thread::sleep(Duration::from_millis(150 + u64::from(round) * 17));
        let mut readings = vec![bed.read()?];
        let asked = Instant::now();
        for (index, share) in change.changes? {
            bed.change(index, share)?;
            readings.push(bed.read()?);
        }
        while asked.elapsed() < Duration::from_millis(250) {
            std::thread::sleep(Duration::from_millis(1));
            readings.push(bed.read()?);
        }
        let took = in_force(&readings, change.before, change.after, change.of_time);
        worst = worst.zip(took).map(|(a, b)| a.max(b));
    }
    let last = bed.read()?;
    let took = last.delay - first.delay;
    Ok((worst, took / last.at_ns.saturating_sub(first.at_ns) as f64 * 100.0))
}

/// Returns the time from which the first guest's usage was its new part: from there to every later
/// moment it deviates at most by one slice. The time needed to distinguish the parts counts as the
/// old part.
fn in_force(readings: &[Reading], before: f64, after: f64, of_time: bool) -> Option<Duration> {
    // A slice of a few milliseconds, or a cap's period, in nanoseconds.
    let near = if of_time { 4e6 } else { 2e6 };
    let blur = Duration::from_secs_f64(near / (after - before).abs() / 1e9);
    let all = |reading: &Reading| {
        if of_time {
            reading.at_ns as f64 - reading.delay
        } else {
            reading.engine.iter().sum::<f64>()
        }
    };
    let is_kept = |from: usize| {
        readings[from..].iter().all(|later| {
            let used = later.engine[0] - readings[from].engine[0];
            (used - after * (all(later) - all(&readings[from]))).abs() <= near
        })
    };
    // The end of the record proves nothing.
    let last = readings.last()?.at_ns.saturating_sub(100_000_000);
    let from = (0..readings.len()).find(|from| is_kept(*from))?;
    let at_ns = readings[from].at_ns;
    let took = Duration::from_nanos(at_ns.saturating_sub(readings[0].at_ns));
    (at_ns <= last).then_some(took + blur)
}

/// An attack by one vGPU: the others' loss, compared with the time in which the attacker worked as
/// they did.
pub fn attacks(bench: &mut Bench) -> Result<()> {
    let guests = [
        (soft(50)?, Load::Steady(MIDDLE)),
        (soft(30)?, Load::Steady(SHORT)),
        (soft(20)?, Load::Steady(MIDDLE)),
    ];
    let mut bed = Bed::new(&guests, bench.iterations)?;
    for attack in Attack::ALL {
        let mut turns = Vec::new();
        for _ in 0..TURNS {
            let peace = bed.measure(bench.settle / 4, bench.window / TURNS)?;
            let storm = Storm::start(&bed.tenants[2].device, attack)?;
            let war = bed.measure(bench.settle / 4, bench.window / TURNS)?;
            storm.end()?;
            turns.push((peace, war));
        }
        // Relative to the time that the host gave the engine, and to all time.
        let engine = median(turns.iter().map(|turn| lost_points(turn, Window::available)));
        let wall = median(turns.iter().map(|turn| lost_points(turn, |window| window.wall)));
        bench.note(
            format!("beside {}: the others lose less than {LOST} points", attack.name()),
            format!("{engine:.2} points of engine time ({wall:.2} of wall time)"),
            engine < LOST,
            stolen(&turns),
        );
    }
    Ok(())
}

/// Returns the larger loss of the first two vGPUs, in percent of the undisturbed work of all.
fn lost_points((peace, war): &(Window, Window), time: impl Fn(&Window) -> f64) -> f64 {
    let full = peace.work.iter().sum::<f64>() / time(peace);
    let lost = |index: usize| peace.work[index] / time(peace) - war.work[index] / time(war);
    (0..2).map(|index| lost(index) / full * 100.0).fold(f64::MIN, f64::max)
}
