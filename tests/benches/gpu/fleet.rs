//! vGPUs of a real daemon, each used by a tenant process.

use std::path::Path;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::{Vgpud, kill_process};

use crate::diary::Diary;
use crate::tenant::Tenant;
use crate::{GpuKind, SMALL_RAM};

/// Type of a tenant's vGPU: 1 GiB of video memory.
pub const TYPE: &str = "-1C";

/// A daemon and its tenants, dropped in this order.
#[derive(Debug)]
pub struct Fleet {
    /// The tenants.
    pub tenants: Vec<Tenant>,
    uuids: Vec<String>,
    vgpud: Vgpud,
}

impl Fleet {
    /// Starts a vGPU with a tenant for each set of attributes; the parent has `options`. The last
    /// tenant has `ram` MiB, others have [`SMALL_RAM`] if that is less: the first use of a guest's
    /// memory imports all of it.
    pub fn start(
        kind: GpuKind,
        options: &str,
        cubin: &Path,
        ram: u64,
        attrs: &[Value],
    ) -> Result<Self> {
        let parent = format!("{}{options}", kind.argument());
        let vgpud = Vgpud::start_with(&["--parent", &parent])?;
        let mdev_type = mdev_type(&vgpud, TYPE)?;
        let mut fleet = Self { tenants: Vec::new(), uuids: Vec::new(), vgpud };
        for (index, attributes) in attrs.iter().enumerate() {
            let ram = if index + 1 == attrs.len() { ram } else { ram.min(SMALL_RAM) };
            let request = json!({ "mdev_type": mdev_type, "attrs": attributes, "run": true });
            let uuid = fleet.vgpud.create(&request)?;
            let socket = fleet.vgpud.vfio_socket(&uuid);
            fleet.tenants.push(Tenant::start(kind, cubin, Some(socket), ram)?);
            fleet.uuids.push(uuid);
        }
        Ok(fleet)
    }

    /// Kills a vGPU's worker.
    pub fn kill(&self, index: usize) -> Result<()> {
        let pid = self.vgpud.show(&self.uuids[index])?["pid"].as_u64();
        kill_process(u32::try_from(pid.context("No worker")?)?, Signal::SIGKILL)
    }

    /// Returns the identity of a vGPU.
    pub fn uuid(&self, index: usize) -> &str {
        &self.uuids[index]
    }

    /// Returns the CPU time of a vGPU's worker in seconds.
    pub fn processor_time(&self, index: usize) -> Result<f64> {
        let pid = self.vgpud.show(&self.uuids[index])?["pid"].as_u64().context("No worker")?;
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // Fields 14 and 15, in hundredths of a second; two fields precede the end of the name.
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let ticks: Vec<f64> = fields.skip(11).take(2).filter_map(|one| one.parse().ok()).collect();
        Ok(ticks.iter().sum::<f64>() / 100.0)
    }

    /// Returns the engine time of each vGPU in seconds.
    pub fn used(&self) -> Result<Vec<f64>> {
        let all = self.diary().stats()?;
        let of = |one: &Value| Ok(one["engine_ns"].as_f64().context("No statistics")? / 1e9);
        all.iter().map(of).collect()
    }

    /// Returns the daemon's statistics.
    pub fn diary(&self) -> Diary<'_> {
        Diary { vgpud: &self.vgpud, uuids: &self.uuids }
    }

    /// Returns the tenants and the source of statistics.
    pub fn parts(&mut self) -> (&mut [Tenant], Diary<'_>) {
        (&mut self.tenants, Diary { vgpud: &self.vgpud, uuids: &self.uuids })
    }
}

/// Returns the number of vGPUs of a tenant's type that fit on the GPU.
pub fn instances(kind: GpuKind, options: &str) -> Result<usize> {
    let vgpud = Vgpud::start_with(&["--parent", &format!("{}{options}", kind.argument())])?;
    let name = mdev_type(&vgpud, TYPE)?;
    let parents = vgpud.get("/v1/types")?;
    let types = parents.as_array().into_iter().flatten();
    let mut types = types.flat_map(|parent| parent["types"].as_array().into_iter().flatten());
    let found = types.find(|one| one["name"] == name.as_str());
    let fit = found.and_then(|one| one["max_instances"].as_u64()).context("No such type")?;
    Ok(usize::try_from(fit)?)
}

/// Returns the type with this suffix: its video memory in GiB, and `C` for no display.
pub fn mdev_type(vgpud: &Vgpud, suffix: &str) -> Result<String> {
    let parents = vgpud.get("/v1/types")?;
    let types = parents.as_array().into_iter().flatten();
    let types = types.flat_map(|parent| parent["types"].as_array().cloned().unwrap_or_default());
    let names: Vec<String> =
        types.filter_map(|one| Some(one["name"].as_str()?.to_owned())).collect();
    let found = names.iter().find(|name| name.ends_with(suffix));
    Ok(found.with_context(|| format!("No type {suffix} among {}", names.join(", ")))?.clone())
}
