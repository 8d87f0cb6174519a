//! A worker that was taken over, while its vGPU is saved.

use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Result, ensure};
use foreign_fds::ForeignFd;
use ipc::seqpacket::{MAX_PACKET, SeqPacket, SeqPacketListener};
use mdev_core::testing::memory;
use mdev_core::units::MIB;
use serde_json::{Value, json};
use system_tests::Vgpud;
use system_tests::raw_client::RawClient;
use system_tests::vgpuctl::refused;

/// Reply to a request in the worker's place.
type Reply = (Value, Vec<OwnedFd>);

/// Requests of the manager, by their names.
type Requests = Arc<Mutex<Vec<String>>>;

/// Takes the place of a worker. What `answer` does not answer, the worker does.
fn take_over(
    control: &Path,
    answer: impl Fn(&Value) -> Option<Reply> + Clone + Send + 'static,
) -> Result<Requests> {
    let real = control.with_extension("real");
    fs::rename(control, &real)?;
    let listener = SeqPacketListener::bind(control)?;
    let requests = Requests::default();
    let record = Arc::clone(&requests);
    // It runs until the test's process ends.
    thread::spawn(move || {
        while let Ok(manager) = listener.accept() {
            let (real, answer, record) = (real.clone(), answer.clone(), Arc::clone(&record));
            thread::spawn(move || serve(&manager, &real, answer, &record));
        }
    });
    Ok(requests)
}

fn serve(
    manager: &SeqPacket,
    real: &Path,
    answer: impl Fn(&Value) -> Option<Reply>,
    record: &Requests,
) -> Result<()> {
    let worker = SeqPacket::connect(real)?;
    let mut buffer = vec![0; MAX_PACKET];
    while let Some(packet) = manager.recv_with_fds(&mut buffer)? {
        let request: Value = serde_json::from_slice(&buffer[..packet.len])?;
        let name = request["request"].as_str().unwrap_or_default().to_owned();
        record.lock().unwrap_or_else(PoisonError::into_inner).push(name);
        if let Some((reply, fds)) = answer(&request) {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            manager.send(reply.to_string().as_bytes(), &fds)?;
            continue;
        }
        let fds: Vec<_> = packet.fds.iter().map(AsFd::as_fd).collect();
        worker.send(&buffer[..packet.len], &fds)?;
        let Some(packet) = worker.recv_with_fds(&mut buffer)? else { return Ok(()) };
        let fds: Vec<OwnedFd> = packet.fds.into_iter().map(ForeignFd::into_trusted).collect();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        manager.send(&buffer[..packet.len], &fds)?;
    }
    Ok(())
}

fn count(requests: &Requests, name: &str) -> usize {
    let requests = requests.lock().unwrap_or_else(PoisonError::into_inner);
    requests.iter().filter(|request| *request == name).count()
}

/// A vGPU of a software GPU that a VM uses.
fn start() -> Result<(Vgpud, String, RawClient)> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": "SOFT-256MQ", "run": true }))?;
    let vm = RawClient::attach(&vgpud.vfio_socket(&uuid));
    Ok((vgpud, uuid, vm))
}

/// A worker chooses what its memory does to a process that maps it.
#[test]
fn no_staging_memory_is_taken_from_a_worker_whose_gpu_has_none() -> Result<()> {
    let (vgpud, uuid, _vm) = start()?;
    let saved = |request: &Value| {
        let range = json!({ "reply": "saved", "offset": 0, "len": 128 * MIB, "staged": true });
        let files = || vec![memory(0).into(), memory(128 * MIB).into()];
        match request["request"].as_str() {
            Some("save") => Some((range, files())),
            Some("copy_staged") => Some((json!({ "reply": "done" }), Vec::new())),
            _ => None,
        }
    };
    let requests = take_over(&vgpud.vgpu_dir(&uuid).join("control.sock"), saved)?;
    let words = "The worker passes staging memory, which its GPU does not have";
    refused(&vgpud, &format!("save {uuid} -o /dev/null"), 5, words)?;
    ensure!(count(&requests, "save") == 1 && count(&requests, "copy_staged") == 0);
    ensure!(count(&requests, "resume") == 1, "the vGPU stays paused");
    Ok(())
}

/// Each request costs the manager a thread's time, and no bytes tell it that its client has gone.
#[test]
fn guest_memory_without_an_end_ends_a_save() -> Result<()> {
    let (vgpud, uuid, _vm) = start()?;
    let more = |request: &Value| {
        // The test ends where the save does not.
        let from = request["from"].as_u64().filter(|from| *from < 100)?;
        Some((json!({ "reply": "written", "next": from + 1 }), vec![memory(0).into()]))
    };
    let requests = take_over(&vgpud.vgpu_dir(&uuid).join("control.sock"), more)?;
    let save = |written| {
        let request = json!({ "written": written });
        vgpud.request("POST", &format!("/v1/vgpus/{uuid}/save"), Some(&request))
    };
    let (status, cut_off) = save(true)?;
    ensure!(status == 200 && count(&requests, "written") == 1, "{status}, {requests:?}");
    // The vGPU goes on, and can be saved.
    vgpud.call("POST", &format!("/v1/vgpus/{uuid}/resume"), None)?;
    let (_, whole) = save(false)?;
    ensure!(cut_off.len() < whole.len(), "the stream has an end");
    Ok(())
}
