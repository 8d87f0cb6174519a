//! The programs of [`crate::inside`] in a VM: Debian's kernel with the guest's module, and NVIDIA's
//! libcuda.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lab::build;
use lab::cleanup::Scratch;
use lab::cuda_libraries::CudaLibraries;
use lab::guest_driver::Kernels;
use lab::initramfs;
use lab::progress::Progress;
use lab::qemu::{Vm, vgpu_device};
use serde_json::json;
use system_tests::guest_vm::{self, Guest, Size};
use system_tests::{Vgpud, skipped, vgpuctl, worker_deaths};

use crate::{TYPE, inside, libraries};

/// Folder of NVIDIA's libraries in the VM.
const LIBRARIES: &str = "cuda";

/// What a VM has and does.
struct Setup<'a> {
    /// Parameters of the module.
    parameters: &'a str,
    with_vgpu: bool,
    memory_mib: u32,
    /// The VM boots the kernel's image. QEMU loads an uncompressed kernel again when a VM wakes up.
    suspends: bool,
}

impl Default for Setup<'_> {
    fn default() -> Self {
        Self { parameters: "", with_vgpu: true, memory_mib: 1024, suspends: false }
    }
}

/// A VM whose vGPU the module has.
pub struct CudaVm {
    pub guest: Guest,
    pub uuid: String,
    scratch: Scratch,
    pub vgpud: Vgpud,
}

impl CudaVm {
    /// Boots a VM, unless what it needs cannot be fetched.
    pub fn boot(parameters: &str) -> Result<Option<Self>> {
        Self::boot_with(&Setup { parameters, ..Setup::default() })
    }

    /// Boots a VM with another amount of memory, in MiB, unless what it needs cannot be fetched.
    pub fn boot_with_memory(memory_mib: u32) -> Result<Option<Self>> {
        Self::boot_with(&Setup { memory_mib, ..Setup::default() })
    }

    /// Boots a VM without a vGPU, unless what it needs cannot be fetched.
    pub fn boot_unplugged(parameters: &str) -> Result<Option<Self>> {
        Self::boot_with(&Setup { parameters, with_vgpu: false, ..Setup::default() })
    }

    fn boot_with(setup: &Setup<'_>) -> Result<Option<Self>> {
        let Some(libraries) = libraries() else { return Ok(None) };
        let kernels = match Kernels::open(&Progress::new())? {
            Ok(kernels) => kernels,
            Err(reason) => {
                skipped(&format!("no kernels of Debian: {reason}"));
                return Ok(None);
            }
        };
        let mut target = kernels.stable()?;
        target.kernel.uncompressed.take_if(|_| setup.suspends);
        let scratch = Scratch::new()?;
        let module = kernels.build(&target)?;
        let vgpud = Vgpud::start_with_log(&[], &scratch.path().join("log"))?;
        let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true }))?;
        let socket = vgpud.vfio_socket(&uuid);
        let files = programs(libraries, scratch.path())?;
        let socket = Some(socket.as_path()).filter(|_| setup.with_vgpu);
        let (kernel, folder) = (&target.kernel, scratch.path());
        let size = Size { memory_mib: setup.memory_mib, ..Size::default() };
        let mut guest = Guest::boot_with(kernel, &module, &files, socket, folder, size)?;
        guest.run(&format!("insmod /module.ko {}", setup.parameters))?;
        guest.run("mkdir -p /dev/shm && mount -t tmpfs none /dev/shm")?;
        Ok(Some(Self { guest, uuid, scratch, vgpud }))
    }

    /// Waits for QEMU's end, and starts another one, with another vGPU, that waits for the VM's
    /// state.
    pub fn restart_on_another(&mut self) -> Result<()> {
        system_tests::wait_for("QEMU has ended", || !self.guest.vm.is_running())?;
        let folder = self.scratch.path().join("restored");
        self.await_on_another(&folder).map(drop)
    }

    /// Starts another QEMU, with another vGPU, that waits for the VM's state. Returns the one
    /// before.
    fn await_on_another(&mut self, folder: &Path) -> Result<Vm> {
        self.uuid = self.vgpud.create(&json!({ "mdev_type": TYPE, "run": true }))?;
        let before = self.guest.restart_awaiting(&self.vgpud.vfio_socket(&self.uuid), folder)?;
        system_tests::wait_for("the VM is attached", || {
            self.vgpud.show(&self.uuid).is_ok_and(|vgpu| !vgpu["vm"].is_null())
        })?;
        Ok(before)
    }

    /// Moves the VM to a QEMU with another vGPU.
    pub fn migrate_to_another(&mut self) -> Result<()> {
        let (from, monitor) = (self.uuid.clone(), self.guest.vm.keys());
        let folder = self.scratch.path().join("moved");
        let _before = self.await_on_another(&folder)?;
        let address = format!("unix:{}", folder.join("move").display());
        let keys = self.guest.vm.keys();
        let mut receive = Command::new(vgpuctl::path()?);
        receive.arg("--socket").arg(self.vgpud.api_socket()).args(["vm", "receive", &self.uuid]);
        receive.arg("--monitor").arg(&keys).args(["--listen", &address]);
        let mut receive = receive.spawn()?;
        system_tests::wait_for("the other host listens", || folder.join("move").exists())?;
        let migrate = format!("vm migrate {from} --monitor {} --to {address}", monitor.display());
        let migrated = vgpuctl::vgpuctl(&self.vgpud, &migrate);
        if migrated.is_err() {
            receive.kill()?;
        }
        let received = receive.wait()?;
        let said = migrated?;
        ensure!(said.starts_with("The VM was paused for ") && said.ends_with(" ms"), "{said}");
        ensure!(received.success(), "`vm receive` ended with {received}");
        self.guest.vm.wait_running()
    }

    /// Returns the process ID of the vGPU's worker.
    pub fn worker(&self) -> Result<u64> {
        self.vgpud.show(&self.uuid)?["pid"].as_u64().context("no worker")
    }

    /// Kills the vGPU's worker, and waits for the next.
    pub fn replace_worker(&self) -> Result<()> {
        worker_deaths::replace(&self.vgpud, &self.uuid)
    }

    /// Plugs the vGPU in for the `round`th time, and waits for its device files.
    pub fn plug(&mut self, round: u32) -> Result<()> {
        let socket = self.vgpud.vfio_socket(&self.uuid);
        self.guest.vm.plug(vgpu_device(&format!("vgpu{round}"), &socket), round as usize % 2)?;
        self.guest.run("while [ ! -e /dev/nvidia0 ]; do sleep 0.1; done").map(drop)
    }

    /// Unplugs the vGPU after [`Self::plug`].
    pub fn unplug(&mut self, round: u32) -> Result<()> {
        self.guest.vm.unplug(&format!("vgpu{round}"))
    }

    /// Returns a shell command that runs one of [`inside`].
    pub fn command(name: &str) -> String {
        format!(
            "LD_LIBRARY_PATH=/{LIBRARIES} {}=1 /bin/cuda --exact inside::{name} --ignored --nocapture",
            inside::MARK
        )
    }

    /// Runs one of [`inside`], which must pass, and returns what it prints.
    pub fn run(&mut self, name: &str) -> Result<String> {
        let output = self.guest.vm.guest.run(&Self::command(name), guest_vm::LIMIT)?;
        ensure!(
            output.stdout.contains("1 passed"),
            "{name}: {output:?}\n{}\n{}",
            self.guest.vm.console(),
            std::fs::read_to_string(self.scratch.path().join("log")).unwrap_or_default()
        );
        Ok(output.stdout)
    }

    /// Starts a program that waits with its context, and returns its process id.
    pub fn start_waiting(&mut self, log: &str) -> Result<String> {
        let command = Self::command("waits");
        let pid = self.guest.run(&format!("env {command} > {log} 2>&1 & echo $!"))?;
        self.guest.run(&format!("while ! grep -q ready {log}; do sleep 0.1; done"))?;
        Ok(pid.trim().to_owned())
    }
}

/// Returns the files of the programs in the VM: this test, NVIDIA's libraries, and what they link
/// to.
fn programs(libraries: &CudaLibraries, folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let test = initramfs::stripped(&std::env::current_exe()?, folder)?;
    let smi = libraries.nvidia_smi();
    let mut files =
        vec![("bin/cuda".to_owned(), test.clone()), ("bin/nvidia-smi".to_owned(), smi.clone())];
    for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let library = libraries.folder().join(name);
        files.push((format!("{LIBRARIES}/{name}"), library.clone()));
        files.extend(guest_vm::linked(&library)?);
    }
    for program in [test, smi] {
        files.extend(guest_vm::linked(&program)?);
    }
    let tool = build::guest(&Progress::new())?.find("vgpu-guest")?.to_owned();
    files.push(("bin/vgpu-guest".to_owned(), tool));
    Ok(files)
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn programs_in_a_vm_have_the_vgpu() -> Result<()> {
    let Some(mut vm) = CudaVm::boot("")? else { return Ok(()) };
    let output = vm.run("identity")?;
    let uuid = vm.uuid.replace('-', "");
    for part in [format!("name=Tessera {TYPE}"), format!("uuid={uuid}")] {
        ensure!(output.contains(&part), "{output}: no {part}");
    }
    for name in [
        "copies",
        "streams_and_events",
        "out_of_memory",
        "managed_memory",
        "exports_memory_and_an_event",
    ] {
        vm.run(name)?;
    }
    let smi = vm.guest.run(&format!("LD_LIBRARY_PATH=/{LIBRARIES} nvidia-smi"))?;
    ensure!(smi.contains(&format!("Tessera {TYPE}")), "{smi}");
    vm.guest.check_log()
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn the_doctor_finds_what_a_vm_lacks_for_cuda() -> Result<()> {
    let Some(mut vm) = CudaVm::boot("")? else { return Ok(()) };
    let doctor = format!("LD_LIBRARY_PATH=/{LIBRARIES} vgpu-guest doctor");
    let version = libraries().context("There is no libcuda")?.version()?;
    let well = vm.guest.run(&doctor)?;
    for part in [
        "has its driver tessera_guest\n",
        "tessera_guest 0.1.0 is loaded\n",
        "Every user may use /dev/nvidia*\n",
        &format!("/{LIBRARIES}/libcuda.so.1 has the version of the host's driver, {version}\n"),
        &format!(
            "/{LIBRARIES}/libnvidia-ml.so.1 has the version of the host's driver, {version}\n"
        ),
    ] {
        ensure!(well.contains(part), "{well}: no {part}");
    }
    let mut finds = |change: &str, command: &str, parts: &[&str]| {
        vm.guest.run(change)?;
        let output = vm.guest.vm.guest.run(command, guest_vm::LIMIT)?;
        let told = format!("{}{}", output.stdout, output.stderr);
        let missing = parts.iter().find(|part| !told.contains(**part));
        ensure!(output.status == 1 && missing.is_none(), "{told}: no {missing:?}");
        anyhow::Ok(())
    };
    // The module keeps the registers.
    let refused = ["belongs to the kernel driver tessera_guest; unbind that driver first"];
    finds("true", "vgpu-guest info", &refused)?;
    finds(
        "chmod 600 /dev/nvidia0; mv /cuda/libcuda.so.1 /tmp",
        &doctor,
        &[
            "warning  cuda     Not every user may use /dev/nvidia0",
            "PROBLEM  cuda     There is no libcuda.so.1",
            &format!("fix: install libcuda of version {version}"),
            "vgpu-guest: 1 problem found",
        ],
    )?;
    finds(
        "rmmod tessera_guest",
        &doctor,
        &[
            "PROBLEM  device   No driver has the vGPU",
            "PROBLEM  module   There is no tessera_guest for this kernel (6.",
            "fix: install the package tessera-guest-dkms",
        ],
    )?;
    vm.guest.run("vgpu-guest info").map(drop)
}

/// Without interrupts, and with faults of memory management looked for.
#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn a_killed_program_in_a_vm_gives_its_memory_back_and_disturbs_no_other() -> Result<()> {
    let Some(mut vm) = CudaVm::boot("msi=0")? else { return Ok(()) };
    let other = vm.start_waiting("/tmp/other")?;
    for _ in 0..2 {
        let killed = vm.start_waiting("/tmp/killed")?;
        vm.guest.run(&format!("kill -9 {killed}; rm /tmp/killed"))?;
    }
    // At any point of a program's life.
    let copies = CudaVm::command("copies");
    vm.guest.run(&format!(
        "for delay in 1 2 3 4 5 6 7 8; do env {copies} > /tmp/log 2>&1 & sleep 0.$delay; \
         kill -9 $!; done; kill -0 {other} && ! grep -q FAILED /tmp/other && kill -9 {other}"
    ))?;
    vm.run("out_of_memory").context("The killed programs' memory is not free")?;
    vm.guest.run("rmmod tessera_guest && insmod /module.ko")?;
    vm.run("identity")?;
    vm.guest.check_log()
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn programs_end_when_their_vgpu_goes_and_others_have_it_when_it_comes_back() -> Result<()> {
    const DRIVER: &str = "/sys/bus/pci/drivers/tessera_guest";
    let Some(mut vm) = CudaVm::boot("")? else { return Ok(()) };
    let device = vm.guest.run(&format!("cd {DRIVER} && echo 0000:*"))?;
    let device = device.trim();
    for _ in 0..3 {
        let pid = vm.start_waiting("/tmp/waits")?;
        let copies = CudaVm::command("copies");
        vm.guest.run(&format!("env {copies} > /tmp/copies 2>&1 & sleep 0.7"))?;
        vm.guest.run(&format!("echo {device} > {DRIVER}/unbind && [ ! -e /dev/nvidia0 ]"))?;
        vm.guest.run(&format!("while kill -0 {pid} 2> /dev/null; do sleep 0.1; done"))?;
        vm.guest.run(&format!("echo {device} > {DRIVER}/bind; rm /tmp/waits"))?;
    }
    // Programs that lose the vGPU by a reset end; the next one has it.
    let pid = vm.start_waiting("/tmp/waits")?;
    vm.guest.run(&format!("echo 1 > /sys/bus/pci/devices/{device}/reset"))?;
    vm.guest.run(&format!("while kill -0 {pid} 2> /dev/null; do sleep 0.1; done"))?;
    vm.run("identity")?;
    vm.guest.run("rmmod tessera_guest")?;
    vm.guest.check_log()
}

#[test]
#[ignore = "boots VMs: run `cargo lab test`"]
fn programs_end_when_their_vm_is_suspended_and_others_run_after_it() -> Result<()> {
    let setup = Setup { suspends: true, ..Setup::default() };
    let Some(mut vm) = CudaVm::boot_with(&setup)? else { return Ok(()) };
    let worker = vm.worker()?;
    let pid = vm.start_waiting("/tmp/waits")?;
    // To RAM (S3): QEMU resets all devices when the VM wakes up.
    vm.guest.vm.guest.start("echo mem > /sys/power/state", guest_vm::LIMIT)?;
    vm.guest.vm.qmp.wait_event("SUSPEND", guest_vm::LIMIT)?;
    vm.guest.vm.qmp.execute("system_wakeup", &json!({}))?;
    vm.guest.vm.guest.finish(guest_vm::LIMIT)?.success()?;
    vm.guest.run(&format!("while kill -0 {pid} 2> /dev/null; do sleep 0.1; done"))?;
    vm.run("identity")?;
    vm.run("copies")?;
    ensure!(vm.worker()? == worker, "The worker has ended");
    vm.guest.run("rmmod tessera_guest")?;
    vm.guest.check_log()
}
