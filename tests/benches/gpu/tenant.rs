//! A process that uses a GPU: as its plain owner, or as a stranger with a vGPU. Either does the same on being told the
//! same, so that what differs between two is what lies between them and the GPU.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use mdev_core::units::MIB;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use system_tests::ram::Ram;
use system_tests::stranger::Stranger;
use vgpu_guest::device::Device;

use crate::beside::{self, BesideSpec};
use crate::kernels::{self, KernelSpec};
use crate::load::{Load, LoadSpec, Progress};
use crate::owner::Owner;
use crate::solo::{self, Solo, SoloSpec};
use crate::trouble::{self, Trouble};
use crate::{GpuKind, jobs, owner};

/// What a tenant process is started with.
#[derive(Clone, Debug, Args)]
pub struct TenantArgs {
    /// A vGPU's socket; without, it opens the GPU itself.
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Guest RAM in MiB.
    #[arg(long)]
    ram: u64,
}

/// What a tenant is told, one line of JSON each; it answers each with one.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Do every job once, and check it.
    Jobs,
    /// Find out how long a kernel takes.
    Calibrate,
    /// Measure alone.
    Solo(SoloSpec),
    /// Launch one kernel many times.
    Kernels(KernelSpec),
    /// Keep the GPU busy from now on.
    Load(LoadSpec),
    /// Say what the load did from now on.
    Measure(Duration),
    /// Make a channel beside a busy one.
    Beside(BesideSpec),
    /// Ring after pauses of that length, so often.
    Pauses(Duration, usize),
    /// Make trouble.
    Trouble(Trouble, Duration),
}

/// The tenant's side: obeys until nobody tells it anything any more.
pub fn serve(kind: GpuKind, cubin: &std::path::Path, args: &TenantArgs) -> Result<()> {
    let ram = Ram::new(args.ram * MIB, 2 * MIB)?;
    let (device, _owner): (Device, Option<Owner>) = match &args.socket {
        Some(socket) => {
            let platform = Stranger::attach(socket, ram)?;
            (Device::open_with(Box::new(platform), cubin)?, None)
        }
        None => owner::open(kind, ram, cubin).map(|(device, owner)| (device, Some(owner)))?,
    };
    let mut load = None;
    answer(&Ok("ready"))?;
    for line in std::io::stdin().lock().lines() {
        match serde_json::from_str(&line?)? {
            Order::Jobs => answer(&Ok(jobs::run(&device)))?,
            Order::Calibrate => answer(&solo::calibrate(&device))?,
            Order::Solo(spec) => answer(&solo::measure(&device, &spec))?,
            Order::Kernels(spec) => answer(&kernels::measure(&device, &spec))?,
            Order::Load(spec) => {
                // Not while the next one begins.
                drop(load.take());
                let started = Load::start(&device, &spec);
                answer(
                    &started.as_ref().map(|_| ()).map_err(|error| anyhow::anyhow!("{error:#}")),
                )?;
                load = started.ok();
            }
            Order::Measure(window) => {
                let load = load.as_ref().context("There is no load");
                answer(&load.and_then(|load: &Load| load.measure(window)))?;
            }
            Order::Beside(spec) => answer(&beside::measure(&device, spec))?,
            Order::Pauses(pause, count) => answer(&solo::trips_after(&device, pause, count))?,
            Order::Trouble(trouble, time) => answer(&trouble::make(&device, trouble, time))?,
        }
    }
    Ok(())
}

fn answer<T: Serialize>(result: &Result<T>) -> Result<()> {
    let result = result.as_ref().map_err(|error| format!("{error:#}"));
    let mut line = serde_json::to_string(&result)?;
    line.push('\n');
    std::io::stdout().write_all(line.as_bytes())?;
    Ok(std::io::stdout().flush()?)
}

/// The other side: a running tenant, ended when dropped.
#[derive(Debug)]
pub struct Tenant {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Tenant {
    /// Starts one, and waits until it has the GPU.
    pub fn start(
        kind: GpuKind,
        cubin: &std::path::Path,
        socket: Option<PathBuf>,
        ram: u64,
    ) -> Result<Self> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("--parent").arg(kind.name()).arg("--cubin").arg(cubin);
        command.arg("tenant").arg("--ram").arg(ram.to_string());
        if let Some(socket) = socket {
            command.arg("--socket").arg(socket);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().context("No standard output")?);
        let mut tenant = Self { child, orders, answers };
        tenant.hear::<String>().context("A tenant does not get the GPU")?;
        Ok(tenant)
    }

    /// Tells it something, and does not wait.
    pub fn tell(&mut self, order: &Order) -> Result<()> {
        let mut line = serde_json::to_string(order)?;
        line.push('\n');
        let orders = self.orders.as_mut().context("The tenant has been dismissed")?;
        orders.write_all(line.as_bytes()).context("A tenant has ended")
    }

    /// Waits for its next answer.
    pub fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("A tenant has ended");
        }
        serde_json::from_str::<std::result::Result<T, String>>(&line)?.map_err(anyhow::Error::msg)
    }

    /// Does every job, and says how each went.
    pub fn jobs(&mut self) -> Result<Vec<(String, Result<String, String>)>> {
        self.tell(&Order::Jobs)?;
        self.hear()
    }

    /// Nanoseconds that 1000 iterations of a spin's thread take.
    pub fn calibrate(&mut self) -> Result<f64> {
        self.tell(&Order::Calibrate)?;
        self.hear()
    }

    /// Measures alone.
    pub fn solo(&mut self, spec: &SoloSpec) -> Result<Solo> {
        self.tell(&Order::Solo(spec.clone()))?;
        self.hear()
    }

    /// Microseconds of one launch.
    pub fn kernels(&mut self, spec: KernelSpec) -> Result<f64> {
        self.tell(&Order::Kernels(spec))?;
        self.hear()
    }

    /// Begins a load, and waits until it runs.
    pub fn load(&mut self, spec: LoadSpec) -> Result<()> {
        self.tell(&Order::Load(spec))?;
        self.hear()
    }
}

/// What all of them did in the same time.
pub fn measure(tenants: &mut [Tenant], window: Duration) -> Result<Vec<Progress>> {
    for tenant in tenants.iter_mut() {
        tenant.tell(&Order::Measure(window))?;
    }
    tenants.iter_mut().map(Tenant::hear).collect()
}

impl Drop for Tenant {
    fn drop(&mut self) {
        // It ends when nobody tells it anything any more; one that cannot is killed.
        drop(self.orders.take());
        for _ in 0..200 {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
