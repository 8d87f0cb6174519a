//! Resource claims: published at the real apiserver, prepared by kubelet's calls, and given to the
//! real containerd by their files of the Container Device Interface.
//!
//! The lab's scheduler and kubelet are too old for claims. The tests allocate a claim as a
//! scheduler would, and call the driver and containerd as a kubelet would.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use lab::kube::cluster::NODE;
use serde_json::{Value, json};
use vgpu_kube::grpc;
use vgpu_kube::proto::dra::v1;

use crate::cri::{Container, Runtime};
use crate::inside::{MARK, SECONDS};
use crate::lab_cluster::{LabCluster, TEST_IMAGE};

/// The lab's apiserver does not keep a pod's claims. The driver thus finds no container that names
/// a user, and gives the vGPU to root.
const ROOT: u32 = 0;
const DRIVER: &str = "gpu.tessera.dev";
const SOCKET: &str = "/var/lib/kubelet/plugins/gpu.tessera.dev/dra.sock";
const CONTAINERD: &str = "/run/containerd/containerd.sock";
/// Seconds for which containers compute.
const MEASURED: &str = "8";
/// Largest difference between a claim's share and the share measured, in points.
const MARGIN: f64 = 2.0;

/// A claim of the apiserver, allocated to this node's GPU.
fn allocate(lab: &LabCluster, name: &str, core: u32, mode: &str) -> Result<v1::Claim> {
    let kubectl = lab.cluster.kubectl();
    let container = json!({ "name": "main", "image": TEST_IMAGE });
    kubectl.apply(&json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": { "name": name },
        "spec": {
            "schedulerName": "none",
            "containers": [container], "automountServiceAccountToken": false,
        },
    }))?;
    let pod = kubectl.get(&["pod", name])?;
    let claim = json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": { "name": name },
        "spec": { "devices": { "requests": [{ "name": "vgpu" }] } },
    });
    kubectl.apply(&claim)?;
    let share = json!({
        "driver": DRIVER, "pool": NODE, "device": "soft0", "request": "vgpu",
        "shareID": format!("share-{name}"),
        "consumedCapacity": { "core": core.to_string(), "vram": "2Gi" },
    });
    let opaque = json!({ "driver": DRIVER, "parameters": {
        "apiVersion": "gpu.tessera.dev/v1alpha1", "kind": "VgpuConfig", "mode": mode,
    }});
    let config = json!({ "source": "FromClaim", "opaque": opaque });
    let status = json!({ "status": {
        "allocation": { "devices": { "results": [share], "config": [config] } },
        "reservedFor": [{ "resource": "pods", "name": name, "uid": pod["metadata"]["uid"] }],
    }});
    let plural = "resourceclaims.resource.k8s.io";
    let patch = status.to_string();
    kubectl.run(&["patch", plural, name, "--subresource=status", "--type=merge", "-p", &patch])?;
    let claim = kubectl.get(&[plural, name])?;
    let uid = claim["metadata"]["uid"].as_str().context("A claim without uid")?;
    Ok(v1::Claim { namespace: "default".into(), name: name.into(), uid: uid.into() })
}

/// Prepares a claim, as kubelet does, and returns its device for the container runtime.
async fn prepare(lab: &LabCluster, claim: &v1::Claim) -> Result<Vec<String>> {
    let channel = grpc::connect(&lab.cluster.node().path(SOCKET)).await?;
    let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
    let request = v1::NodePrepareResourcesRequest { claims: vec![claim.clone()] };
    let mut answer = client.node_prepare_resources(request).await?.into_inner();
    let prepared = answer.claims.remove(&claim.uid).context("No answer for the claim")?;
    ensure!(prepared.error.is_empty(), "{}", prepared.error);
    Ok(prepared.devices.into_iter().flat_map(|device| device.cdi_device_ids).collect())
}

async fn unprepare(lab: &LabCluster, claim: &v1::Claim) -> Result<()> {
    let channel = grpc::connect(&lab.cluster.node().path(SOCKET)).await?;
    let mut client = v1::dra_plugin_client::DraPluginClient::new(channel);
    let request = v1::NodeUnprepareResourcesRequest { claims: vec![claim.clone()] };
    let mut answer = client.node_unprepare_resources(request).await?.into_inner();
    let error = answer.claims.remove(&claim.uid).context("No answer for the claim")?.error;
    ensure!(error.is_empty(), "{error}");
    Ok(())
}

/// Runs one of [`crate::inside`] in a container with these devices, and returns its output. It must
/// succeed.
async fn run(lab: &LabCluster, name: &str, program: &str, devices: &[String]) -> Result<String> {
    let node = lab.cluster.node();
    let runtime = Runtime::connect(&node.path(CONTAINERD)).await?;
    let test = format!("inside::{program}");
    let command = ["/program", "--exact", &test, "--ignored", "--nocapture"];
    let container = Container {
        name,
        image: TEST_IMAGE,
        command: &command,
        variables: &[(MARK, "1"), (SECONDS, MEASURED)],
        user: ROOT,
        devices,
    };
    let logs = format!("/var/log/cri/{name}");
    std::fs::create_dir_all(node.path(&logs))?;
    let status = runtime.run(&container, &logs).await?;
    let output = node.read(&format!("{logs}/main.log"));
    ensure!(status == 0 && output.contains("1 passed"), "{name}: {status}: {output}");
    Ok(output)
}

#[tokio::test]
#[ignore = "runs a Kubernetes cluster"]
async fn containers_get_the_vgpus_and_shares_of_their_claims() -> Result<()> {
    let Some(lab) = LabCluster::start()? else { return Ok(()) };
    lab.cluster
        .node()
        .wait_for("the driver listens", || Ok(lab.cluster.node().path(SOCKET).exists()))?;
    published(&lab)?;

    let (most, rest) = (allocate(&lab, "most", 70, "soft")?, allocate(&lab, "rest", 30, "soft")?);
    let (first, second) = (prepare(&lab, &most).await?, prepare(&lab, &rest).await?);
    ensure!(first.len() == 1 && second.len() == 1 && first != second, "{first:?} {second:?}");
    let again = prepare(&lab, &most).await?;
    ensure!(again == first, "Prepared again, the claim has {again:?} instead of {first:?}");
    is_ready(&lab, "most")?;

    // The test is the kubelet now: the real one ends containers of pods that it does not know.
    lab.cluster.node().kill_service("kubelet")?;
    run(&lab, "around", "cannot_get_around_its_vgpu", &first).await?;
    run(&lab, "without", "sees_no_gpu", &[]).await?;
    let share = measure(&lab, ["most", "rest"], &first, &second).await?;
    ensure!((share - 70.0).abs() <= MARGIN, "claims of 70 and 30: {share:.1} %");
    for claim in [&most, &rest] {
        unprepare(&lab, claim).await?;
        unprepare(&lab, claim).await?;
    }

    // With mode hard, a claim does not get more although the GPU has time left.
    let (capped, open) =
        (allocate(&lab, "capped", 30, "hard")?, allocate(&lab, "open", 30, "soft")?);
    let (first, second) = (prepare(&lab, &capped).await?, prepare(&lab, &open).await?);
    let share = measure(&lab, ["capped", "open"], &first, &second).await?;
    ensure!((share - 30.0).abs() <= MARGIN, "hard 30 beside soft 30: {share:.1} %");
    for claim in [&capped, &open] {
        unprepare(&lab, claim).await?;
    }
    lab.wait_until_nothing_is_left()
}

/// Lets two containers with these names compute. Returns the first one's part of the work in
/// percent.
async fn measure(
    lab: &LabCluster,
    names: [&str; 2],
    one: &[String],
    other: &[String],
) -> Result<f64> {
    let (first, second) = tokio::try_join!(
        run(lab, names[0], "computes", one),
        run(lab, names[1], "computes", other)
    )?;
    let share = share_of_first(&first, &second).with_context(|| format!("{first}\n{second}"))?;
    println!("{} beside {}: {share:.1} %", names[0], names[1]);
    Ok(share)
}

/// Checks the condition of a claim's device at the apiserver.
fn is_ready(lab: &LabCluster, name: &str) -> Result<()> {
    let claim = lab.cluster.kubectl().get(&["resourceclaims.resource.k8s.io", name])?;
    let device = &claim["status"]["devices"][0];
    let condition = &device["conditions"][0];
    let is_ready = condition["type"] == "Ready" && condition["status"] == "True";
    ensure!(is_ready && device["shareID"] == format!("share-{name}"), "{}", claim["status"]);
    let message = condition["message"].as_str().unwrap_or_default();
    ensure!(message.starts_with("vGPU ") && message.ends_with(" runs"), "{message}");
    Ok(())
}

/// Checks that the node's GPU is published at the apiserver, also after the slice was deleted.
fn published(lab: &LabCluster) -> Result<()> {
    let kubectl = lab.cluster.kubectl();
    let slice = || -> Result<Option<Value>> {
        let all = kubectl.get(&["resourceslices.resource.k8s.io"])?;
        let slices = all["items"].as_array().cloned().unwrap_or_default();
        Ok(slices.into_iter().find(|slice| slice["spec"]["driver"] == DRIVER))
    };
    let node = lab.cluster.node();
    node.wait_for("the slice is published", || Ok(slice()?.is_some()))?;
    let found = slice()?.context("No slice")?;
    let device = &found["spec"]["devices"][0];
    ensure!(found["spec"]["nodeName"] == NODE && device["name"] == "soft0", "{found}");
    ensure!(device["allowMultipleAllocations"] == true, "{device}");
    ensure!(device["capacity"]["core"]["value"] == "100", "{device}");
    let uid = found["metadata"]["uid"].clone();
    kubectl.run(&["delete", "resourceslices.resource.k8s.io", "--all"])?;
    node.wait_for("the slice is published again", || {
        Ok(slice()?.is_some_and(|slice| slice["metadata"]["uid"] != uid))
    })
}

/// Returns the first container's part of the work of both, in percent, while both worked.
///
/// A line of a log begins with its time: `2026-11-25T16:02:10.123456789Z stdout F round 7 0.912`.
fn share_of_first(first: &str, second: &str) -> Result<f64> {
    /// Time after the start of the second, in which both reach their shares.
    const SETTLE: Duration = Duration::from_millis(1500);
    let rounds = |log: &str| -> Vec<(f64, f64)> {
        let lines = log.lines().filter_map(|line| {
            let (time, line) = line.split_once(' ')?;
            let mut words = line.strip_prefix("stdout F round ")?.split(' ');
            Some((seconds(time)?, words.next()?.parse().ok()?))
        });
        lines.collect()
    };
    let both = [rounds(first), rounds(second)];
    let ends = both.iter().map(|rounds| Some((rounds.first()?.0, rounds.last()?.0)));
    let ends = ends.collect::<Option<Vec<_>>>().context("No rounds")?;
    let begin = ends[0].0.max(ends[1].0) + SETTLE.as_secs_f64();
    let end = ends[0].1.min(ends[1].1);
    let rates = both.iter().map(|rounds| {
        let mut meanwhile = rounds.iter().filter(|(time, _)| (begin..=end).contains(time));
        let first = meanwhile.next()?;
        let last = meanwhile.next_back()?;
        Some((last.1 - first.1) / (last.0 - first.0))
    });
    let rates = rates.collect::<Option<Vec<_>>>().context("Too few rounds at the same time")?;
    Ok(rates[0] * 100.0 / (rates[0] + rates[1]))
}

/// Returns the second of the day of a time such as `2026-11-25T16:02:10.123456789Z`.
fn seconds(time: &str) -> Option<f64> {
    let clock = time.split_once('T')?.1.trim_end_matches('Z');
    let numbers: Vec<f64> = clock.split(':').map_while(|word| word.parse().ok()).collect();
    let [hours, minutes, seconds] = numbers[..] else { return None };
    Some((hours * 60.0 + minutes) * 60.0 + seconds)
}
