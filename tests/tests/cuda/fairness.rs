//! Processes that share a vGPU: one that sends requests as fast as it can delays no other, and
//! takes a bounded part of a CPU.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cuda_socket::{FileId, IoctlRequest, Refused, Request, encode_numbered};
use ipc::seqpacket::MAX_PACKET;
use nix::errno::Errno;
use system_tests::Vgpud;

use crate::program::{Program, start_vgpu};

/// Processes that flood the vGPU, and requests that each has under way.
const FLOODERS: usize = 4;
const UNDER_WAY: usize = 32;

/// Longest median of another process's request.
const LONGEST: Duration = Duration::from_millis(10);

/// A program with a request, which it repeats.
struct Asking {
    program: Program,
    request: Vec<u8>,
}

impl Asking {
    fn connect(path: &Path) -> Result<Self> {
        let mut program = Program::connect(path)?;
        let file = program.open()?.map_err(Errno::from_raw)?;
        Ok(Self { program, request: encode_numbered(2, &sys_params(file))? })
    }

    fn send(&self) -> Result<()> {
        Ok(self.program.socket.send(&self.request, &[])?)
    }

    fn receive(&self, buffer: &mut [u8]) -> Result<()> {
        self.program.socket.recv(buffer)?.context("The connection has ended").map(drop)
    }
}

/// `NV_ESC_SYS_PARAMS`, a request without effect.
fn sys_params(file: FileId) -> Request {
    Request::Ioctl(IoctlRequest {
        file,
        request: 0xc008_46d6,
        argument: vec![0; 8],
        blocks: Vec::new(),
        files: Vec::new(),
        shared: Vec::new(),
        refused: Refused::default(),
    })
}

/// Floods a vGPU until `stop`, and counts the answers.
fn flood(program: &Asking, stop: &AtomicBool, answers: &AtomicU64) -> Result<()> {
    let mut buffer = vec![0; MAX_PACKET];
    (0..UNDER_WAY).try_for_each(|_| program.send())?;
    while !stop.load(Ordering::Relaxed) {
        program.receive(&mut buffer)?;
        answers.fetch_add(1, Ordering::Relaxed);
        program.send()?;
    }
    Ok(())
}

/// Returns the median time of a request.
fn median(program: &Asking) -> Result<Duration> {
    let mut buffer = vec![0; MAX_PACKET];
    let mut times = Vec::new();
    for _ in 0..101 {
        let start = Instant::now();
        program.send()?;
        program.receive(&mut buffer)?;
        times.push(start.elapsed());
    }
    times.sort_unstable();
    Ok(times[times.len() / 2])
}

#[test]
fn a_flood_of_requests_delays_no_other_process() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let (_, path) = start_vgpu(&vgpud)?;
    let program = Asking::connect(&path)?;
    let alone = median(&program)?;
    let (stop, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let flooders = (0..FLOODERS).map(|_| {
        let flooder = Asking::connect(&path)?;
        let (stop, answers) = (stop.clone(), answers.clone());
        Ok(thread::spawn(move || flood(&flooder, &stop, &answers)))
    });
    let flooders: Vec<_> = flooders.collect::<Result<_>>()?;
    // The best of three: the test shares its CPUs with others.
    let beside = (0..3).map(|_| median(&program)).collect::<Result<Vec<_>>>();
    let flooded = answers.load(Ordering::Relaxed);
    stop.store(true, Ordering::Relaxed);
    for flooder in flooders {
        flooder.join().map_err(|_| anyhow::anyhow!("A flooder panicked"))??;
    }
    let beside = beside?.into_iter().min().context("No time")?;
    println!("alone {alone:?}, beside {flooded} requests of {FLOODERS} processes {beside:?}");
    ensure!(flooded > 0, "Nothing was flooded");
    ensure!(beside < LONGEST, "A request takes {beside:?} beside a flood, {alone:?} alone");
    Ok(())
}

/// Returns the CPU time of a process or thread with this folder in `/proc`.
pub fn cpu_time(folder: &Path) -> Result<Duration> {
    let stat = fs::read_to_string(folder.join("stat"))?;
    let fields = stat.rsplit_once(") ").context("No name")?.1;
    // utime and stime, in hundredths of a second.
    let ticks = fields.split(' ').skip(11).take(2).map(str::parse::<u64>);
    let ticks: u64 = ticks.sum::<Result<_, _>>()?;
    Ok(Duration::from_millis(10 * ticks))
}

#[test]
fn a_flood_of_requests_takes_a_bounded_part_of_a_cpu() -> Result<()> {
    const TIME: Duration = Duration::from_secs(6);
    /// The reserve of 1 s and a quarter of the time, with a margin for timers.
    const MOST: Duration = Duration::from_secs(3);
    let vgpud = Vgpud::start()?;
    let (uuid, path) = start_vgpu(&vgpud)?;
    let worker = vgpud.call("GET", &format!("/v1/vgpus/{uuid}"), None)?["pid"].as_u64();
    let worker = PathBuf::from(format!("/proc/{}", worker.context("No worker")?));
    let (program, flooder) = (Asking::connect(&path)?, Asking::connect(&path)?);
    let (stop, answers) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let thread = {
        let (stop, answers) = (stop.clone(), answers.clone());
        thread::spawn(move || flood(&flooder, &stop, &answers))
    };
    let before = cpu_time(&worker)?;
    thread::sleep(TIME);
    let used = cpu_time(&worker)?.saturating_sub(before);
    let served = answers.load(Ordering::Relaxed);
    let others = (0..3).map(|_| median(&program)).collect::<Result<Vec<_>>>();
    stop.store(true, Ordering::Relaxed);
    thread.join().map_err(|_| anyhow::anyhow!("The flooder panicked"))??;
    let other = others?.into_iter().min().context("No time")?;
    println!("{served} requests took {used:?} in {TIME:?}; another process's {other:?}");
    ensure!(used < MOST, "A flood takes {used:?} of a CPU in {TIME:?}");
    ensure!(served > 1000, "{served} requests of the flood were served");
    ensure!(other < LONGEST, "Another process's request takes {other:?} beside the flood");
    Ok(())
}
