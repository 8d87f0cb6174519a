//! A VM with a CUDA program that is saved and restored, and gets new QEMUs.

use std::path::Path;

use anyhow::{Context, Result};

use super::files::{CHECKPOINT, LIBRARIES, Needs};
use super::{Cuda, LIMIT, Options, VGPUS, command};
use crate::Lab;
use crate::build::Programs;
use crate::demo::live::Live;
use crate::progress::Progress;

/// Saves, restores and upgrades a VM some times, in which a CUDA program checks its memory all the
/// time, and prints the figures.
pub(super) fn run(
    lab: &Lab,
    programs: &Programs,
    options: &Options,
    (needs, folder): (&Needs, &Path),
    times: u32,
) -> Result<()> {
    let progress = Progress::new();
    let step = progress.step("Booting a VM with NVIDIA's libcuda of this machine");
    let cuda = Cuda::boot(lab, programs, options, needs, folder, &VGPUS[..1])?;
    let Cuda { lab, host, mut vms, mut specs, mdev_type, .. } = cuda;
    let (mut vm, spec) = vms.pop().zip(specs.pop()).context("There is no VM")?;
    step.done();
    let step = progress.step("Starting a CUDA program and the agent for checkpoints in it");
    let agent = format!(
        "mkdir -p /run; \
         LD_LIBRARY_PATH=/{LIBRARIES} vgpu-guest agent --tool /{CHECKPOINT} > /tmp/agent 2>&1 & \
         until grep -q Waiting /tmp/agent; do kill -0 $! || {{ cat /tmp/agent >&2; exit 1; }}; \
         sleep 0.1; done"
    );
    vm.guest.run(&agent, LIMIT)?.success()?;
    // Each round is a job that was done. The program ends when one is wrong.
    let rounds = command("rounds /tmp/stop");
    let work = format!(
        "{{ {rounds} > /tmp/done 2> /tmp/bad; echo ended $? >> /tmp/bad; }} & \
         until [ -s /tmp/done ]; do [ -s /tmp/bad ] && {{ cat /tmp/bad >&2; exit 1; }}; \
         sleep 0.1; done"
    );
    vm.guest.run(&work, LIMIT)?.success()?;
    step.done();
    let place = (&lab, programs, options.parent);
    Live::of(place, mdev_type, spec, (host, vm), folder)?.repeat(times, &progress)
}
