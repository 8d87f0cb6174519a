//! Upgrades under running VMs: a manager adopts workers and software GPUs of other releases.
//!
//! The test plays the other release: it takes over a socket or relays messages. The processes and
//! the VM's connection are real.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;

use anyhow::Result;
use ipc::seqpacket::{MAX_PACKET, SeqPacket, SeqPacketListener, decode, encode};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::vgpuctl::{refused, vgpuctl};
use system_tests::{Vgpud, is_alive, wait_for};
use vendor_backends::mediator::wire::{AdminReply, AdminRequest, OLDEST, Refusal};
use vgpud::worker::journal::descriptors::{Key, Message};

/// Answers every connection at a socket in place of another process. `None` hangs up.
fn answer_at(path: &Path, answer: Option<Vec<u8>>) {
    fs::remove_file(path).unwrap();
    let listener = SeqPacketListener::bind(path).unwrap();
    thread::spawn(move || {
        // Runs until the test process ends.
        while let Ok(socket) = listener.accept() {
            let answer = answer.clone();
            thread::spawn(move || {
                let mut buffer = vec![0; MAX_PACKET];
                while let (Ok(Some(_)), Some(answer)) = (socket.recv(&mut buffer), &answer) {
                    if socket.send(answer, &[]).is_err() {
                        return;
                    }
                }
            });
        }
    });
}

/// Relays messages between a GPU process and its clients, and makes the process appear to speak the
/// oldest version.
fn age(path: &Path) {
    let real = path.with_extension("real");
    fs::rename(path, &real).unwrap();
    let listener = SeqPacketListener::bind(path).unwrap();
    thread::spawn(move || {
        while let Ok(asker) = listener.accept() {
            let process = SeqPacket::connect(&real).unwrap();
            thread::spawn(move || pass_on(&asker, &process));
        }
    });
}

fn pass_on(asker: &SeqPacket, process: &SeqPacket) {
    let mut buffer = vec![0; MAX_PACKET];
    while let Ok(Some(packet)) = asker.recv_with_fds(&mut buffer) {
        let passed: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
        let request = match decode(&buffer[..packet.len]).unwrap() {
            AdminRequest::Hello { .. } => AdminRequest::Hello { version: OLDEST },
            other => other,
        };
        process.send(&encode(&request).unwrap(), &passed).unwrap();
        let Ok(Some(packet)) = process.recv_with_fds(&mut buffer) else { return };
        let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
        asker.send(&buffer[..packet.len], &fds).unwrap();
    }
}

/// Status reply of a worker of another protocol version.
fn status_of_version(version: u32, control: &Path) -> Result<Vec<u8>> {
    let socket = SeqPacket::connect(control)?;
    socket.send(br#"{"request":"status","version":1}"#, &[])?;
    let mut buffer = vec![0; MAX_PACKET];
    let packet = socket.recv(&mut buffer)?.unwrap();
    let mut status: Value = serde_json::from_slice(&buffer[..packet.len])?;
    assert_eq!(status["gpu_ok"], true, "version 1 gets an answer: {status}");
    (status["version"], status["oldest"]) = (json!(version), json!(version));
    Ok(serde_json::to_vec(&status)?)
}

/// Starts a vGPU that a VM uses, and stops its manager.
fn left() -> Result<(Vgpud, String, UnixStream, u32, u32)> {
    let mut vgpud = Vgpud::start()?;
    let request = json!({ "mdev_type": "SOFT-256MQ", "attrs": [{ "core": "60" }], "run": true });
    let uuid = vgpud.create(&request)?;
    let vm = UnixStream::connect(vgpud.vfio_socket(&uuid))?;
    wait_for("a VM is attached", || {
        vgpud.show(&uuid).is_ok_and(|vgpu| vgpu["vm"]["pid"] == std::process::id())
    })?;
    let pid = |value: &Value| u32::try_from(value["pid"].as_u64().unwrap()).unwrap();
    let (worker, gpu) = (pid(&vgpud.show(&uuid)?), pid(&vgpud.get("/v1/parents")?[0]));
    vgpud.end(Signal::SIGUSR1)?;
    Ok((vgpud, uuid, vm, worker, gpu))
}

/// Checks that the VM's connection is open.
fn is_served(vm: &UnixStream) -> bool {
    vm.set_nonblocking(true).unwrap();
    let mut byte = [0];
    (&*vm).read(&mut byte).is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
}

#[test]
fn a_vm_keeps_running_on_a_worker_of_another_release() -> Result<()> {
    for how in ["hangs up", "makes no sense", "says 2"] {
        let (mut vgpud, uuid, vm, worker, gpu) = left()?;
        let control = vgpud.vgpu_dir(&uuid).join("control.sock");
        let answer = match how {
            "hangs up" => None,
            "makes no sense" => Some(b"{\"reply\":\"well\"}".to_vec()),
            _ => Some(status_of_version(2, &control)?),
        };
        answer_at(&control, answer);
        vgpud.start_again()?;
        let vgpu = vgpud.show(&uuid)?;
        assert_eq!((&vgpu["state"], &vgpu["pid"]), (&json!("running"), &json!(worker)), "{how}");
        let warning = vgpu["warnings"][0].as_str().unwrap();
        let why = match how {
            "hangs up" => "The worker does not speak a supported version of the control protocol",
            "makes no sense" => "The worker sends a reply that cannot be parsed",
            _ => "The worker speaks version 2 of the control protocol",
        };
        assert!(
            warning.starts_with(&format!("{why}; this vgpud speaks 1 to 1. It is of")),
            "{warning}"
        );
        assert!(warning.contains("of another version of vgpud: its VM continues"), "{warning}");
        assert!(is_alive(worker) && is_served(&vm), "{how}");
        // The vGPU keeps its memory and its share on the adopted GPU.
        let parent = &vgpud.get("/v1/parents")?[0];
        assert_eq!(parent["pid"], gpu);
        assert_ne!(parent["vram_free_bytes"], parent["vram_bytes"]);
        let stats = &vgpud.get("/v1/stats")?["vgpus"][0];
        assert_eq!((&stats["share_asked"], &stats["pid"]), (&json!(60), &json!(worker)));
        // Only --force affects the VM.
        let stop = format!("/v1/vgpus/{uuid}/stop");
        let (_, _, message) = vgpud.refused("POST", &stop, None)?;
        let said =
            "is used by a VM, and its worker is of another version of vgpud; shut that VM down";
        assert!(message.contains(said), "{message}");
        assert!(is_alive(worker) && is_served(&vm), "{how}");
        if how == "says 2" {
            drop(vm);
            wait_for("the vGPU can be stopped", || vgpud.call("POST", &stop, None).is_ok())?;
        } else {
            vgpud.call("POST", &stop, Some(&json!({ "force": true })))?;
            assert!(!is_served(&vm));
        }
        assert!(!is_alive(worker));
        let parent = &vgpud.get("/v1/parents")?[0];
        assert_eq!(parent["vram_free_bytes"], parent["vram_bytes"]);
    }
    Ok(())
}

#[test]
fn a_worker_that_cannot_be_upgraded_stays() -> Result<()> {
    let (mut vgpud, uuid, vm, worker, _) = left()?;
    let folder = vgpud.vgpu_dir(&uuid);
    // A release that does not speak this one's protocol.
    let control = folder.join("control.sock");
    answer_at(&control, Some(status_of_version(2, &control)?));
    vgpud.start_again()?;
    let upgrade = format!("upgrade {uuid}");
    refused(&vgpud, &upgrade, 5, "The worker speaks version 2 of the control protocol")?;
    let all = vgpuctl(&vgpud, "upgrade")?;
    assert!(all.starts_with(&format!("{uuid}: ")) && all.contains("keeps its worker"), "{all}");
    assert!(is_alive(worker) && is_served(&vm));
    drop(vm);

    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    let (folder, upgrade) = (vgpud.vgpu_dir(&uuid), format!("upgrade {uuid}"));
    // A new worker that does not begin to work.
    let socket = folder.join("upgrade.sock");
    fs::remove_file(&socket)?;
    let anchor = SeqPacketListener::bind(&socket)?;
    let anchor = thread::spawn(move || {
        let manager = anchor.accept().unwrap();
        manager.recv_with_fds(&mut [0; 64]).unwrap();
        manager.send(&Message::Keep(Key::PROGRAM).encode(), &[]).unwrap();
        manager.send(&Message::FAILED.encode(), &[]).unwrap();
    });
    refused(&vgpud, &upgrade, 5, "one of this release cannot continue; see the log of vgpud")?;
    anchor.join().unwrap();
    // A worker without an anchor.
    fs::remove_file(&socket)?;
    refused(&vgpud, &upgrade, 5, "it has the GPU for itself, and ends with its VM")
}

#[test]
fn vms_keep_running_on_a_software_gpu_of_another_release() -> Result<()> {
    // The process reports version 5, or a status in an unknown format.
    for answer in [encode(&AdminReply::Refused(Refusal::Version))?, vec![0, 5]] {
        goes_on_beside_a_gpu_that_says(answer)?;
    }
    Ok(())
}

fn goes_on_beside_a_gpu_that_says(answer: Vec<u8>) -> Result<()> {
    let (mut vgpud, uuid, vm, worker, gpu) = left()?;
    let admin = vgpud.run_dir().join("parents/soft0/admin.sock");
    answer_at(&admin, Some(answer));
    vgpud.start_again()?;
    let vgpu = vgpud.show(&uuid)?;
    assert_eq!((&vgpu["pid"], &vgpu["vm"]["pid"]), (&json!(worker), &json!(std::process::id())));
    assert!(is_alive(worker) && is_alive(gpu) && is_served(&vm));
    let parent = &vgpud.get("/v1/parents")?[0];
    assert_eq!((&parent["pid"], &parent["state"]), (&json!(gpu), &json!("foreign")));
    let another = json!({ "mdev_type": "SOFT-256MQ", "run": true });
    let (_, _, message) = vgpud.refused("POST", "/v1/vgpus", Some(&another))?;
    assert!(message.contains("the process of its GPU is of another version of vgpud"), "{message}");
    assert!(message.contains("shut the VMs down and stop their vGPUs"), "{message}");
    // After its last vGPU is stopped, the process is replaced.
    drop(vm);
    wait_for("the VM is detached", || {
        vgpud.call("POST", &format!("/v1/vgpus/{uuid}/stop"), None).is_ok()
    })?;
    wait_for("a new GPU process runs", || {
        vgpud.get("/v1/parents").is_ok_and(|all| all[0]["state"] == "ready")
    })?;
    assert!(!is_alive(worker) && !is_alive(gpu));
    vgpud.create(&another)?;
    Ok(())
}

#[test]
fn a_software_gpu_of_the_previous_release_accepts_new_vgpus() -> Result<()> {
    let (mut vgpud, uuid, vm, worker, gpu) = left()?;
    age(&vgpud.run_dir().join("parents/soft0/admin.sock"));
    vgpud.start_again()?;
    let parent = &vgpud.get("/v1/parents")?[0];
    assert_eq!((&parent["pid"], &parent["state"]), (&json!(gpu), &json!("ready")));
    // The running vGPU continues, new ones start and stop, all on that process.
    let another = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    vgpud.call("POST", &format!("/v1/vgpus/{another}/stop"), None)?;
    assert_eq!(vgpud.show(&uuid)?["pid"], worker);
    assert_eq!((&vgpud.get("/v1/parents")?[0]["pid"], is_served(&vm)), (&json!(gpu), true));
    Ok(())
}

#[test]
fn a_manager_of_the_previous_release_gets_answers_in_its_format() -> Result<()> {
    let vgpud = Vgpud::start()?;
    // The manager answers once its parents run.
    vgpud.get("/v1/parents")?;
    let socket = SeqPacket::connect(&vgpud.run_dir().join("parents/soft0/admin.sock"))?;
    let mut buffer = vec![0; MAX_PACKET];
    let mut ask = |request: &AdminRequest| -> Result<AdminReply> {
        socket.send(&encode(request)?, &[])?;
        let packet = socket.recv(&mut buffer)?.unwrap();
        Ok(decode(&buffer[..packet.len])?)
    };
    let hello = ask(&AdminRequest::Hello { version: OLDEST })?;
    assert!(matches!(hello, AdminReply::Hello { version: OLDEST, .. }), "{hello:?}");
    assert!(matches!(ask(&AdminRequest::Usage)?, AdminReply::Usage(_)));
    Ok(())
}
