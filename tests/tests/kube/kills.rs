//! Deaths of every process: pods go on, and nothing is left of those that end.

use anyhow::{Context, Result, bail, ensure};
use lab::kube::KILLS_VARIABLE;

use crate::lab_cluster::{LabCluster, ROOM};
use crate::pods::{Pod, Size};

/// Deaths of each process in the ordinary run of tests.
const KILLS: u32 = 2;
/// Pod that must compute on through all deaths of others.
const STEADY: &str = "steady";

/// Returns the number of deaths of each process.
fn kills() -> Result<u32> {
    match std::env::var(KILLS_VARIABLE) {
        Ok(text) => text.parse().with_context(|| format!("{KILLS_VARIABLE}={text}")),
        Err(_) => Ok(KILLS),
    }
}

#[test]
#[ignore = "runs a Kubernetes cluster"]
fn pods_survive_the_deaths_of_all_other_processes() -> Result<()> {
    let Some(lab) = LabCluster::start()? else { return Ok(()) };
    let pods = lab.pods();
    pods.start(&Pod::new(STEADY, "computes", Size::Quarter))?;
    pods.work(STEADY)?;
    for name in ["vgpu-kube", "vgpud", "kubelet", "containerd"] {
        for kill in 0..kills()? {
            die_and_check(&lab, name).with_context(|| format!("death {kill} of {name}"))?;
        }
    }
    for kill in 0..kills()? {
        worker_dies(&lab).with_context(|| format!("death {kill} of a worker"))?;
        pod_dies(&lab).with_context(|| format!("death {kill} of a pod"))?;
    }
    ensure!(pods.phase(STEADY)? == "Running", "{}", pods.log(STEADY)?);
    pods.delete(STEADY)?;
    lab.wait_until_nothing_is_left()
}

/// Kills a service and starts it again. The steady pod goes on meanwhile, and afterwards a new pod
/// gets a vGPU, of which nothing is left.
fn die_and_check(lab: &LabCluster, name: &str) -> Result<()> {
    let (before, registrations) = (lab.pods().work(STEADY)?, lab.registrations());
    lab.cluster.node().kill_service(name)?;
    match name {
        "vgpud" => lab.start_vgpud()?,
        "vgpu-kube" => lab.start_agent()?,
        _ => lab.cluster.start_service(name)?,
    }
    if name == "kubelet" || name == "containerd" {
        lab.cluster.wait_until_ready()?;
    }
    if name == "kubelet" || name == "vgpu-kube" {
        lab.wait_for_registration(registrations)?;
    }
    lab.wait_for_room(ROOM)?;
    let pods = lab.pods();
    pods.run(&Pod::new("next", "copies", Size::Quarter))?;
    goes_on(lab, before.0)?;
    lab.wait_until_left(1)
}

/// Checks that the steady pod works on after these rounds.
fn goes_on(lab: &LabCluster, rounds: u64) -> Result<()> {
    let pods = lab.pods();
    let node = lab.cluster.node();
    let goes_on = node.wait_for("the steady pod works on", || {
        ensure!(pods.phase(STEADY)? == "Running", "The steady pod: {}", pods.log(STEADY)?);
        Ok(pods.work(STEADY)?.0 > rounds)
    });
    goes_on.with_context(|| {
        let pod = lab.cluster.kubectl().get(&["pod", STEADY]).unwrap_or_default();
        let logs = ["vgpud", "vgpu-kube", "kubelet"].map(|name| node.log(name)).join("\n");
        format!("{logs}\n{}", pod["status"])
    })
}

/// Kills the worker of a pod: the pod's program may fail, the steady pod goes on, and the next pod
/// gets a vGPU that works.
fn worker_dies(lab: &LabCluster) -> Result<()> {
    let pods = lab.pods();
    let own = uuids(lab)?;
    let before = pods.work(STEADY)?;
    pods.start(&Pod::new("victim", "computes", Size::Quarter))?;
    pods.work("victim")?;
    let vgpus = lab.vgpus()?;
    let new = vgpus.iter().find(|vgpu| !own.iter().any(|uuid| vgpu["uuid"] == uuid.as_str()));
    let Some(worker) = new.and_then(|vgpu| vgpu["pid"].as_u64()) else {
        bail!("The pod's vGPU has no worker: {vgpus:?}");
    };
    lab.cluster.node().sh(&format!("kill -9 {worker}"))?;
    goes_on(lab, before.0)?;
    pods.delete("victim")?;
    pods.run(&Pod::new("next", "copies", Size::Quarter))?;
    lab.wait_until_left(1)
}

/// Kills the program of a pod.
fn pod_dies(lab: &LabCluster) -> Result<()> {
    let pods = lab.pods();
    let before = pods.work(STEADY)?;
    pods.start(&Pod::new("victim", "computes", Size::Quarter))?;
    pods.work("victim")?;
    let pod = lab.cluster.kubectl().get(&["pod", "victim"])?;
    let container = pod["status"]["containerStatuses"][0]["containerID"].as_str();
    let id = container.and_then(|id| id.strip_prefix("containerd://")).context("No container")?;
    lab.cluster.node().sh(&format!("ctr -n k8s.io tasks kill --signal SIGKILL {id}"))?;
    let phase = pods.wait_for_phase("victim", &["Failed", "Succeeded"])?;
    ensure!(phase == "Failed", "{phase}");
    pods.delete("victim")?;
    goes_on(lab, before.0)?;
    lab.wait_until_left(1)
}

/// Returns the UUIDs of the vGPUs that run.
fn uuids(lab: &LabCluster) -> Result<Vec<String>> {
    let all = lab.vgpus()?;
    Ok(all.iter().filter_map(|vgpu| Some(vgpu["uuid"].as_str()?.to_owned())).collect())
}
