//! Descriptors whose last close waits: TCP sockets with SO_LINGER and a peer that does not read.
//! And processes that do not answer, since they are stopped or wait in the kernel.
//!
//! Each is passed where a descriptor is due and where none is, and no copy stays here, so that the
//! receiver has the last one.

// Clippy recognizes only functions marked as tests, not the functions that they call.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cuda_socket::{MAX_PACKET, Reply, Request, VERSION, decode_numbered, encode};
use foreign_fds::testing;
use ipc::seqpacket::SeqPacket;
use mdev_core::units::{GIB, PAGE_SIZE};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::raw_client::{DMA_MAP, GET_INFO, RawClient};
use system_tests::worker_deaths::worker;
use system_tests::{Vgpud, bytes, is_alive, kill_process, wait_for};

use super::abuse::{Victim, map};

/// Longest time of a stop that ends at once, with a margin for a busy host.
const SOON: Duration = Duration::from_secs(10);

/// Sends bytes with a lingering socket, of which no copy stays here. Returns its peer.
fn pass(socket: &impl AsFd, bytes: &[u8]) -> Result<TcpStream> {
    let (linger, peer) = testing::lingering();
    testing::pass(socket, bytes, linger)?;
    Ok(peer)
}

/// Returns whether the worker of a vGPU answers.
fn answers(vgpu: &Value) -> bool {
    !vgpu["warnings"].to_string().contains("does not answer")
}

/// Stops a vGPU, and fails if that takes long.
fn stop_soon(vgpud: &Vgpud, uuid: &str) -> Result<()> {
    let begun = Instant::now();
    let path = format!("/v1/vgpus/{uuid}/stop");
    vgpud.call("POST", &path, Some(&json!({ "force": true })))?;
    ensure!(begun.elapsed() < SOON, "the stop took {:?}", begun.elapsed());
    Ok(())
}

#[test]
fn lingering_sockets_of_a_vm_do_not_stop_the_worker() -> Result<()> {
    let victim = Victim::new();
    let mut peers = Vec::new();
    let mut client = RawClient::attach(&victim.socket);
    let message = RawClient::message(1, DMA_MAP, 0, &map(8 * GIB, PAGE_SIZE));
    // Where a descriptor is due, and where none is.
    peers.push(pass(&client.stream, &message)?);
    client.receive().context("No answer")?;
    peers.push(pass(
        &client.stream,
        &RawClient::message(2, GET_INFO, 0, &bytes![16_u32, 0_u32, 0_u32, 0_u32]),
    )?);
    client.receive().context("No answer")?;
    client.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
    ensure!(
        victim.vgpud.show(&victim.uuid)?["vm"]["pid"] == std::process::id(),
        "the worker answers"
    );
    // In the socket, when the worker refuses the connection or closes it.
    let mut second;
    loop {
        let (linger, peer) = testing::lingering();
        second = UnixStream::connect(&victim.socket)?;
        // The worker may be quicker, and then nothing can be sent.
        if testing::pass(&second, b"x", linger).is_ok() {
            peers.push(peer);
            break;
        }
    }
    second.set_read_timeout(Some(SOON))?;
    let end = (&second).read(&mut [0]);
    let is_reset = end.as_ref().is_err_and(|error| error.kind() == ErrorKind::ConnectionReset);
    ensure!(is_reset || end.is_ok_and(|read| read == 0), "it is refused");
    let invalid = [0_u8; 16];
    peers.push(pass(&client.stream, &[&invalid[..], &invalid].concat())?);
    if let Ok(peer) = pass(&client.stream, b"x") {
        peers.push(peer);
    }
    while client.receive().is_some() {}
    drop(client);
    victim.survives("lingering sockets", |_| {});
    let vgpu = victim.vgpud.show(&victim.uuid)?;
    ensure!(vgpu["pid"] == victim.worker && answers(&vgpu), "{vgpu}");
    stop_soon(&victim.vgpud, &victim.uuid)
}

#[test]
fn lingering_sockets_of_a_program_do_not_stop_the_worker() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-1C", "run": true }))?;
    let first = worker(&vgpud, &uuid)?;
    let path = vgpud.vfio_socket(&uuid).with_file_name("cuda.sock");
    let mut buffer = vec![0; MAX_PACKET];
    let mut peers = Vec::new();
    for _ in 0..3 {
        let program = SeqPacket::connect(&path)?;
        peers.push(pass(&program, &encode(&Request::Hello { version: VERSION })?)?);
        let len = program.recv(&mut buffer)?.context("No answer")?.len;
        ensure!(matches!(decode_numbered(&buffer[..len])?, (0, Reply::Welcome(_))));
        // Two that are in the socket when the worker closes it for the first one.
        for _ in 0..2 {
            if let Ok(peer) = pass(&program, &[0xff; 9]) {
                peers.push(peer);
            }
        }
        ensure!(program.recv(&mut buffer)?.is_none(), "the program is cut off");
    }
    let vgpu = vgpud.show(&uuid)?;
    ensure!(vgpu["pid"] == first && answers(&vgpu), "{vgpu}");
    stop_soon(&vgpud, &uuid)
}

#[test]
fn a_vgpu_serves_again_once_the_descriptors_of_a_client_are_closed() -> Result<()> {
    let victim = Victim::new();
    let mut client = RawClient::attach(&victim.socket);
    let message = RawClient::message(0, DMA_MAP, 0, &map(16 * GIB, PAGE_SIZE));
    // A burst of descriptors that are closed at once cuts no client off.
    let pipes: Vec<_> = (0..8).map(|_| std::io::pipe().unwrap()).collect();
    for _ in 0..16 {
        let fds: Vec<_> = pipes.iter().map(|(reader, _)| reader.as_fd()).collect();
        client.send_bytes(&message, &fds);
        client.receive().context("The client is cut off")?;
    }
    let mut peers = Vec::new();
    while let Ok(peer) = pass(&client.stream, &message) {
        peers.push(peer);
        if client.receive().is_none() {
            break;
        }
        ensure!(peers.len() < 1000, "the client is never cut off");
    }
    victim.neighbour_works("descriptors that cannot be closed");
    ensure!(victim.vgpud.show(&victim.uuid)?["pid"] == victim.worker);
    // The sockets are closed.
    drop((client, peers));
    wait_for("the vGPU takes a client", || {
        let mut client = RawClient::connect(&victim.socket);
        client.send_bytes(&RawClient::message(1, GET_INFO, 0, &[]), &[]);
        client.receive().is_some()
    })?;
    victim.survives("lingering sockets", |_| {});
    Ok(())
}

#[test]
fn descriptors_on_the_control_socket_do_not_stop_the_manager() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let mut peers = Vec::new();
    for _ in 0..20 {
        let client = UnixStream::connect(vgpud.api_socket())?;
        // From Linux 6.16 on, the kernel refuses them before the connection is accepted, also those
        // of an administrator.
        match pass(&client, b"GET /v1/version HTTP/1.1\r\nHost: x\r\n") {
            Ok(peer) => peers.push(peer),
            Err(error) => {
                let refused = error.downcast_ref::<Errno>() == Some(&Errno::EPERM);
                ensure!(refused, "{error:#}");
            }
        }
        drop(client);
        vgpud.get("/v1/version").context("The manager waits")?;
    }
    Ok(())
}

#[test]
fn a_stop_ends_although_the_worker_or_its_anchor_is_stopped() -> Result<()> {
    let vgpud = Vgpud::start()?;
    for stops_anchor in [false, true] {
        let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }))?;
        let (anchor, worker) = (vgpud.anchor(&uuid)?, worker(&vgpud, &uuid)?);
        kill_process(if stops_anchor { anchor } else { worker }, Signal::SIGSTOP)?;
        stop_soon(&vgpud, &uuid)?;
        ensure!(!is_alive(worker) && !is_alive(anchor), "anchor: {stops_anchor}");
    }
    Ok(())
}

#[test]
fn the_manager_ends_although_its_processes_are_stopped() -> Result<()> {
    for signal in [Signal::SIGTERM, Signal::SIGUSR1] {
        let mut vgpud = Vgpud::start()?;
        let create = || vgpud.create(&json!({ "mdev_type": "SOFT-256MC", "run": true }));
        let (one, other) = (create()?, create()?);
        let stopped = [worker(&vgpud, &one)?, vgpud.anchor(&other)?, vgpud.gpu_process()?];
        for pid in stopped {
            kill_process(pid, Signal::SIGSTOP)?;
        }
        let begun = Instant::now();
        vgpud.end(signal)?;
        ensure!(begun.elapsed() < Duration::from_secs(15), "{signal}: {:?}", begun.elapsed());
        if signal == Signal::SIGTERM {
            ensure!(stopped.iter().all(|pid| !is_alive(*pid)), "a process remains");
        }
    }
    Ok(())
}

#[test]
fn the_next_manager_keeps_a_worker_that_does_not_answer_and_serves_the_others() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let request = json!({ "mdev_type": "SOFT-256MC", "run": true });
    let (silent, other) = (vgpud.create(&request)?, vgpud.create(&request)?);
    let mut vm = RawClient::attach(&vgpud.vfio_socket(&silent));
    let (before, of_other) = (worker(&vgpud, &silent)?, worker(&vgpud, &other)?);
    kill_process(before, Signal::SIGSTOP)?;
    vgpud.end(Signal::SIGUSR1)?;
    let begun = Instant::now();
    vgpud.start_again()?;
    ensure!(begun.elapsed() < SOON, "the start took {:?}", begun.elapsed());
    // It lists, and starts and stops others.
    ensure!(vgpud.get("/v1/vgpus")?.as_array().is_some_and(|all| all.len() == 2));
    ensure!(worker(&vgpud, &other)? == of_other);
    let third = vgpud.create(&request)?;
    stop_soon(&vgpud, &third)?;
    let shown = vgpud.show(&silent)?;
    ensure!(
        shown["state"] == "running" && shown["warnings"][0] == "Its worker does not answer",
        "{shown}"
    );
    // Whether a VM uses it is unknown, so it is not stopped without force.
    let stop = format!("/v1/vgpus/{silent}/stop");
    let refused = vgpud.refused("POST", &stop, Some(&json!({})))?;
    ensure!(refused.0 >= 400, "{refused:?}");
    kill_process(before, Signal::SIGCONT)?;
    vm.ok(GET_INFO, &bytes![16_u32, 0_u32, 0_u32, 0_u32]);
    wait_for("the worker answers", || {
        vgpud
            .show(&silent)
            .is_ok_and(|vgpu| answers(&vgpu) && vgpu["vm"]["pid"] == std::process::id())
    })?;
    ensure!(worker(&vgpud, &silent)? == before, "the worker was replaced");
    kill_process(before, Signal::SIGSTOP)?;
    stop_soon(&vgpud, &silent)?;
    ensure!(!is_alive(before));
    Ok(())
}

#[test]
fn the_next_manager_replaces_a_gpu_process_that_does_not_answer() -> Result<()> {
    let mut vgpud = Vgpud::start()?;
    let request = json!({ "mdev_type": "SOFT-256MC", "run": true });
    vgpud.create(&request)?;
    let gpu = vgpud.gpu_process()?;
    kill_process(gpu, Signal::SIGSTOP)?;
    vgpud.end(Signal::SIGUSR1)?;
    let begun = Instant::now();
    vgpud.start_again()?;
    ensure!(begun.elapsed() < Duration::from_secs(15), "the start took {:?}", begun.elapsed());
    vgpud.get("/v1/vgpus")?;
    wait_for("another GPU process", || vgpud.gpu_process().is_ok_and(|pid| pid != gpu))?;
    vgpud.create(&request).context("A vGPU on the new GPU")?;
    Ok(())
}
