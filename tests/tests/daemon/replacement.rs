//! Workers that die under VMs: their successors continue, and the VMs do not notice.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cuda_socket::{MAX_PACKET, Request, VERSION, encode};
use ipc::seqpacket::SeqPacket;
use mdev_core::abi::control::reg;
use mdev_core::gpu::EngineKind;
use mdev_core::units::MIB;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::unistd::Pid;
use serde_json::json;
use system_tests::load;
use system_tests::ram::Ram;
use system_tests::raw_client::{REGION_READ, REGION_WRITE, RawClient};
use system_tests::vcpu::Vcpu;
use system_tests::vfio_user_guest::VfioUserGuest;
use system_tests::worker_deaths::{Place, kill_at, replace_again, worker};
use system_tests::{Vgpud, bytes, is_alive, kill_process, skipped, wait_for};
use vgpu_guest::channel::Channel;
use vgpu_guest::device::Device;
use vgpu_guest::memory::Home;
use vgpu_guest::work::{self, saxpy::Saxpy};

/// Workers that are killed under load.
const KILLS: u32 = 40;
/// Stops of a worker at system calls: a trapped access has about 6.
const STOPS: u32 = 48;
/// Deaths before and after the removal of finished messages.
const REMOVALS: usize = 8;
/// Control registers.
const CONTROL: u32 = 3;

/// Creates channels, computes in them with checked results, and destroys them, until told to stop.
/// Returns the number of channels.
fn create_and_compute(device: &Device, stop: &AtomicBool) -> Result<u32> {
    let mut channels = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut channel = Channel::new(device, EngineKind::Compute)?;
        let saxpy = Saxpy::new(device, Home::Guest, 10_000)?;
        let report = work::run(&saxpy, &mut channel)?;
        ensure!(report.checked > 0, "{report:?}");
        channels += 1;
    }
    Ok(channels)
}

/// Kills the worker of one of two VMs that work, `kills` times. The results of both are checked for
/// `seconds` at least. Returns the units per second of the other VM.
pub(super) fn survive(kills: u32, seconds: u64) -> Result<f64> {
    let vgpud = Vgpud::start()?;
    let start = || vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }));
    let (victim, neighbour) = (start()?, start()?);
    let other = load::work(&vgpud, &neighbour, seconds)?;
    let ram = Ram::new(64 * MIB, 64 * MIB)?;
    let device = Device::open(Box::new(VfioUserGuest::attach(&vgpud.vfio_socket(&victim), ram)?))?;
    let stop = AtomicBool::new(false);
    let measured = thread::scope(|scope| {
        let guest = scope.spawn(|| create_and_compute(&device, &stop));
        for number in 0..kills {
            thread::sleep(Duration::from_millis(u64::from(number * 37 % 240)));
            replace_again(&vgpud, &victim, number)?;
        }
        let measured = other.join().ok().context("The other guest panicked")??;
        stop.store(true, Ordering::Relaxed);
        let channels = guest.join().ok().context("The guest panicked")??;
        ensure!(channels > kills / 4, "only {channels} channels between {kills} deaths");
        anyhow::Ok(measured)
    })?;
    assert!(measured.verified > 0, "{measured:?}");
    let vgpu = vgpud.show(&victim)?;
    assert_eq!(vgpu["state"], "running");
    // The manager reads the counters from time to time.
    wait_for("no channel was made twice, and none is left", || {
        let stats = vgpud.get("/v1/stats").unwrap_or_default();
        let stats = stats["vgpus"].as_array().cloned().unwrap_or_default();
        let victim = stats.into_iter().find(|vgpu| vgpu["uuid"] == victim.as_str());
        victim.is_some_and(|vgpu| vgpu["channels"] == 0 && vgpu["faults"] == 0)
    })?;
    Ok(measured.units_per_second)
}

#[test]
fn vms_do_not_notice_that_their_workers_die() -> Result<()> {
    survive(KILLS, 5).map(drop)
}

/// Kills the manager and the worker of a VM together, `times` times. The VM counts each of its
/// accesses once.
pub(super) fn survive_managers(times: u32) -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
    let mut vcpu = Vcpu::new(RawClient::attach(&vgpud.vfio_socket(&uuid)));
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let guest = scope.spawn(|| wake_until(&mut vcpu, &stop));
        for _ in 0..times {
            let before = worker(&vgpud, &uuid)?;
            kill_process(before, Signal::SIGKILL)?;
            vgpud.end(Signal::SIGKILL)?;
            vgpud.start_again()?;
            wait_for("the vGPU is adopted", || {
                worker(&vgpud, &uuid).is_ok_and(|pid| pid != before && is_alive(pid))
            })?;
            ensure!(vgpud.show(&uuid)?["vm"]["pid"] == std::process::id(), "the VM is attached");
        }
        stop.store(true, Ordering::Relaxed);
        guest.join().ok().context("The VM saw a wrong effect")
    })
}

#[test]
fn a_vm_does_not_notice_that_its_manager_and_worker_die_together() -> Result<()> {
    survive_managers(3)
}

/// Wakes the device, and returns the number of wake-ups that it has counted.
pub(super) fn wake(vcpu: &mut Vcpu) -> u32 {
    vcpu.access(REGION_WRITE, &bytes![reg::WAKE, CONTROL, 4_u32, 0_u32]);
    let data = vcpu.access(REGION_READ, &bytes![reg::TRAPPED_DOORBELLS, CONTROL, 4_u32]);
    u32::from_ne_bytes(data[16..20].try_into().unwrap())
}

/// Wakes a new device until told to stop. Each wake-up counts once.
pub(super) fn wake_until(vcpu: &mut Vcpu, stop: &AtomicBool) {
    for expected in 1.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        assert_eq!(wake(vcpu), expected, "wake-ups that were counted");
    }
}

#[test]
fn each_access_has_its_effect_once_wherever_its_worker_dies() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
    let mut vcpu = Vcpu::new(RawClient::attach(&vgpud.vfio_socket(&uuid)));
    let (stop, done) = (AtomicBool::new(false), AtomicU32::new(0));
    thread::scope(|scope| {
        let guest = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let counted = wake(&mut vcpu);
                let expected = done.fetch_add(1, Ordering::Relaxed) + 1;
                assert_eq!(counted, expected, "wake-ups that were counted");
            }
        });
        let removals = [false, true].repeat(REMOVALS);
        let removals = removals.into_iter().map(|after| Place::Removal { after });
        for place in (0..STOPS).map(Place::Stop).chain(removals) {
            let before = worker(&vgpud, &uuid)?;
            let process = Pid::from_raw(before.cast_signed());
            if ptrace::seize(process, ptrace::Options::empty()).is_err() {
                skipped("this user may not trace other processes");
                break;
            }
            kill_at(before, before, place)?;
            let (since, accesses) = (Instant::now(), done.load(Ordering::Relaxed));
            while done.load(Ordering::Relaxed) < accesses + 2 && !guest.is_finished() {
                ensure!(since.elapsed() < Duration::from_secs(10), "no access after {place:?}");
                thread::sleep(Duration::from_millis(1));
            }
            if guest.is_finished() {
                break;
            }
            // A worker that dies at once, again and again, is not replaced for ever.
            thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, Ordering::Relaxed);
        guest.join().ok().context("The client saw a wrong effect")
    })
}

/// An anchor that held the manager's connections would have no room for them one day.
#[test]
fn questions_of_the_manager_leave_nothing_at_the_anchor() -> Result<()> {
    const QUESTIONS: u32 = 30;
    let vgpud = Vgpud::start()?;
    let vgpu = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
    let anchor = vgpud.anchor(&vgpu)?;
    // No other worker could continue with a program, so no state is recorded.
    let program = SeqPacket::connect(&vgpud.vgpu_dir(&vgpu).join("cuda.sock"))?;
    program.send(&encode(&Request::Hello { version: VERSION })?, &[])?;
    ensure!(program.recv(&mut vec![0; MAX_PACKET])?.is_some(), "The program is refused");
    let held = || anyhow::Ok(std::fs::read_dir(format!("/proc/{anchor}/fd"))?.count());
    vgpud.show(&vgpu)?;
    let before = held()?;
    for _ in 0..QUESTIONS {
        vgpud.refused("POST", &format!("/v1/vgpus/{vgpu}/stop"), None)?;
    }
    wait_for("the anchor drops the connections", || held().is_ok_and(|held| held <= before))
}
