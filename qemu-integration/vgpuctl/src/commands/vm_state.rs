//! `vm save` and `vm restore`: a VM with its vGPU in a file, over QEMU's monitor.
//!
//! QEMU 11.1 saves a VM with a vfio-user device without the device's state, and resets the device
//! when it restores the VM. So the vGPU is saved while the VM is paused, and restored after QEMU has
//! restored the VM. Then QEMU learns of the BARs and interrupts by the writes to configuration space
//! that the guest's drivers have made before.

use std::io::{PipeReader, PipeWriter, Read, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use hyper::Method;
use integrate::qmp::{Qmp, QmpError};
use mdev_core::stream::{MAX_CHUNK, Part};
use serde_json::{Value, json};
use vgpud_api::{ConfigWrite, SaveVgpu};

use super::saving::{self, NewFile, blocking};
use crate::cli::{Vm, VmRestore, VmSave, VmTask};
use crate::client::{Client, vgpu_path};
use crate::failure::Failure;

/// Name of the pipe that QEMU reads or writes.
const PIPE: &str = "vgpuctl-vm";
/// Longest time for QEMU to save or restore a VM, after the last byte.
const LIMIT: Duration = Duration::from_secs(60);
/// Interval of questions.
const INTERVAL: Duration = Duration::from_millis(5);

/// Vendor and device ids of vGPUs with and without a display. QEMU's own display adapters have the
/// first, too.
const IDS: [(u64, u64); 2] = [(0x1234, 0x1111), (0x1af4, 0x10f0)];
/// QEMU's name of devices that are served over vfio-user.
const DRIVER: &str = "child<vfio-user-pci>";
/// Objects that hold the devices of a command line.
const HOLDERS: [&str; 2] = ["/machine/peripheral", "/machine/peripheral-anon"];

/// Ports of configuration space.
const ADDRESS_PORT: u16 = 0xcf8;
const DATA_PORT: u16 = 0xcfc;

/// Runs `vm`.
pub async fn vm(client: &Client, args: Vm) -> Result<Vec<u8>, Failure> {
    match args.task {
        VmTask::Save(args) => save(client, args).await,
        VmTask::Restore(args) => restore(client, args).await,
    }
}

async fn save(client: &Client, args: VmSave) -> Result<Vec<u8>, Failure> {
    let vgpu = args.vgpu.vgpu()?.to_string();
    let check = SaveVgpu { check: true, ..SaveVgpu::default() };
    client.request(Method::POST, &format!("{}/save", vgpu_path(&vgpu)), &check).await?;
    let file = NewFile::create(&args.file)?;
    let mut qmp = connect(&args.monitor).await?;
    let (mut qmp, was_running) = blocking(move || {
        let running = status(&mut qmp)? == "running";
        execute(&mut qmp, "stop", &json!({}))?;
        Ok((qmp, running))
    })
    .await?;
    let request = SaveVgpu { keep_paused: true, check: false };
    let saved = saving::save_into(client, &vgpu, &request, file, move |to| {
        let (from, into) = pipe()?;
        qmp.pass_descriptor(PIPE, into).map_err(|error| failed(&error))?;
        execute(&mut qmp, "migrate", &json!({ "uri": format!("fd:{PIPE}") }))?;
        let copied = copy(from, |data| to.machine(data));
        let completed = wait_completed(&mut qmp);
        // QEMU then only knows that the pipe broke.
        copied.map_err(|error| failed(&error)).and(completed)
    })
    .await;
    let ends = saved.is_ok() && !args.keep_running;
    // Otherwise the VM goes on: after a failure as if nothing had been asked.
    let resumed = if ends { Ok(()) } else { saving::resume_vgpu(client, &vgpu).await };
    let last = if ends { Some("quit") } else { was_running.then_some("cont") };
    let ended = match last {
        Some(command) => command_at(&args.monitor, command).await,
        None => Ok(()),
    };
    let bytes = saved?;
    resumed.and(ended)?;
    saving::written(&args.file, bytes, args.output)
}

/// Runs a command without arguments, on a connection of its own.
async fn command_at(monitor: &Path, command: &'static str) -> Result<(), Failure> {
    let mut qmp = connect(monitor).await?;
    blocking(move || execute(&mut qmp, command, &json!({})).map(drop)).await
}

async fn restore(client: &Client, args: VmRestore) -> Result<Vec<u8>, Failure> {
    let vgpu = args.vgpu.vgpu()?.to_string();
    let file = args.file.clone();
    let checked = blocking(move || saving::check(&file)).await?;
    if !checked.machine {
        let message = format!("{} has a vGPU, and no VM", args.file.display());
        return Err(Failure::Usage(message));
    }
    let found = client.vgpu(&vgpu, None).await?;
    let mdev_type = found.live_type.as_ref().unwrap_or(&found.mdev_type);
    if *mdev_type != checked.head.mdev_type {
        let message = format!(
            "The saved vGPU has type {}, and vGPU {vgpu} has type {mdev_type}; start one of the \
             saved type",
            checked.head.mdev_type
        );
        return Err(Failure::Usage(message));
    }
    let mut qmp = connect(&args.monitor).await?;
    let file = args.file.clone();
    let mut qmp = blocking(move || {
        if status(&mut qmp)? != "inmigrate" {
            let message = "The VM runs already; start QEMU with -incoming defer".to_owned();
            return Err(Failure::Local(message));
        }
        // Otherwise QEMU would start the VM as soon as it has read it.
        execute(&mut qmp, "stop", &json!({}))?;
        receive_machine(&mut qmp, &file)?;
        Ok(qmp)
    })
    .await?;
    let restored = saving::restore_from(client, &vgpu, &args.file).await?;
    blocking(move || program(&mut qmp, &restored.config)).await?;
    saving::resume_vgpu(client, &vgpu).await?;
    if !args.paused {
        command_at(&args.monitor, "cont").await?;
    }
    saving::described(client, &vgpu, args.output).await
}

fn failed(error: &dyn std::fmt::Display) -> Failure {
    Failure::Local(error.to_string())
}

fn pipe() -> Result<(PipeReader, PipeWriter), Failure> {
    std::io::pipe().map_err(|error| Failure::Local(format!("Cannot make a pipe: {error}")))
}

async fn connect(monitor: &Path) -> Result<Qmp, Failure> {
    let monitor = monitor.to_owned();
    blocking(move || {
        Qmp::connect(&monitor).map_err(|error| match error {
            QmpError::Connect { .. } => Failure::NotFound(error.to_string()),
            _ => Failure::Local(format!("{}: {error}", monitor.display())),
        })
    })
    .await
}

fn execute(qmp: &mut Qmp, command: &str, arguments: &Value) -> Result<Value, Failure> {
    qmp.execute(command, arguments).map_err(|error| failed(&error))
}

/// Returns the VM's run state (QMP's `RunState`).
fn status(qmp: &mut Qmp) -> Result<String, Failure> {
    let status = execute(qmp, "query-status", &json!({}))?;
    Ok(status["status"].as_str().unwrap_or_default().to_owned())
}

/// Calls `write` with all that comes out of a pipe.
fn copy(
    mut from: PipeReader,
    mut write: impl FnMut(&[u8]) -> std::io::Result<()>,
) -> std::io::Result<()> {
    let mut buffer = vec![0; MAX_CHUNK];
    let mut filled = 0;
    loop {
        let read = from.read(&mut buffer[filled..])?;
        filled += read;
        if filled == buffer.len() || read == 0 {
            if filled > 0 {
                write(&buffer[..filled])?;
            }
            filled = 0;
        }
        if read == 0 {
            return Ok(());
        }
    }
}

/// Waits until QEMU has saved or restored the VM.
fn wait_completed(qmp: &mut Qmp) -> Result<(), Failure> {
    let deadline = Instant::now() + LIMIT;
    loop {
        let state = execute(qmp, "query-migrate", &json!({}))?;
        match state["status"].as_str().unwrap_or_default() {
            "completed" => return Ok(()),
            "failed" | "cancelled" => {
                let reason = state["error-desc"].as_str().unwrap_or("no reason is known");
                return Err(Failure::Local(format!("QEMU failed: {reason}")));
            }
            _ if Instant::now() > deadline => {
                return Err(Failure::Local("QEMU did not finish in time".to_owned()));
            }
            _ => thread::sleep(INTERVAL),
        }
    }
}

/// Lets QEMU read the VM in a file.
fn receive_machine(qmp: &mut Qmp, file: &Path) -> Result<(), Failure> {
    let (from, mut into) = pipe()?;
    qmp.pass_descriptor(PIPE, from).map_err(|error| failed(&error))?;
    // Otherwise QEMU would end at an error, and its reason would be lost.
    let from = json!({ "uri": format!("fd:{PIPE}"), "exit-on-error": false });
    execute(qmp, "migrate-incoming", &from)?;
    let file = file.to_owned();
    let writer = thread::spawn(move || -> Result<(), Failure> {
        let (mut stream, _) = saving::open(&file)?;
        loop {
            match stream.next_part().map_err(|error| failed(&error))? {
                Part::Machine(data) => into.write_all(data).map_err(|error| failed(&error))?,
                Part::End => return Ok(()),
                Part::State(_) | Part::Memory { .. } | Part::Next(_) | Part::Domain(_) => {}
            }
        }
    });
    let completed = wait_completed(qmp);
    let written = writer.join().unwrap_or_else(|_| Err(failed(&"The file was not read")));
    // QEMU's reason says more than that the pipe broke.
    completed.and(written)
}

/// Makes the writes to the vGPU's configuration space by the ports that q35 and i440fx have.
fn program(qmp: &mut Qmp, writes: &[ConfigWrite]) -> Result<(), Failure> {
    let places = places(qmp)?;
    let address = address(&execute(qmp, "query-pci", &json!({}))?, &places)?;
    let mut human = |line: String| qmp.human(&line).map_err(|error| failed(&error));
    // The guest may have been between its two accesses.
    let before = human(format!("i/w {ADDRESS_PORT:#x}"))?;
    let before = before.split('=').nth(1).map_or("0", str::trim).to_owned();
    for ConfigWrite { offset, value } in writes {
        human(format!("o/w {ADDRESS_PORT:#x} {:#x}", address | u32::from(*offset)))?;
        human(format!("o/w {DATA_PORT:#x} {value:#x}"))?;
    }
    human(format!("o/w {ADDRESS_PORT:#x} {before}"))?;
    Ok(())
}

/// Returns the slots and functions (`devfn`) of the devices that are served over vfio-user.
fn places(qmp: &mut Qmp) -> Result<Vec<u64>, Failure> {
    let mut places = Vec::new();
    for holder in HOLDERS {
        let children = execute(qmp, "qom-list", &json!({ "path": holder }))?;
        let children = children.as_array().map(Vec::as_slice).unwrap_or_default();
        for child in children.iter().filter(|child| child["type"] == DRIVER) {
            let path = format!("{holder}/{}", child["name"].as_str().unwrap_or_default());
            let place = execute(qmp, "qom-get", &json!({ "path": path, "property": "addr" }))?;
            places.extend(place.as_u64());
        }
    }
    Ok(places)
}

/// Returns the address of the VM's vGPU for the address port. [`places`] returns `places`.
fn address(buses: &Value, places: &[u64]) -> Result<u32, Failure> {
    let mut found = Vec::new();
    let buses = buses.as_array().map(Vec::as_slice).unwrap_or_default();
    for bus in buses {
        collect(bus, places, &mut found);
    }
    match found[..] {
        [address] => Ok(address),
        [] => Err(Failure::Local("The VM has no vGPU".to_owned())),
        _ => {
            Err(Failure::Local("The VM has more than one vGPU, which is not supported".to_owned()))
        }
    }
}

fn collect(bus: &Value, places: &[u64], found: &mut Vec<u32>) {
    let devices = bus["devices"].as_array().map(Vec::as_slice).unwrap_or_default();
    for device in devices {
        let number = |name: &str| device[name].as_u64().unwrap_or_default();
        let (bus, place) = (number("bus"), number("slot") << 3 | number("function"));
        let id = &device["id"];
        let is_vgpu =
            IDS.iter().any(|ids| (&id["vendor"], &id["device"]) == (&json!(ids.0), &json!(ids.1)));
        if is_vgpu && places.contains(&place) {
            found.push(1 << 31 | (bus as u32 & 0xff) << 16 | (place as u32 & 0xff) << 8);
        }
        if device["pci_bridge"].is_object() {
            collect(&device["pci_bridge"], places, found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_vgpu_is_found_behind_bridges() {
        let host = json!({ "bus": 0, "slot": 0, "function": 0, "id": { "vendor": 0x8086 } });
        let ids = json!({ "vendor": 0x1234, "device": 0x1111 });
        let vgpu = json!({ "bus": 3, "slot": 16, "function": 0, "id": ids });
        let own = json!({ "bus": 0, "slot": 1, "function": 0, "id": ids });
        let port = json!({
            "bus": 0, "slot": 2, "function": 1, "id": { "vendor": 0x1b36 },
            "pci_bridge": { "bus": { "number": 3 }, "devices": [vgpu] },
        });
        let buses = json!([{ "bus": 0, "devices": [host, own, port] }]);
        assert_eq!(address(&buses, &[0x80]).unwrap(), 0x8003_8000, "not QEMU's own adapter");
        let none = address(&json!([{ "bus": 0, "devices": [host, own] }]), &[0x80]);
        assert_eq!(none.unwrap_err().to_string(), "The VM has no vGPU");
        let two = address(&json!([{ "devices": [vgpu, vgpu] }]), &[0x80]).unwrap_err();
        assert_eq!(two.to_string(), "The VM has more than one vGPU, which is not supported");
    }
}
