//! Guests that ring without work, so that the engine wakes up for nothing.

use std::fs::{self, File};
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use nix::sys::eventfd::{EfdFlags, EventFd};
use serde_json::json;
use system_tests::Vgpud;
use system_tests::bytes;
use system_tests::raw_client::{GET_REGION_IO_FDS, RawClient};

/// Index of the register region.
const CONTROL: u32 = 3;
/// vGPUs whose VMMs ring.
const RINGING: usize = 40;

/// Returns the CPU time of a process in seconds.
fn cpu(pid: u32) -> Result<f64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, fields) = stat.rsplit_once(')').context("stat")?;
    let ticks = |at: usize| {
        fields.split_whitespace().nth(at).context("stat")?.parse::<f64>().context("stat")
    };
    Ok((ticks(11)? + ticks(12)?) / 100.0)
}

/// Returns how much of a CPU processes use while `bells` are rung.
fn used(pids: &[u32], bells: Vec<File>) -> Result<f64> {
    let cpu = || pids.iter().map(|pid| cpu(*pid)).sum::<Result<f64>>();
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let ringing = thread::spawn(move || {
        while !stopped.load(Ordering::Relaxed) {
            for mut bell in &bells {
                // A full counter rings as well.
                let _ = bell.write(&1_u64.to_ne_bytes());
            }
        }
    });
    thread::sleep(Duration::from_millis(300));
    let (before, begun) = (cpu()?, Instant::now());
    thread::sleep(Duration::from_secs(2));
    let used = (cpu()? - before) / begun.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    ringing.join().map_err(|_| anyhow::anyhow!("The thread panicked"))?;
    Ok(used)
}

#[test]
fn rings_without_work_of_many_vgpus_do_not_take_a_cpu() -> Result<()> {
    let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=16G"])?;
    let (mut clients, mut bells) = (Vec::new(), Vec::new());
    let mut pids = vec![vgpud.gpu_process()?];
    // A type with the control queue has no eventfd for WAKE.
    for _ in 0..RINGING {
        let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
        let mut client = RawClient::attach(&vgpud.vfio_socket(&uuid));
        let reply = client.ok(GET_REGION_IO_FDS, &bytes![4096_u32, 0_u32, CONTROL, 0_u32]);
        bells.push(File::from(reply.fds.into_iter().next().context("no eventfd")?));
        clients.push(client);
        pids.push(vgpud.context(&uuid)?);
    }
    let nothing = EventFd::from_flags(EfdFlags::EFD_NONBLOCK)?;
    let idle = used(&pids, vec![File::from(OwnedFd::from(nothing))])?;
    let rung = used(&pids, bells)?;
    println!("{:.0} % of a CPU, {:.0} % without rings", rung * 100.0, idle * 100.0);
    // An engine that wakes up for each ring uses all of a CPU that it can get.
    ensure!(rung < idle + 0.4, "{:.0} % of a CPU", rung * 100.0);
    Ok(())
}
