//! `vm save`, `vm restore`, `vm upgrade`, `vm migrate` and `vm receive`: a VM with its vGPUs in a
//! file, in a new QEMU, and on another host.
//!
//! QEMU 11.1 saves a VM with a vfio-user device without the device's state, and resets the device
//! when it restores the VM. So the vGPUs are saved while the VM is paused, and restored after QEMU
//! has restored the VM. Then QEMU learns of the BARs and interrupts by the writes to configuration
//! space that the guest's drivers have made before.
//!
//! * [`monitor`]: QEMU's monitor; [`domain`]: domains of libvirt
//! * [`pci`]: the vGPUs as devices of QEMU
//! * [`qemu_stream`]: QEMU's own stream
//! * [`upgrade`]: a new QEMU for a running VM; [`moving`]: a running VM on another host

mod domain;
mod monitor;
mod moving;
mod pci;
mod qemu_stream;
mod upgrade;

use std::time::Duration;

use hyper::Method;
use mdev_core::ids::VgpuId;
use mdev_core::stream::Head;
use mdev_core::untrusted::one_line;
use serde_json::json;
use vgpud_api::{SaveVgpu, Vgpu};

use self::domain::VmDomain;
use self::monitor::{Address, Monitor};
use self::pci::Place;
use super::checkpoint::with_checkpoint;
use super::new_file::NewFile;
use super::saving::{self, Checked, blocking};
use crate::cli::{Output, Vm, VmArg, VmRestore, VmSave, VmTask};
use crate::failure::{Failure, say};
use crate::mdevctl::pretty;
use vgpud_client::{Client, vgpu_path};

/// Longest name of a vGPU type in a message, in characters.
const MAX_TYPE: usize = 64;

/// Runs `vm`.
pub async fn vm(client: &Client, args: Vm) -> Result<Vec<u8>, Failure> {
    match args.task {
        VmTask::Save(args) => save(client, args).await,
        VmTask::Restore(args) => restore(client, args).await,
        VmTask::Upgrade(args) => upgrade::upgrade(client, args).await,
        VmTask::Migrate(args) => moving::migrate(client, args).await,
        VmTask::Receive(args) => moving::receive(client, args).await,
    }
}

async fn save(client: &Client, args: VmSave) -> Result<Vec<u8>, Failure> {
    let domain = match &args.vm.domain {
        Some(name) => Some(VmDomain::running(client, &args.vm.connect, name).await?),
        None => None,
    };
    let vgpus = vgpus_of_vm(client, &named_vgpu(client, &args.vm, domain.as_ref()).await?).await?;
    let file = NewFile::create(&args.file)?;
    let saved = save_checkpointed(client, &args, &vgpus, domain, file);
    saving::written(&args.file, with_checkpoint(client, &vgpus, saved).await?, args.output)
}

/// Saves a VM without CUDA programs on its vGPUs. Returns the length of the file.
async fn save_checkpointed(
    client: &Client,
    args: &VmSave,
    vgpus: &[Vgpu],
    domain: Option<VmDomain>,
    file: NewFile,
) -> Result<u64, Failure> {
    check_saveable(client, vgpus).await?;
    let address = address(&args.vm, domain.as_ref());
    let mut monitor = address.connect().await?;
    let expected = vgpus.len();
    let (mut monitor, was_running) = blocking(move || {
        check_count(pci::count(&mut monitor)?, expected)?;
        let running = monitor.status()? == "running";
        monitor.pause()?;
        Ok((monitor, running))
    })
    .await?;
    let guarded = domain.is_some() && domain::remove_guard(&mut monitor);
    let xml = domain.as_ref().map(|domain| domain.xml.clone()).unwrap_or_default();
    let saved = save_paused(client, vgpus, monitor, file, xml).await;
    if saved.is_ok() && !args.keep_running {
        address.with(Monitor::end).await?;
        return saved;
    }
    // The VM goes on: after a failure as if nothing had been asked.
    let mut resumed = resume_vgpus(client, vgpus).await;
    if let Some(domain) = domain.filter(|_| guarded) {
        resumed = resumed.and(address.with(move |monitor| domain.add_guard(monitor)).await);
    }
    if was_running {
        resumed = resumed.and(address.with(Monitor::resume).await);
    }
    let bytes = saved?;
    resumed?;
    Ok(bytes)
}

/// Saves the vGPUs and the VM, which is paused, into a file. Returns its length.
async fn save_paused(
    client: &Client,
    vgpus: &[Vgpu],
    monitor: Monitor,
    file: NewFile,
    xml: String,
) -> Result<u64, Failure> {
    let (mut monitor, places) = pci::identify(client, monitor, vgpus).await?;
    let request = SaveVgpu { keep_paused: true, ..SaveVgpu::default() };
    let mut streams = Vec::new();
    for (vgpu, place) in vgpus.iter().zip(places) {
        let stream = saving::begin_save(client, &vgpu.uuid.to_string(), &request).await?;
        streams.push((stream, Some(place.0)));
    }
    saving::save_into(streams, file, move |to| {
        to.domain(xml.as_bytes()).map_err(|error| monitor::failed(&error))?;
        qemu_stream::send_machine(&mut monitor, |data| to.machine(data))
    })
    .await
}

async fn restore(client: &Client, args: VmRestore) -> Result<Vec<u8>, Failure> {
    let file = args.file.clone();
    let checked = blocking(move || saving::check(&file)).await?;
    if !checked.machine {
        let message = format!("{} has a vGPU, and no VM", args.file.display());
        return Err(Failure::Usage(message));
    }
    let Some(name) = &args.vm.domain else {
        return restore_into(client, &args, &checked, None).await;
    };
    if checked.domain.is_empty() {
        let file = args.file.display();
        let message = format!("{file} has a VM that is no domain; name its vGPU and its monitor");
        return Err(Failure::Usage(message));
    }
    let xml = checked.domain.clone();
    let domain = VmDomain::saved(client, &args.vm.connect, name, xml).await?;
    domain.start()?;
    let restored = restore_into(client, &args, &checked, Some(&domain)).await;
    if restored.is_err()
        && let Err(failure) = domain.destroy()
    {
        say(format_args!("note: the domain was not restored, and cannot be ended: {failure}"));
    }
    restored
}

/// Restores a VM that waits for its state.
async fn restore_into(
    client: &Client,
    args: &VmRestore,
    checked: &Checked,
    domain: Option<&VmDomain>,
) -> Result<Vec<u8>, Failure> {
    let named = named_vgpu(client, &args.vm, domain).await?;
    let vgpus = vgpus_of_vm(client, &named).await?;
    check_types(checked.heads.iter().map(|head| &head.mdev_type), &vgpus)?;
    let mut monitor = address(&args.vm, domain).connect().await?;
    let (file, expected, of_libvirt) = (args.file.clone(), vgpus.len(), domain.is_some());
    let monitor = blocking(move || {
        check_waiting(&mut monitor)?;
        check_count(pci::count(&mut monitor)?, expected)?;
        // Otherwise QEMU would start the VM as soon as it has read it. libvirt has paused it.
        if !of_libvirt {
            monitor.pause()?;
        }
        qemu_stream::receive_machine(&mut monitor, &file)?;
        Ok(monitor)
    })
    .await?;
    let (mut monitor, places) = pci::identify(client, monitor, &vgpus).await?;
    for (index, at) in arrange(&checked.heads, &places)?.into_iter().enumerate() {
        let (vgpu, place) = (vgpus[at].uuid.to_string(), places[at]);
        let restored = saving::restore_from(client, &vgpu, &args.file, index).await?;
        monitor = pci::program(monitor, place, restored).await?;
    }
    resume_vgpus(client, &vgpus).await?;
    if !args.paused {
        blocking(move || monitor.resume()).await?;
    }
    saving::described(client, named.uuid, args.output).await
}

/// Returns the vGPU that selects a VM.
async fn named_vgpu(
    client: &Client,
    vm: &VmArg,
    domain: Option<&VmDomain>,
) -> Result<Vgpu, Failure> {
    match (domain, vm.vgpu.vgpu()) {
        (Some(domain), _) => domain.vgpu(client).await,
        (None, Some(vgpu)) => Ok(client.vgpu(vgpu, None).await?),
        // The parser has refused a command line without one.
        (None, None) => Err(Failure::Usage("Which vGPU?".to_owned())),
    }
}

/// Returns where a VM's monitor is.
fn address(vm: &VmArg, domain: Option<&VmDomain>) -> Address {
    let socket = || Address::Socket(vm.monitor.clone().unwrap_or_default());
    domain.map_or_else(socket, VmDomain::monitor)
}

/// Returns the vGPUs of a vGPU's VM, the vGPU first.
async fn vgpus_of_vm(client: &Client, vgpu: &Vgpu) -> Result<Vec<Vgpu>, Failure> {
    let Some(vm) = vgpu.vm else {
        let message = format!("vGPU {} has no VM; start QEMU first", vgpu.uuid);
        return Err(Failure::NotNow(message));
    };
    let all: Vec<Vgpu> = client.get("/v1/vgpus").await?;
    let others = all.into_iter().filter(|other| {
        other.uuid != vgpu.uuid && other.vm.is_some_and(|other| other.pid == vm.pid)
    });
    Ok([vgpu.clone()].into_iter().chain(others).collect())
}

async fn check_saveable(client: &Client, vgpus: &[Vgpu]) -> Result<(), Failure> {
    let check = SaveVgpu { check: true, ..SaveVgpu::default() };
    for vgpu in vgpus {
        let path = format!("{}/save", vgpu_path(vgpu.uuid));
        client.request(Method::POST, &path, &check).await?;
    }
    Ok(())
}

/// Checks that QEMU waits for a VM.
fn check_waiting(monitor: &mut Monitor) -> Result<(), Failure> {
    if monitor.status()? == "inmigrate" {
        return Ok(());
    }
    let message = "The VM runs already; start QEMU with -incoming defer".to_owned();
    Err(Failure::Local(message))
}

fn check_count(devices: usize, vgpus: usize) -> Result<(), Failure> {
    if devices == vgpus {
        return Ok(());
    }
    Err(Failure::Local(format!(
        "The monitor's VM has {devices} vfio-user devices, and the vGPU's VM has {vgpus} vGPUs of \
         this vgpud; name the monitor of the vGPU's VM, whose devices must all be vGPUs"
    )))
}

/// Checks that vGPUs have the types of saved ones, in any order.
fn check_types<'a>(
    saved: impl Iterator<Item = &'a String>,
    vgpus: &'a [Vgpu],
) -> Result<(), Failure> {
    let mut saved: Vec<_> = saved.collect();
    let mut found: Vec<_> =
        vgpus.iter().map(|vgpu| vgpu.live_type.as_ref().unwrap_or(&vgpu.mdev_type)).collect();
    saved.sort();
    found.sort();
    if saved == found {
        return Ok(());
    }
    let list = |types: &[&String]| {
        // A saved VM, or another host, names the types.
        types.iter().map(|name| one_line(name, MAX_TYPE)).collect::<Vec<_>>().join(" and ")
    };
    let message = format!(
        "The saved VM has a vGPU of type {}, and this VM of type {}; start the saved types",
        list(&saved),
        list(&found)
    );
    Err(Failure::Usage(message))
}

/// Returns for each saved vGPU the index of the vGPU that is at its place.
fn arrange(saved: &[Head], places: &[Place]) -> Result<Vec<usize>, Failure> {
    let of = |head: &Head| find_place(Place(head.place.unwrap_or_default()), places);
    saved.iter().map(of).collect()
}

/// Returns the index of the vGPU at a saved vGPU's place.
fn find_place(place: Place, places: &[Place]) -> Result<usize, Failure> {
    let at = places.iter().position(|other| *other == place);
    at.ok_or_else(|| {
        Failure::Local(format!(
            "The saved VM has a vGPU at {place}, and this VM has none there; start QEMU with the \
             command line of the saved VM"
        ))
    })
}

/// Returns the output of a command that has paused a VM.
fn paused(vgpu: VgpuId, pause: Duration, output: Output) -> Result<Vec<u8>, Failure> {
    match output {
        Output::Text => Ok(format!("The VM was paused for {} ms\n", pause.as_millis()).into()),
        Output::Json => pretty(&json!({ "uuid": vgpu, "pause_ms": pause.as_millis() as u64 })),
    }
}

/// Lets all vGPUs continue. Returns the first failure.
pub async fn resume_vgpus(client: &Client, vgpus: &[Vgpu]) -> Result<(), Failure> {
    let mut result = Ok(());
    for vgpu in vgpus {
        result = result.and(saving::resume_vgpu(client, vgpu.uuid).await);
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn saved_types_are_shown_in_one_line() {
        let saved = ["\u{1b}]0;pwned\u{7}\nvgpuctl: all is well".to_owned(), "x".repeat(1000)];
        let message = check_types(saved.iter(), &[]).unwrap_err().to_string();
        let start = "The saved VM has a vGPU of type \\u{1b}]0;pwned\\u{7}\\nvgpuctl: all is well \
                     and xxx";
        assert!(message.starts_with(start), "{message}");
        assert!(message.len() < 400, "{message}");
    }
}
