//! `vm upgrade`: a new QEMU for a running VM, by QEMU's `cpr-transfer`.
//!
//! The new QEMU gets the guest's memory itself from the old one, and connects to the vGPUs while
//! the old one is still attached. Nothing is copied. Until the vGPUs continue with the new QEMU,
//! every failure leaves the VM with the old one.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use mdev_core::untrusted::{one_line, read_end};
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use vgpud_api::{Handover, HandoverStep, RestoredVgpu, Vgpu};

use super::monitor::{Address, Monitor, connect};
use super::qemu_stream::ENDS;
use super::{check_count, check_saveable, paused, pci, qemu_stream, resume_vgpus, vgpus_of_vm};
use crate::cli::VmUpgrade;
use crate::commands::checkpoint::with_checkpoint;
use crate::commands::saving::blocking;
use crate::failure::{Failure, say};
use vgpud_client::{Client, vgpu_path};

/// Longest time for the new QEMU to start, and to make its monitor.
const START_LIMIT: Duration = Duration::from_secs(20);
/// Longest reason of a QEMU that has ended, in characters.
const MAX_REASON: usize = 300;
/// Part of QEMU's log that is read, in bytes.
const MAX_LOG: usize = 4 << 10;
/// Time for a new QEMU that has failed to end with its reason.
const END_GRACE: Duration = Duration::from_millis(100);
/// Interval of questions.
const INTERVAL: Duration = Duration::from_millis(2);

/// New QEMU that waits for the VM.
#[derive(Debug)]
struct Successor {
    process: Child,
    monitor: PathBuf,
    /// Sockets on which the new QEMU waits: for the VM, and for its memory.
    main: PathBuf,
    memory: PathBuf,
    /// File with the new QEMU's messages.
    log: PathBuf,
}

/// Runs `vm upgrade`.
pub async fn upgrade(client: &Client, args: VmUpgrade) -> Result<Vec<u8>, Failure> {
    if args.monitor == args.new_monitor {
        let message = "The new QEMU needs another monitor: name another path with --new-monitor";
        return Err(Failure::Usage(message.to_owned()));
    }
    let named = client.vgpu(args.vgpu.vgpu()?, None).await?;
    let vgpus = vgpus_of_vm(client, &named).await?;
    let upgraded = upgrade_checkpointed(client, &args, &vgpus);
    let pause = with_checkpoint(client, &vgpus, upgraded).await?;
    paused(named.uuid, pause, args.output)
}

/// Gives a VM without CUDA programs on its vGPUs the new QEMU. Returns how long it was paused.
async fn upgrade_checkpointed(
    client: &Client,
    args: &VmUpgrade,
    vgpus: &[Vgpu],
) -> Result<Duration, Failure> {
    check_saveable(client, vgpus).await?;
    let old = Address::Socket(args.monitor.clone());
    let (mut monitor, expected) = (old.connect().await?, vgpus.len());
    let (monitor, was_running) = blocking(move || {
        check_count(pci::count(&mut monitor)?, expected)?;
        check_memory(&mut monitor)?;
        let running = monitor.status()? == "running";
        Ok((monitor, running))
    })
    .await?;
    // An interrupted command would leave the VM paused.
    let _ignored = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    let (command, path) = (args.command.clone(), args.new_monitor.clone());
    let successor = blocking(move || Successor::start(&command, path, START_LIMIT)).await?;
    let begun = Instant::now();
    let moved = match transfer(client, vgpus, monitor, successor).await {
        Ok(moved) => moved,
        Err(Abandoned { failure, successor }) => {
            let returned = give_back(client, vgpus, &old, successor, was_running).await;
            if let Err(failure) = returned {
                say(format_args!("note: the VM may be paused: {failure}"));
            }
            return Err(failure);
        }
    };
    // From here on the new QEMU has the VM.
    resume_vgpus(client, vgpus).await?;
    let mut monitor = moved.monitor;
    if was_running {
        blocking(move || monitor.resume()).await?;
    }
    let pause = begun.elapsed();
    // The old QEMU has nothing left that it could lose.
    let _ = old.with(Monitor::end).await;
    moved.successor.forget();
    Ok(pause)
}

/// VM in its new QEMU, still paused.
struct Moved {
    monitor: Monitor,
    successor: Successor,
}

/// Failure that leaves the VM with the old QEMU.
struct Abandoned {
    failure: Failure,
    successor: Successor,
}

/// Pauses the VM and moves it to the new QEMU.
async fn transfer(
    client: &Client,
    vgpus: &[Vgpu],
    monitor: Monitor,
    mut successor: Successor,
) -> Result<Moved, Abandoned> {
    match try_transfer(client, vgpus, monitor, &mut successor).await {
        Ok(monitor) => Ok(Moved { monitor, successor }),
        Err(failure) => {
            // The old QEMU only knows that the connection broke.
            tokio::time::sleep(END_GRACE).await;
            let failure = successor.ended().unwrap_or(failure);
            Err(Abandoned { failure, successor })
        }
    }
}

async fn try_transfer(
    client: &Client,
    vgpus: &[Vgpu],
    mut monitor: Monitor,
    successor: &mut Successor,
) -> Result<Monitor, Failure> {
    monitor = blocking(move || {
        monitor.pause()?;
        Ok(monitor)
    })
    .await?;
    for vgpu in vgpus {
        step(client, vgpu, HandoverStep::Begin).await?;
    }
    let channels = json!([channel("main", &successor.main), channel("cpr", &successor.memory),]);
    blocking(move || {
        monitor.execute("migrate-set-parameters", &json!({ "mode": "cpr-transfer" }))?;
        monitor.execute("migrate", &json!({ "channels": channels }))?;
        qemu_stream::wait_completed(&mut monitor)
    })
    .await?;
    let monitor = successor.monitor().await?;
    let (mut monitor, places) = pci::identify(client, monitor, vgpus).await?;
    for (vgpu, place) in vgpus.iter().zip(places) {
        let adopted = step(client, vgpu, HandoverStep::Adopt).await?;
        monitor = pci::program(monitor, place, adopted).await?;
    }
    Ok(monitor)
}

async fn step(client: &Client, vgpu: &Vgpu, step: HandoverStep) -> Result<RestoredVgpu, Failure> {
    let path = format!("{}/handover", vgpu_path(vgpu.uuid));
    Ok(client.post(&path, &Handover { step }).await?)
}

/// Ends the new QEMU, and lets the VM continue in the old one.
async fn give_back(
    client: &Client,
    vgpus: &[Vgpu],
    old: &Address,
    successor: Successor,
    was_running: bool,
) -> Result<(), Failure> {
    blocking(move || {
        successor.end();
        Ok(())
    })
    .await?;
    let resumed = resume_vgpus(client, vgpus).await;
    let continued = old
        .with(move |monitor| {
            let settled = settle(monitor);
            // QEMU 11.1 aborts if it is asked to save a VM plainly in the other mode.
            monitor.execute("migrate-set-parameters", &json!({ "mode": "normal" }))?;
            if was_running {
                monitor.resume()?;
            }
            settled
        })
        .await;
    resumed.and(continued)
}

/// Waits until the old QEMU has given up the transfer.
fn settle(monitor: &mut Monitor) -> Result<(), Failure> {
    let is_over = |status: Option<&str>| status.is_none_or(|it| it == "none" || ENDS.contains(&it));
    match qemu_stream::wait_transfer(monitor, START_LIMIT, is_over)? {
        Some(_) => Ok(()),
        None => Err(Failure::Local("QEMU does not give the transfer up".to_owned())),
    }
}

/// Checks that QEMU shares all memory of the VM with its successor.
fn check_memory(monitor: &mut Monitor) -> Result<(), Failure> {
    let shared = json!({ "path": "/machine", "property": "aux-ram-share" });
    if monitor.execute("qom-get", &shared).ok().as_ref() == Some(&Value::Bool(true)) {
        return Ok(());
    }
    Err(Failure::NotNow(
        "The VM cannot be upgraded: its QEMU was started without `-machine aux-ram-share=on`; save \
         and restore it with `vgpuctl vm save`"
            .to_owned(),
    ))
}

fn channel(kind: &str, path: &Path) -> Value {
    let address = json!({ "transport": "socket", "type": "unix", "path": path.to_string_lossy() });
    json!({ "channel-type": kind, "addr": address })
}

impl Successor {
    /// Starts the new QEMU, up to where it waits for the VM.
    fn start(command: &[OsString], monitor: PathBuf, limit: Duration) -> Result<Self, Failure> {
        let beside = |end: &str| {
            let mut path = monitor.clone().into_os_string();
            path.push(end);
            PathBuf::from(path)
        };
        let (main, memory, log) = (beside(".main"), beside(".memory"), beside(".log"));
        for socket in [&monitor, &main, &memory] {
            let _ = fs::remove_file(socket);
        }
        let program = command.first().cloned().unwrap_or_default();
        let mut line = Command::new(&program);
        line.args(command.iter().skip(1));
        for (kind, path) in [("main", &main), ("cpr", &memory)] {
            line.arg("-incoming").arg(channel(kind, path).to_string());
        }
        let messages = File::create(&log)
            .map_err(|error| Failure::Local(format!("Cannot write {}: {error}", log.display())))?;
        // Keys pressed on this terminal do not end it, and who reads this command's output does not
        // wait for its end.
        line.process_group(0).stdin(Stdio::null()).stdout(Stdio::null()).stderr(messages);
        let process = line.spawn().map_err(|error| {
            let program = Path::new(&program).display();
            Failure::Local(format!("Cannot start {program}: {error}"))
        })?;
        let mut successor = Self { process, monitor, main, memory, log };
        match successor.wait(limit) {
            Ok(()) => Ok(successor),
            Err(failure) => {
                successor.end();
                Err(failure)
            }
        }
    }

    /// Waits for the socket to which the old QEMU passes its memory.
    fn wait(&mut self, limit: Duration) -> Result<(), Failure> {
        let deadline = Instant::now() + limit;
        while !self.memory.exists() {
            if let Some(failure) = self.ended() {
                return Err(failure);
            }
            if Instant::now() > deadline {
                let message =
                    "The new QEMU does not wait for the VM; is the command that of a QEMU?";
                return Err(Failure::Local(message.to_owned()));
            }
            thread::sleep(INTERVAL);
        }
        Ok(())
    }

    /// Connects to the new QEMU's monitor, which QEMU makes once it has the VM's memory.
    async fn monitor(&mut self) -> Result<Monitor, Failure> {
        let deadline = Instant::now() + START_LIMIT;
        loop {
            let path = self.monitor.clone();
            match blocking(move || connect(&path)).await {
                Ok(monitor) => return Ok(monitor),
                Err(failure) => {
                    let ended = self.ended();
                    if ended.is_some() || Instant::now() > deadline {
                        return Err(ended.unwrap_or(failure));
                    }
                }
            }
            tokio::time::sleep(INTERVAL).await;
        }
    }

    /// Returns why the new QEMU has ended, if so. A command that has started QEMU elsewhere ends
    /// with success.
    fn ended(&mut self) -> Option<Failure> {
        let status = self.process.try_wait().ok().flatten().filter(|status| !status.success())?;
        let log = read_end(&self.log, MAX_LOG).unwrap_or_default();
        let reason = String::from_utf8_lossy(&log);
        let reason = reason.trim_end().lines().last().unwrap_or("no reason is known");
        let reason = one_line(reason, MAX_REASON);
        Some(Failure::Local(format!("The new QEMU has ended ({status}): {reason}")))
    }

    /// Ends the new QEMU.
    fn end(mut self) {
        // A command that has ended has started QEMU elsewhere.
        if matches!(self.process.try_wait(), Ok(Some(_)))
            && let Ok(mut monitor) = connect(&self.monitor)
        {
            let _ = monitor.end();
        }
        let _ = self.process.kill();
        let _ = self.process.wait();
        let _ = fs::remove_file(&self.monitor);
        self.forget();
    }

    /// Leaves the new QEMU running.
    fn forget(self) {
        for socket in [&self.main, &self.memory] {
            let _ = fs::remove_file(socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_is_no_qemu_is_ended() {
        let folder = tempfile::tempdir().unwrap();
        let start = |command: &[&str], limit| {
            let command: Vec<_> = command.iter().map(OsString::from).collect();
            let limit = Duration::from_millis(limit);
            Successor::start(&command, folder.path().join("qmp"), limit).unwrap_err().to_string()
        };
        let begun = Instant::now();
        let said = start(&["sh", "-c", "sleep 60"], 50);
        assert_eq!(said, "The new QEMU does not wait for the VM; is the command that of a QEMU?");
        assert!(begun.elapsed() < Duration::from_secs(30), "it was ended");
        let said = start(&["sh", "-c", "echo first; echo why >&2; exit 7"], 20_000);
        assert_eq!(said, "The new QEMU has ended (exit status: 7): why");
        assert!(start(&["/nowhere/qemu"], 0).starts_with("Cannot start /nowhere/qemu: "));
    }
}
