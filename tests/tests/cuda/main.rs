//! CUDA programs on vGPUs of the software GPU, with NVIDIA's own libcuda.
//!
//! * `checkpoints`: programs that are checkpointed, and saved with their VM
//! * `containers`: programs in namespaces of their own
//! * `in_vm`: the same programs in a VM
//! * `deaths`: workers that die under programs in a VM; `program_deaths`: under those of the host
//! * `descriptors`: a program that takes all descriptors that it gets
//! * `fairness`: processes on one vGPU
//! * `inside`: what programs do, each in a process of its own on a vGPU
//! * `program`: a connection to a worker, without the preload library
//! * `queue`: programs in a VM, by the control queue alone; `queue_vm`: its VM
//! * `statistics`: what an operator sees of programs
//! * `vgpu_guest_in_vm`: vgpu-guest on a vGPU that the module has

#![allow(clippy::unwrap_used, reason = "tests")]

mod checkpoints;
mod containers;
mod deaths;
mod descriptors;
mod endurance;
mod fairness;
mod in_vm;
mod inside;
mod program;
mod program_deaths;
mod queue;
mod queue_vm;
mod statistics;
mod vgpu_guest_in_vm;

use std::io::{BufRead, BufReader, Read};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use cuda_socket::{Reply, Request, VERSION, decode, decode_numbered, encode};
use ipc::seqpacket::{MAX_PACKET, SeqPacket};
use lab::cuda_libraries::CudaLibraries;
use lab::progress::Progress;
use serde_json::json;
use system_tests::{Vgpud, cuda_library, skipped};

/// Type of the vGPUs: a context takes some 600 MiB.
const TYPE: &str = "SOFT-2C";

/// Address of a vGPU on its PCI bus, as NVML writes it.
const BUS_ID: &str = "00000000:00:06.0";

/// Returns NVIDIA's libraries, unless they cannot be fetched.
fn libraries() -> Option<&'static CudaLibraries> {
    static LIBRARIES: OnceLock<Option<CudaLibraries>> = OnceLock::new();
    let libraries = LIBRARIES.get_or_init(|| {
        let opened = CudaLibraries::open(&Progress::new());
        opened.inspect_err(|error| skipped(&format!("no libcuda: {error:#}"))).ok()
    });
    libraries.as_ref()
}

/// A vGPU for programs.
struct Gpu<'a> {
    vgpud: &'a Vgpud,
    libraries: &'a CudaLibraries,
    uuid: String,
}

impl<'a> Gpu<'a> {
    fn start(vgpud: &'a Vgpud, libraries: &'a CudaLibraries) -> Result<Self> {
        let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true }))?;
        Ok(Self { vgpud, libraries, uuid })
    }

    /// Returns a command that runs one of [`inside`] on the vGPU.
    fn command(&self, name: &str) -> Result<Command> {
        let mut command = Command::new(system_tests::vgpuctl::path()?);
        command.arg("--socket").arg(self.vgpud.api_socket()).args(["run", "-u", &self.uuid, "--"]);
        command.arg(std::env::current_exe()?);
        command.args(["--exact", &format!("inside::{name}"), "--ignored", "--nocapture"]);
        command.env("TESSERA_CUDA_LIBRARY", cuda_library()?);
        command.env("LD_LIBRARY_PATH", self.libraries.folder()).env(inside::MARK, "1");
        Ok(command)
    }

    /// Runs one of [`inside`], which must pass, and returns what it prints.
    fn run(&self, name: &str) -> Result<String> {
        let Output { stdout, stderr, .. } = self.command(name)?.output()?;
        let (stdout, stderr) = (String::from_utf8_lossy(&stdout), String::from_utf8_lossy(&stderr));
        ensure!(stdout.contains("1 passed"), "{name}: {stdout}\n{stderr}");
        Ok(stdout.into_owned())
    }

    /// Starts [`inside::waits`] and waits until it has its context.
    fn start_waiting(&self) -> Result<Child> {
        let mut child = self.command("waits")?.stdout(Stdio::piped()).spawn()?;
        let stdout = child.stdout.take().context("No output")?;
        let ready =
            BufReader::new(stdout).lines().map_while(Result::ok).any(|line| line == "ready");
        ensure!(ready, "The program has no context: {:?}", child.wait()?);
        Ok(child)
    }
}

/// Runs a test on a vGPU, if there is a libcuda.
fn on_vgpu(test: impl FnOnce(&Gpu<'_>) -> Result<()>) -> Result<()> {
    let Some(libraries) = libraries() else { return Ok(()) };
    let vgpud = Vgpud::start()?;
    test(&Gpu::start(&vgpud, libraries)?)
}

#[test]
fn a_vgpu_serves_either_a_vm_or_programs() -> Result<()> {
    let vgpud = Vgpud::start()?;
    let uuid = vgpud.create(&json!({ "mdev_type": TYPE, "run": true }))?;
    let vm_socket = vgpud.vfio_socket(&uuid);
    let cuda_socket = vm_socket.with_file_name("cuda.sock");
    let hello = encode(&Request::Hello { version: VERSION })?;
    let mut buffer = vec![0; MAX_PACKET];

    let program = SeqPacket::connect(&cuda_socket)?;
    program.send(&hello, &[])?;
    let packet = program.recv(&mut buffer)?.context("The program is refused")?;
    let welcome: (u64, Reply) = decode_numbered(&buffer[..packet.len])?;
    ensure!(matches!(welcome, (0, Reply::Welcome(_))), "{welcome:?}");
    let mut vm = UnixStream::connect(&vm_socket)?;
    ensure!(vm.read(&mut [0])? == 0, "A VM attaches beside a program");
    drop(program);

    let vm = wait_for(|| {
        let mut vm = UnixStream::connect(&vm_socket)?;
        vm.set_read_timeout(Some(Duration::from_millis(200)))?;
        Ok(vm.read(&mut [0]).is_err().then_some(vm))
    })?;
    let program = SeqPacket::connect(&cuda_socket)?;
    let _ = program.send(&hello, &[]);
    let packet = program.recv(&mut buffer)?.context("No answer")?;
    let refused: Reply = decode(&buffer[..packet.len])?;
    ensure!(refused == Reply::Failed { errno: libc::EBUSY }, "Beside a VM: {refused:?}");
    ensure!(program.recv(&mut buffer)?.is_none(), "A program runs beside a VM");
    drop(vm);
    Ok(())
}

/// Waits until an attempt returns a value.
fn wait_for<T>(mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(value) = attempt()? {
            return Ok(value);
        }
        ensure!(Instant::now() < end, "It takes more than 10 s");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn copies_in_all_directions_are_right() -> Result<()> {
    on_vgpu(|gpu| gpu.run("copies").map(drop))
}

#[test]
fn streams_and_events_work() -> Result<()> {
    on_vgpu(|gpu| gpu.run("streams_and_events").map(drop))
}

#[test]
fn a_long_wait_ends_with_the_work() -> Result<()> {
    on_vgpu(|gpu| gpu.run("a_long_wait_ends_with_the_work").map(drop))
}

/// Runs `nvidia-smi` on the vGPU with a query or without, and returns the fields of each line.
fn nvidia_smi(gpu: &Gpu<'_>, query: &str) -> Result<Vec<Vec<String>>> {
    let mut command = Command::new(system_tests::vgpuctl::path()?);
    command.arg("--socket").arg(gpu.vgpud.api_socket()).args(["run", "-u", &gpu.uuid, "--"]);
    command.arg(gpu.libraries.nvidia_smi());
    if !query.is_empty() {
        command.args([query, "--format=csv,noheader,nounits"]);
    }
    command.env("TESSERA_CUDA_LIBRARY", cuda_library()?);
    command.env("LD_LIBRARY_PATH", gpu.libraries.folder());
    let Output { status, stdout, stderr } = command.output()?;
    let (stdout, stderr) = (String::from_utf8(stdout)?, String::from_utf8_lossy(&stderr));
    ensure!(status.success(), "{query}: {stdout}{stderr}");
    let fields = |line: &str| line.split(", ").map(|field| field.trim().to_owned()).collect();
    Ok(stdout.lines().map(fields).collect())
}

#[test]
fn nvidia_smi_shows_the_vgpu_and_its_processes() -> Result<()> {
    on_vgpu(|gpu| {
        let mut child = gpu.start_waiting()?;
        let fields = "name,uuid,memory.total,memory.used,utilization.gpu";
        let found = nvidia_smi(gpu, &format!("--query-gpu={fields}"))?;
        let [found] = found.as_slice() else { anyhow::bail!("{found:?}") };
        let [name, uuid, total, used, busy] = found.as_slice() else { anyhow::bail!("{found:?}") };
        let expected = [format!("Tessera {TYPE}"), format!("GPU-{}", gpu.uuid), "2048".into()];
        ensure!([name, uuid, total] == expected.each_ref(), "{found:?}");
        let used: u64 = used.parse().context("memory.used")?;
        ensure!((100..2048).contains(&used), "{used} MiB are used");
        ensure!(busy.parse::<u32>().is_ok_and(|busy| busy <= 100), "utilization: {busy}");

        let apps = nvidia_smi(gpu, "--query-compute-apps=pid,used_memory")?;
        let [app] = apps.as_slice() else { anyhow::bail!("{apps:?}") };
        let pid = child.id().to_string();
        let memory: u64 = app.get(1).context("No memory")?.parse().context("used_memory")?;
        ensure!(app[0] == pid && memory > 100 && memory <= used, "{app:?}, process {pid}");
        let table = nvidia_smi(gpu, "")?;
        ensure!(table.concat().concat().contains(BUS_ID), "{table:?}");
        child.kill()?;
        child.wait()?;
        let apps = wait_for(|| {
            let apps = nvidia_smi(gpu, "--query-compute-apps=pid,used_memory")?;
            Ok(apps.is_empty().then_some(apps))
        });
        apps.map(drop)
    })
}

#[test]
fn a_program_sees_the_vgpu_and_its_memory() -> Result<()> {
    on_vgpu(|gpu| {
        let output = gpu.run("identity")?;
        let uuid = gpu.uuid.replace('-', "");
        for part in [format!("name=Tessera {TYPE}"), format!("uuid={uuid}")] {
            ensure!(output.contains(&part), "{output}: no {part}");
        }
        Ok(())
    })
}

#[test]
fn managed_memory_is_the_same_for_cpu_and_gpu() -> Result<()> {
    on_vgpu(|gpu| gpu.run("managed_memory").map(drop))
}

#[test]
fn a_fault_is_an_illegal_address() -> Result<()> {
    on_vgpu(|gpu| gpu.run("uses_memory_that_it_has_freed").map(drop))
}

#[test]
fn two_processes_share_memory() -> Result<()> {
    on_vgpu(|gpu| gpu.run("exports_memory_and_an_event").map(drop))
}

#[test]
fn memory_beyond_the_vgpus_is_cudas_out_of_memory() -> Result<()> {
    on_vgpu(|gpu| gpu.run("out_of_memory").map(drop))
}

#[test]
fn a_killed_program_gives_its_memory_back_and_disturbs_no_other() -> Result<()> {
    on_vgpu(|gpu| {
        let mut other = gpu.start_waiting()?;
        for _ in 0..3 {
            let mut killed = gpu.start_waiting()?;
            killed.kill()?;
            killed.wait()?;
        }
        ensure!(other.try_wait()?.is_none(), "The other program ended");
        other.kill()?;
        other.wait()?;
        // The memory of the killed programs comes back.
        wait_for(|| Ok(gpu.run("out_of_memory").ok())).map(drop)
    })
}
