//! Cost of the protocol: this server, the `vfio_user` crate's server and the plain socket, in one
//! run.
//!
//! `cargo bench -p system-tests --bench protocol`. Clients sleep while they wait, like a virtual
//! CPU. The contenders alternate, so that other load affects all alike. docs/performance.md
//! explains the numbers.

// Clippy recognizes only functions marked as tests.
#![allow(clippy::unwrap_used)]

mod client;
mod servers;

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use client::{Client, Times};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::Pid;

const TURNS: usize = 5;
const READS: usize = 8000;
/// Warm-up reads of each round: the previous contender may have moved the client to another CPU.
const WARM: usize = 1000;
const SESSIONS: usize = 64;
const SESSION_READS: usize = 300;
const ATTACHES: usize = 300;
const MAPS: usize = 1000;
/// Promised ratio of a round trip to one with the `vfio_user` crate's server.
const PROMISE: f64 = 0.5;

type Serve = fn(&Path);

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| -> PathBuf { folder.path().join(name) };
    round_trips(&path);
    apart(&path);
    maps(&path);
    attaches(&path);
    many_sessions(&path);
    idle(&path);
    loaded(&path);
}

/// Prints p50, p99 and minimum of each contender, and the first one's ratios to the others.
fn table(what: &str, rows: &[(&str, Times)]) {
    println!("\n{what}");
    println!("{:<28} {:>9} {:>9} {:>9}", "", "p50 us", "p99 us", "best us");
    for (name, times) in rows {
        let [p50, p99, best] = [50, 99, 0].map(|n| times.percentile(n));
        println!("{name:<28} {p50:>9.2} {p99:>9.2} {best:>9.2}");
    }
    for (name, other) in &rows[1..] {
        let [p50, p99] = [50, 99].map(|n| rows[0].1.percentile(n) / other.percentile(n));
        println!("{} / {name}: p50 {p50:.2}, p99 {p99:.2}", rows[0].0);
    }
}

/// Prints whether the promise is kept, and whether it could be: the last `floors` rows are plain
/// sockets.
fn verdict(rows: &[(&str, Times)], floors: usize) {
    let [p50, p99] = [50, 99].map(|n| {
        let theirs = rows[1].1.percentile(n);
        let floor = rows[rows.len() - floors..].iter().map(|(_, times)| times.percentile(n));
        (rows[0].1.percentile(n) / theirs, floor.fold(f64::MAX, f64::min) / theirs)
    });
    let kept = if p50.0 <= PROMISE && p99.0 <= PROMISE { "kept" } else { "NOT kept" };
    println!("promise, {PROMISE} of the crate: p50 {:.2}, p99 {:.2}: {kept}", p50.0, p99.0);
    println!("a socket with nothing behind it: p50 {:.2}, p99 {:.2} of the crate", p50.1, p99.1);
}

fn round_trips(path: &impl Fn(&str) -> PathBuf) {
    let contenders: [(&str, Serve, bool); 5] = [
        ("this server", servers::ours, true),
        ("vfio_user crate", servers::theirs, true),
        ("this server, always asleep", servers::ours_sleeping, true),
        ("socket alone, asleep", servers::echo, false),
        ("socket alone, awake", servers::echo_polling, false),
    ];
    let mut rows: Vec<(&str, Times)> = Vec::new();
    let mut clients: Vec<Client> = Vec::new();
    // The contender that never sleeps would take a CPU from the others: it runs last and alone.
    let (last, rest) = contenders.split_last().unwrap();
    for (name, serve, greet) in rest {
        serve(&path(name));
        clients.push(Client::connect(&path(name), *greet));
        rows.push((name, Times::default()));
    }
    for turn in 0..=TURNS {
        for (client, (_, times)) in clients.iter_mut().zip(&mut rows) {
            (0..WARM).for_each(|_| {
                client.read();
            });
            let took: Vec<Duration> = (0..READS).map(|_| client.read()).collect();
            if turn > 0 {
                times.add(took);
            }
        }
    }
    (last.1)(&path(last.0));
    let mut client = Client::connect(&path(last.0), last.2);
    let mut times = Times::default();
    times.add((0..TURNS * READS).map(|_| client.read()));
    rows.push((last.0, times));
    table(&format!("Round trip of a 4-byte REGION_READ, {} of each", TURNS * READS), &rows);
    verdict(&rows, 2);
}

/// Measures with the client pinned to one CPU and each server to another.
fn apart(path: &impl Fn(&str) -> PathBuf) {
    let me = Pid::from_raw(0);
    let all = sched_getaffinity(me).unwrap();
    let cpus: Vec<usize> = (0..CpuSet::count()).filter(|cpu| all.is_set(*cpu).unwrap()).collect();
    let [client_cpu, .., server_cpu] = cpus[..] else {
        println!("\nOne CPU: client and server cannot be pinned apart");
        return;
    };
    let hold = |cpu: usize| {
        let mut set = CpuSet::new();
        set.set(cpu).unwrap();
        sched_setaffinity(me, &set).unwrap();
    };
    let contenders: [(&str, Serve, bool); 5] = [
        ("this server", servers::ours_polling, true),
        ("vfio_user crate", servers::theirs, true),
        ("this server, always asleep", servers::ours_sleeping, true),
        ("socket alone, asleep", servers::echo, false),
        ("socket alone, awake", servers::echo_polling, false),
    ];
    let rows = contenders.map(|(name, serve, greet)| {
        let path = path(&format!("{name}, apart"));
        // A thread inherits the affinity of its creator.
        hold(server_cpu);
        serve(&path);
        hold(client_cpu);
        let mut client = Client::connect(&path, greet);
        let mut times = Times::default();
        times.add((0..WARM + READS).map(|_| client.read()).skip(WARM));
        (name, times)
    });
    sched_setaffinity(me, &all).unwrap();
    table(&format!("The same, client and server on a CPU each, {READS} of each"), &rows);
    verdict(&rows, 2);
}

fn maps(path: &impl Fn(&str) -> PathBuf) {
    let memory: OwnedFd = memfd_create(c"bench", MFdFlags::MFD_CLOEXEC).unwrap();
    nix::unistd::ftruncate(&memory, 1 << 20).unwrap();
    let rows = [("this server", servers::ours as Serve), ("vfio_user crate", servers::theirs)].map(
        |(name, serve)| {
            let path = path(&format!("maps of {name}"));
            serve(&path);
            let mut client = vfio_user::Client::new(&path).unwrap();
            let mut times = Times::default();
            times.add((0..MAPS as u64).map(|n| {
                let start = Instant::now();
                client.dma_map(0, n << 20, 1 << 20, memory.as_raw_fd()).unwrap();
                client.dma_unmap(n << 20, 1 << 20).unwrap();
                start.elapsed()
            }));
            (name, times)
        },
    );
    table(&format!("DMA_MAP with a descriptor and DMA_UNMAP, {MAPS} pairs"), &rows);
}

fn attaches(path: &impl Fn(&str) -> PathBuf) {
    servers::ours(&path("attach"));
    let mut ours = Times::default();
    let mut theirs = Times::default();
    for n in 0..ATTACHES {
        // The `vfio_user` crate's server serves one client and is created again outside of the
        // measured time.
        let their_path = path(&format!("attach {n}"));
        servers::theirs(&their_path);
        thread::sleep(Duration::from_millis(1));
        for (path, times) in [(&path("attach"), &mut ours), (&their_path, &mut theirs)] {
            let start = Instant::now();
            Client::connect(path, true).read();
            times.add([start.elapsed()]);
        }
    }
    let rows = [("this server", ours), ("vfio_user crate", theirs)];
    table("Attach: connect, version, first read answered", &rows);
}

fn many_sessions(path: &impl Fn(&str) -> PathBuf) {
    let all: [(&str, Serve); 3] = [
        ("this server", servers::ours),
        ("vfio_user crate", servers::theirs),
        ("this server, always asleep", servers::ours_sleeping),
    ];
    let mut rates = Vec::new();
    let rows = all.map(|(name, serve)| {
        let clients: Vec<Client> = (0..SESSIONS)
            .map(|n| {
                let path = path(&format!("{name} {n} of many"));
                serve(&path);
                Client::connect(&path, true)
            })
            .collect();
        let start = Instant::now();
        let threads: Vec<_> = clients
            .into_iter()
            .map(|mut client| {
                thread::spawn(move || (0..SESSION_READS).map(|_| client.read()).collect::<Vec<_>>())
            })
            .collect();
        let mut times = Times::default();
        for thread in threads {
            times.add(thread.join().unwrap());
        }
        rates.push((SESSIONS * SESSION_READS) as f64 / start.elapsed().as_secs_f64());
        (name, times)
    });
    table(&format!("{SESSIONS} sessions at once, {SESSION_READS} reads each"), &rows);
    let [ours, theirs, asleep] = rates[..] else { return };
    println!("all together, reads/s: {ours:.0}, crate {theirs:.0}, always asleep {asleep:.0}");
}

/// Returns the CPU time of this process in nanoseconds.
fn cpu_ns() -> u64 {
    let schedstat = |task: std::fs::DirEntry| -> Option<u64> {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    std::fs::read_dir("/proc/self/task").unwrap().flatten().filter_map(schedstat).sum()
}

/// Measures the cost of an idle device just after use.
fn idle(path: &impl Fn(&str) -> PathBuf) {
    servers::ours(&path("idle"));
    let mut client = Client::connect(&path("idle"), true);
    for _ in 0..READS {
        client.read();
    }
    let (start, before) = (Instant::now(), cpu_ns());
    thread::sleep(Duration::from_secs(2));
    let used = (cpu_ns() - before) as f64 / start.elapsed().as_nanos() as f64;
    println!("\nIdle device, 2 s after {READS} reads: {:.3} % of a core", used * 100.0);
    // A guest that reads a register every millisecond.
    let (start, before, mut reads) = (Instant::now(), cpu_ns(), 0);
    while start.elapsed() < Duration::from_secs(2) {
        thread::sleep(Duration::from_millis(1));
        client.read();
        reads += 1;
    }
    let used = (cpu_ns() - before) as f64 / start.elapsed().as_nanos() as f64;
    println!("{reads} reads in 2 s, client included: {:.3} % of a core", used * 100.0);
}

/// Measures with every CPU busy, as under an emulator with as many virtual CPUs: what busy polling
/// takes from the others.
fn loaded(path: &impl Fn(&str) -> PathBuf) {
    static STOP: AtomicBool = AtomicBool::new(false);
    static WORK: AtomicU64 = AtomicU64::new(0);
    for _ in 0..thread::available_parallelism().unwrap().get() {
        thread::spawn(|| {
            while !STOP.load(Ordering::Relaxed) {
                std::hint::black_box((0..1000_u32).fold(0, u32::wrapping_add));
                WORK.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let all: [(&str, Serve); 2] =
        [("this server", servers::ours), ("this server, always asleep", servers::ours_sleeping)];
    let mut clients = all.map(|(name, serve)| {
        let path = path(&format!("{name}, loaded"));
        serve(&path);
        Client::connect(&path, true)
    });
    let mut rows = all.map(|(name, _)| (name, Times::default()));
    let mut rates = [(0, Duration::ZERO); 2];
    for turn in 0..8 {
        for ((client, row), rate) in clients.iter_mut().zip(&mut rows).zip(&mut rates) {
            let (start, before) = (Instant::now(), WORK.load(Ordering::Relaxed));
            let mut took = Vec::new();
            while start.elapsed() < Duration::from_millis(500) {
                took.push(client.read());
            }
            if turn > 0 {
                rate.0 += WORK.load(Ordering::Relaxed) - before;
                rate.1 += start.elapsed();
                row.1.add(took);
            }
        }
    }
    STOP.store(true, Ordering::Relaxed);
    table("All CPUs busy with other work", &rows);
    let [ours, asleep] = rates.map(|(work, time)| work as f64 / time.as_secs_f64());
    println!("the others' work / with a server always asleep: {:.3}", ours / asleep);
}
