//! A process that uses a GPU, as a plain client or through a vGPU. Both follow the same commands,
//! so that differences come from the layers between process and GPU.

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
use system_tests::vfio_user_guest::VfioUserGuest;
use vgpu_guest::device::Device;

use crate::beside::{self, BesideSpec};
use crate::kernels::{self, KernelSpec};
use crate::load::{Load, LoadSpec, Progress, Window};
use crate::paced::{self, RequestSpec};
use crate::plain_client::PlainClient;
use crate::solo::{self, Solo, SoloSpec};
use crate::trouble::{self, Trouble};
use crate::{GpuKind, eviction, jobs, plain_client};

/// Arguments of a tenant process.
#[derive(Clone, Debug, Args)]
pub struct TenantArgs {
    /// A vGPU's socket; without one the tenant opens the GPU itself.
    #[arg(long)]
    socket: Option<PathBuf>,
    /// Guest RAM in MiB.
    #[arg(long)]
    ram: u64,
}

/// Command to a tenant: one line of JSON, answered with one line.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Order {
    /// Run and check every job.
    Jobs,
    /// Measure the duration of a kernel.
    Calibrate,
    /// Measure without other load.
    Solo(SoloSpec),
    /// Launch one kernel many times.
    Kernels(KernelSpec),
    /// Start a load.
    Load(LoadSpec),
    /// Report the load's work in a window that begins now.
    Measure(Duration),
    /// Report the load's work per second in a window.
    Rate(Window),
    /// Submit requests one after the other and report their latencies.
    Requests(RequestSpec),
    /// Create a channel beside a busy one.
    Beside(BesideSpec),
    /// Ring the doorbell repeatedly after pauses of this length.
    Pauses(Duration, usize),
    /// Import so many GiB of guest memory.
    Import(u64),
    /// Misbehave.
    Trouble(Trouble, Duration),
}

/// Runs the tenant's side until its input closes.
pub fn serve(kind: GpuKind, cubin: &std::path::Path, args: &TenantArgs) -> Result<()> {
    let ram = Ram::new(args.ram * MIB, 2 * MIB)?;
    let (device, _plain): (Device, Option<PlainClient>) = match &args.socket {
        Some(socket) => {
            let platform = VfioUserGuest::attach(socket, ram)?;
            (Device::open_with(Box::new(platform), cubin)?, None)
        }
        None => {
            plain_client::open(kind, ram, cubin).map(|(device, plain)| (device, Some(plain)))?
        }
    };
    let mut load = None;
    // Kept until the end.
    let mut imported = None;
    answer(&Ok("ready"))?;
    for line in std::io::stdin().lock().lines() {
        match serde_json::from_str(&line?)? {
            Order::Jobs => answer(&Ok(jobs::run(&device)))?,
            Order::Calibrate => answer(&solo::calibrate(&device))?,
            Order::Solo(spec) => answer(&solo::measure(&device, &spec))?,
            Order::Kernels(spec) => answer(&kernels::measure(&device, &spec))?,
            Order::Load(spec) => {
                // The previous load ends before the next one begins.
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
            Order::Rate(window) => {
                let load = load.as_ref().context("There is no load");
                answer(&load.and_then(|load: &Load| load.rate(window)))?;
            }
            Order::Requests(spec) => answer(&paced::measure(&device, &spec))?,
            Order::Beside(spec) => answer(&beside::measure(&device, spec))?,
            Order::Pauses(pause, count) => answer(&solo::trips_after(&device, pause, count))?,
            Order::Import(gib) => {
                let buffers = eviction::import(&device, gib);
                answer(
                    &buffers.as_ref().map(|_| ()).map_err(|error| anyhow::anyhow!("{error:#}")),
                )?;
                imported = buffers.ok();
            }
            Order::Trouble(trouble, time) => answer(&trouble::make(&device, trouble, time))?,
        }
    }
    drop(imported);
    Ok(())
}

fn answer<T: Serialize>(result: &Result<T>) -> Result<()> {
    let result = result.as_ref().map_err(|error| format!("{error:#}"));
    let mut line = serde_json::to_string(&result)?;
    line.push('\n');
    std::io::stdout().write_all(line.as_bytes())?;
    Ok(std::io::stdout().flush()?)
}

/// A running tenant; ended when dropped.
#[derive(Debug)]
pub struct Tenant {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
}

impl Tenant {
    /// Starts a tenant and waits until it has opened the GPU.
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

    /// Sends a command without waiting.
    pub fn tell(&mut self, order: &Order) -> Result<()> {
        let mut line = serde_json::to_string(order)?;
        line.push('\n');
        let orders = self.orders.as_mut().context("The tenant has been dismissed")?;
        orders.write_all(line.as_bytes()).context("A tenant has ended")
    }

    /// Waits for the next answer.
    pub fn hear<T: DeserializeOwned>(&mut self) -> Result<T> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("A tenant has ended");
        }
        serde_json::from_str::<std::result::Result<T, String>>(&line)?.map_err(anyhow::Error::msg)
    }

    /// Runs every job and returns the results.
    pub fn jobs(&mut self) -> Result<Vec<(String, Result<String, String>)>> {
        self.tell(&Order::Jobs)?;
        self.hear()
    }

    /// Returns the nanoseconds of 1000 iterations of a spin's thread.
    pub fn calibrate(&mut self) -> Result<f64> {
        self.tell(&Order::Calibrate)?;
        self.hear()
    }

    /// Measures without other load.
    pub fn solo(&mut self, spec: &SoloSpec) -> Result<Solo> {
        self.tell(&Order::Solo(spec.clone()))?;
        self.hear()
    }

    /// Returns the time of one launch in microseconds.
    pub fn kernels(&mut self, spec: KernelSpec) -> Result<f64> {
        self.tell(&Order::Kernels(spec))?;
        self.hear()
    }

    /// Starts a load and waits until it runs.
    pub fn load(&mut self, spec: LoadSpec) -> Result<()> {
        self.tell(&Order::Load(spec))?;
        self.hear()
    }
}

/// Returns the work of all tenants in the same window.
pub fn measure(tenants: &mut [Tenant], window: Duration) -> Result<Vec<Progress>> {
    for tenant in tenants.iter_mut() {
        tenant.tell(&Order::Measure(window))?;
    }
    tenants.iter_mut().map(Tenant::hear).collect()
}

/// Returns the work per second of all tenants in the same window, in seconds of kernels.
pub fn rates(tenants: &mut [Tenant], window: Window) -> Result<Vec<f64>> {
    for tenant in tenants.iter_mut() {
        tenant.tell(&Order::Rate(window))?;
    }
    tenants.iter_mut().map(Tenant::hear).collect()
}

impl Drop for Tenant {
    fn drop(&mut self) {
        // The tenant ends when its input closes, or is killed.
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
