//! Pods that ask the device plugin for a vGPU.

use std::time::Instant;

use anyhow::{Context, Result, ensure};
use lab::kube::cluster::NODE;

use crate::lab_cluster::{LabCluster, RESOURCE, ROOM};
use crate::pods::{Pod, Pods, Size, USER};

#[test]
#[ignore = "runs a Kubernetes cluster"]
fn pods_compute_on_vgpus_and_reach_nothing_else() -> Result<()> {
    let Some(lab) = LabCluster::start()? else { return Ok(()) };
    println!("cluster ready in {:.1} s", lab.cluster.start_time.as_secs_f64());
    compute_and_reach_nothing_else(&lab.pods())?;
    // As before, with the user that the agent gives all vGPUs to, and with another one.
    let pods = lab.pods();
    pods.run(&Pod {
        user: USER,
        ..Pod::new("forger", "cannot_get_around_its_vgpu", Size::Quarter)
    })?;
    pods.run(&Pod { user: USER, ..Pod::without_vgpu("without", "sees_no_gpu") })?;
    pods.run(&Pod { user: 2000, ..Pod::new("stranger", "is_refused", Size::Quarter) })?;
    lab.wait_until_nothing_is_left()
}

/// Checks that pods of root compute on vGPUs of their own, and that nothing leads them to another
/// one or around theirs.
pub fn compute_and_reach_nothing_else(pods: &Pods<'_>) -> Result<()> {
    for name in ["first", "second"] {
        let begun = Instant::now();
        pods.start(&Pod::new(name, "computes", Size::Quarter))?;
        pods.wait_for_line(name, "device ")?;
        println!(
            "{name} has a context {:.1} s after it was asked for",
            begun.elapsed().as_secs_f64()
        );
        pods.work(name)?;
    }
    let output = pods.run(&Pod::new("third", "copies", Size::Quarter))?;
    ensure!(output.contains("device Tessera "), "{output}");
    pods.run(&Pod::without_vgpu("root-without", "sees_no_gpu"))?;
    pods.run(&Pod::new("root", "cannot_get_around_its_vgpu", Size::Quarter))?;
    for name in ["first", "second"] {
        ensure!(pods.phase(name)? == "Running", "{name} has ended: {}", pods.log(name)?);
        pods.delete(name)?;
    }
    Ok(())
}

#[test]
#[ignore = "runs a Kubernetes cluster"]
fn a_pod_waits_while_the_gpu_has_no_room() -> Result<()> {
    let Some(lab) = LabCluster::start()? else { return Ok(()) };
    let pods = lab.pods();
    let names: Vec<_> = (0..ROOM).map(|index| format!("full-{index}")).collect();
    for name in &names {
        pods.start(&Pod::new(name, "computes", Size::Quarter))?;
    }
    for name in &names {
        pods.wait_for_phase(name, &["Running"])?;
    }
    pods.start(&Pod::new("late", "copies", Size::Quarter))?;
    lab.cluster.node().wait_for("the scheduler says why", || {
        let pod = lab.cluster.kubectl().get(&["pod", "late"])?;
        Ok(pod["status"]["conditions"][0]["message"]
            .as_str()
            .is_some_and(|message| message.contains(&format!("Insufficient {RESOURCE}"))))
    })?;
    pods.delete(&names[0])?;
    let phase = pods.wait_for_phase("late", &["Succeeded", "Failed"])?;
    ensure!(phase == "Succeeded", "{}", pods.log("late")?);
    for name in names.iter().skip(1).map(String::as_str).chain(["late"]) {
        pods.delete(name)?;
    }
    let node = lab.cluster.kubectl().get(&["node", NODE])?;
    let text = node["status"]["allocatable"][RESOURCE].as_str().context("No resource")?;
    ensure!(text.parse() == Ok(ROOM), "{text}");
    lab.wait_until_nothing_is_left()
}
