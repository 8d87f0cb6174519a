//! `vm migrate`.

use std::io;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use mdev_core::stream::MAX_CHUNK;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};
use vgpud_api::{LogWrites, SaveVgpu, Vgpu};
use vgpud_host::body::BodyReader;

use super::peer::{Frame, Hello, Peer};
use crate::cli::VmMigrate;
use crate::commands::checkpoint::with_checkpoint;
use crate::commands::saving::{self, blocking};
use crate::commands::vm_state::monitor::{Address, Monitor};
use crate::commands::vm_state::qemu_stream::{self, ENDS};
use crate::commands::vm_state::{
    check_count, check_saveable, paused, pci, resume_vgpus, vgpus_of_vm,
};
use crate::failure::{Failure, say};
use vgpud_client::{Client, vgpu_path};

/// QEMU has paused the VM and waits before it sends the rest (QMP's `MigrationStatus`).
const PAUSED: &str = "pre-switchover";
/// Longest time for QEMU to give a transfer up.
const END_LIMIT: Duration = Duration::from_secs(20);
/// Longest time for the thread that passes QEMU's stream on to end after QEMU's transfer has
/// failed.
const CAUSE_LIMIT: Duration = Duration::from_secs(1);
const INTERVAL: Duration = Duration::from_millis(5);
/// Bandwidth in bytes per second: QEMU's default is that of a slow network.
const BANDWIDTH: u64 = 100 << 30;

/// Runs `vm migrate`.
pub async fn migrate(client: &Client, args: VmMigrate) -> Result<Vec<u8>, Failure> {
    let named = client.vgpu(args.vgpu.vgpu()?, None).await?;
    let vgpus = vgpus_of_vm(client, &named).await?;
    let address = Address::Socket(args.monitor.clone());
    let sent = send_checkpointed(client, &args, &address, &vgpus);
    let sent = with_checkpoint(client, &vgpus, sent).await?;
    let pause = hand_over(sent).await?;
    // This QEMU has nothing left that it could lose.
    let _ = address.with(Monitor::end).await;
    paused(named.uuid, pause, args.output)
}

/// Sends a VM without CUDA programs on its vGPUs. After a failure it runs on here.
async fn send_checkpointed(
    client: &Client,
    args: &VmMigrate,
    address: &Address,
    vgpus: &[Vgpu],
) -> Result<Sent, Failure> {
    check_saveable(client, vgpus).await?;
    let (mut monitor, expected) = (address.connect().await?, vgpus.len());
    let types = vgpus.iter().map(|vgpu| vgpu.live_type.as_ref().unwrap_or(&vgpu.mdev_type).clone());
    let (types, to) = (types.collect(), args.to.clone());
    let (monitor, peer, was_running) = blocking(move || {
        check_count(pci::count(&mut monitor)?, expected)?;
        let running = monitor.status()? == "running";
        let peer = Peer::connect(&to, &Hello { types, running })?;
        Ok((monitor, peer, running))
    })
    .await?;
    // An interrupted command would leave the VM paused.
    let _ignored = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    let sent = send_vm(client, vgpus, monitor, peer, args.timeout).await;
    if sent.is_err()
        && let Err(failure) = give_back(client, vgpus, address, was_running).await
    {
        say(format_args!("note: the VM may be paused: {failure}"));
    }
    sent
}

/// VM that the destination has restored.
struct Sent {
    peer: Peer,
    /// When the VM was still seen running.
    paused_at: Instant,
}

/// Sends the VM with its vGPUs.
async fn send_vm(
    client: &Client,
    vgpus: &[Vgpu],
    mut monitor: Monitor,
    peer: Peer,
    timeout: u64,
) -> Result<Sent, Failure> {
    for vgpu in vgpus {
        log_writes(client, vgpu, true).await?;
    }
    let limit = Duration::from_secs(timeout);
    let (mut monitor, copying, paused_at) = blocking(move || {
        let copying = begin(&mut monitor, peer)?;
        match wait_paused(&mut monitor, limit) {
            Ok(paused_at) => Ok((monitor, copying, paused_at)),
            Err(failure) => Err(cause(copying).unwrap_or(failure)),
        }
    })
    .await?;
    // Until here the vGPUs work, and raise interrupts that QEMU has not saved yet.
    let request = SaveVgpu { keep_paused: true, written: true, check: false };
    let mut streams = Vec::new();
    for vgpu in vgpus {
        streams.push(saving::begin_save(client, &vgpu.uuid.to_string(), &request).await?);
    }
    let (back, places) = pci::identify(client, monitor, vgpus).await?;
    monitor = back;
    let peer = blocking(move || {
        monitor.execute("migrate-continue", &json!({ "state": PAUSED }))?;
        let copied = copying.join().unwrap_or_else(|_| Err(ended(&"its thread has failed")));
        let completed = qemu_stream::wait_completed(&mut monitor);
        // What the other end says is the cause of what QEMU says.
        let mut peer = copied?;
        completed?;
        peer.send(&Frame::Places(places.iter().map(|place| place.0).collect()))?;
        for stream in streams {
            send_vgpu(&mut peer, stream)?;
        }
        peer.expect(&Frame::Restored)?;
        Ok(peer)
    })
    .await?;
    Ok(Sent { peer, paused_at })
}

/// Lets QEMU begin to send the VM. Returns the thread that passes QEMU's stream on.
fn begin(
    monitor: &mut Monitor,
    mut peer: Peer,
) -> Result<JoinHandle<Result<Peer, Failure>>, Failure> {
    set_capabilities(monitor, true)?;
    let from = qemu_stream::begin_send(monitor)?;
    Ok(thread::spawn(move || {
        let mut failure = None;
        let copied = qemu_stream::copy(from, |data| {
            peer.send(&Frame::Machine(data.to_vec())).map_err(|error| {
                failure = Some(error);
                io::Error::from(io::ErrorKind::BrokenPipe)
            })
        });
        if let Some(failure) = failure {
            return Err(failure);
        }
        copied.map_err(|error| ended(&error))?;
        peer.send(&Frame::Machine(Vec::new()))?;
        Ok(peer)
    }))
}

/// Returns why QEMU's stream is not passed on any more, if so: QEMU only knows that the pipe broke.
fn cause(copying: JoinHandle<Result<Peer, Failure>>) -> Option<Failure> {
    let deadline = Instant::now() + CAUSE_LIMIT;
    while !copying.is_finished() {
        if Instant::now() > deadline {
            return None;
        }
        thread::sleep(INTERVAL);
    }
    copying.join().ok()?.err()
}

fn ended(error: &dyn std::fmt::Display) -> Failure {
    Failure::Local(format!("QEMU's stream has ended: {error}"))
}

/// `auto-converge` slows a guest down that writes its memory faster than QEMU sends it.
fn set_capabilities(monitor: &mut Monitor, enabled: bool) -> Result<(), Failure> {
    let all = ["pause-before-switchover", "auto-converge"];
    let all = all.map(|name| json!({ "capability": name, "state": enabled }));
    monitor.execute("migrate-set-capabilities", &json!({ "capabilities": all }))?;
    if enabled {
        monitor.execute("migrate-set-parameters", &json!({ "max-bandwidth": BANDWIDTH }))?;
    }
    Ok(())
}

/// Waits until QEMU has paused the VM. Returns when the VM was last seen running.
fn wait_paused(monitor: &mut Monitor, limit: Duration) -> Result<Instant, Failure> {
    let mut seen = Instant::now();
    let mut asked = Instant::now();
    let is_over = |status: Option<&str>| {
        seen = std::mem::replace(&mut asked, Instant::now());
        status.is_some_and(|it| it == PAUSED || ENDS.contains(&it))
    };
    let state = qemu_stream::wait_transfer(monitor, limit, is_over)?;
    match state.as_ref().map(|state| &state["status"]) {
        Some(Value::String(status)) if status == PAUSED => Ok(seen),
        Some(_) => {
            let reason = state.as_ref().and_then(|state| state["error-desc"].as_str());
            let reason = reason.unwrap_or("the connection to the other host is lost");
            Err(Failure::Local(format!("QEMU failed: {reason}")))
        }
        None => Err(Failure::Local(format!(
            "The VM writes its memory faster than it is sent: it was not moved within {} s; allow more \
             by --timeout",
            limit.as_secs()
        ))),
    }
}

fn send_vgpu(peer: &mut Peer, mut stream: BodyReader) -> Result<(), Failure> {
    use io::Read;
    let mut buffer = vec![0; MAX_CHUNK];
    loop {
        let read = stream.read(&mut buffer).map_err(|error| {
            Failure::Local(format!("vgpud did not send the whole vGPU: {error}"))
        })?;
        peer.send(&Frame::Vgpu(buffer[..read].to_vec()))?;
        if read == 0 {
            return Ok(());
        }
    }
}

/// Gives the VM to the destination. Returns how long it was paused.
async fn hand_over(sent: Sent) -> Result<Duration, Failure> {
    let Sent { mut peer, paused_at } = sent;
    blocking(move || {
        let gone = peer.send(&Frame::Go).and_then(|()| peer.expect(&Frame::Running));
        gone.map(|()| paused_at.elapsed()).map_err(|failure| {
            Failure::Local(format!(
                "It is not known whether the VM runs on the other host: {failure}; it is paused here: \
                 if it does not run there, continue it by `vgpuctl resume` and `cont` in its monitor"
            ))
        })
    })
    .await
}

/// Lets the VM continue on this host.
async fn give_back(
    client: &Client,
    vgpus: &[Vgpu],
    address: &Address,
    was_running: bool,
) -> Result<(), Failure> {
    let cancelled = address
        .with(|monitor| {
            monitor.execute("migrate_cancel", &json!({}))?;
            let is_over =
                |status: Option<&str>| status.is_none_or(|it| it == "none" || ENDS.contains(&it));
            qemu_stream::wait_transfer(monitor, END_LIMIT, is_over)?;
            set_capabilities(monitor, false)
        })
        .await;
    let mut resumed = resume_vgpus(client, vgpus).await;
    for vgpu in vgpus {
        resumed = resumed.and(log_writes(client, vgpu, false).await);
    }
    if was_running {
        resumed = resumed.and(
            address
                .with(
                    |monitor| {
                        if monitor.status()? == "running" { Ok(()) } else { monitor.resume() }
                    },
                )
                .await,
        );
    }
    cancelled.and(resumed)
}

async fn log_writes(client: &Client, vgpu: &Vgpu, enabled: bool) -> Result<(), Failure> {
    let path = format!("{}/log-writes", vgpu_path(vgpu.uuid));
    Ok(client.request(hyper::Method::POST, &path, &LogWrites { enabled }).await?)
}
