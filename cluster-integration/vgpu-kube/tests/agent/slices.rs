//! What is published, and how often.

use std::time::Duration;

use anyhow::{Context, Result};
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::kill_process;
use tokio::sync::watch;
use vgpu_kube::dra::cluster::Cluster;
use vgpu_kube::dra::publisher::{Publisher, slice_name};
use vgpu_kube::dra::slices::Gpu;
use vgpu_kube::metrics::Metrics;

use crate::apiserver::ApiServer;
use crate::bed::{Bed, SLICE, SLICES, eventually};

fn capacity(slice: &Value, name: &str) -> String {
    let value = &slice["spec"]["devices"][0]["capacity"][name]["value"];
    value.as_str().unwrap_or_default().to_owned()
}

#[tokio::test]
async fn the_slice_says_what_the_gpu_has_left() -> Result<()> {
    let bed = Bed::start(&["--dra"])?;
    eventually("the slice", async || bed.api.get(SLICE).is_some()).await?;
    let slice = bed.api.get(SLICE).unwrap();
    assert_eq!(slice["spec"]["nodeName"], "n1");
    assert_eq!(
        slice["spec"]["pool"],
        json!({"name": "n1", "generation": 1, "resourceSliceCount": 1})
    );
    assert_eq!(slice["metadata"]["ownerReferences"][0]["uid"], "node-uid");
    let device = &slice["spec"]["devices"][0];
    assert_eq!(
        (&device["name"], &device["allowMultipleAllocations"]),
        (&json!("soft0"), &json!(true))
    );
    assert_eq!((capacity(&slice, "core"), capacity(&slice, "vram")), ("100".into(), "2Gi".into()));

    // A claim's vGPU changes nothing: the scheduler counts it.
    let claim = bed.put_claim("c1", 30, "256Mi", &Value::Null);
    assert_eq!(bed.prepare(&claim).await?.error, "");
    // An operator's does.
    let own = json!({"mdev_type": "SOFT-512MC", "attrs": [{"core": "20"}], "run": true});
    let own = bed.vgpud.create(&own)?;
    let has = |core: &str, vram: &str| {
        let slice = bed.api.get(SLICE).unwrap_or_default();
        capacity(&slice, "core") == core && capacity(&slice, "vram") == vram
    };
    eventually("less to share", async || has("80", "1536Mi")).await?;
    assert_eq!(bed.api.get(SLICE).unwrap()["spec"]["pool"]["generation"], 2);
    bed.vgpud.call("POST", &format!("/v1/vgpus/{own}/stop"), None)?;
    eventually("all to share", async || has("100", "2Gi")).await?;

    // Kubelet removes the slices of a driver that was away.
    bed.api.delete(SLICE);
    eventually("the slice again", async || bed.api.get(SLICE).is_some()).await?;
    assert_eq!(bed.api.requests(&format!("PUT {SLICES}")), 2);
    assert_eq!(bed.api.requests(&format!("POST {SLICES}")), 2);
    Ok(())
}

#[tokio::test]
async fn a_lost_gpu_is_tainted_and_its_claims_are_told() -> Result<()> {
    let bed = Bed::start(&["--dra"])?;
    let claim = bed.put_claim("c1", 30, "256Mi", &Value::Null);
    assert_eq!(bed.prepare(&claim).await?.error, "");
    eventually("the slice", async || bed.api.get(SLICE).is_some()).await?;
    let tainted = || {
        let slice = bed.api.get(SLICE).unwrap_or_default();
        slice["spec"]["devices"][0]["taints"][0]["effect"] == "NoExecute"
    };
    // The manager starts a GPU process that ends again, with growing pauses.
    eventually("a taint", async || {
        if let Ok(pid) = bed.vgpud.gpu_process() {
            let _ = kill_process(pid, Signal::SIGKILL);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
        tainted()
    })
    .await?;
    eventually("no taint", async || !tainted()).await?;
    // The vGPU continues with the next GPU process. It is lost with its context.
    let uuid = bed.vgpus()?[0]["uuid"].as_str().context("a vGPU")?.to_owned();
    kill_process(bed.vgpud.context(&uuid)?, Signal::SIGKILL)?;
    let events = "/apis/events.k8s.io/v1/namespaces/ns/events";
    eventually("an event", async || {
        let failed = |event: &Value| event["note"].to_string().contains("has failed");
        bed.api.list(events).iter().any(failed)
    })
    .await?;
    eventually("a condition", async || {
        let [status, reason, message] = bed.condition("c1").unwrap_or_default();
        (status.as_str(), reason.as_str()) == ("False", "VgpuFailed")
            && message.contains("delete the pod, so that it gets another vGPU")
    })
    .await?;
    Ok(())
}

fn gpu(core: u8) -> Gpu {
    let [parent, model, backend] = ["soft0", "SOFT", "soft"].map(str::to_owned);
    Gpu {
        parent,
        model,
        backend,
        display: true,
        programs: true,
        core,
        vram_bytes: 8 << 30,
        taint: None,
    }
}

/// Starts the publisher of a simulated node.
async fn publish(api: &ApiServer, node: &str) -> Result<watch::Sender<Vec<Gpu>>> {
    let dir = tempfile::tempdir()?;
    let file = Kubeconfig::read_from(api.kubeconfig(dir.path())?)?;
    let config = Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    let cluster = Cluster::new(kube::Client::try_from(config)?, node);
    let (sender, gpus) = watch::channel(vec![gpu(100)]);
    let metrics = Metrics::new()?;
    let publisher =
        Publisher { node: node.to_owned(), cluster, gpus, metrics, stores_taints: true };
    tokio::spawn(publisher.run());
    Ok(sender)
}

#[tokio::test]
async fn a_thousand_changes_on_a_hundred_nodes_cost_a_write_each_at_most() -> Result<()> {
    const NODES: usize = 100;
    const CHANGES: u8 = 10;
    let api = ApiServer::start()?;
    let mut nodes = Vec::new();
    for number in 0..NODES {
        nodes.push(publish(&api, &format!("node{number}")).await?);
    }
    let core_of = |number: usize| {
        let name = slice_name(&format!("node{number}"));
        capacity(&api.get(&format!("{SLICES}/{name}")).unwrap_or_default(), "core")
    };
    let all_have = |core: String| (0..NODES).all(|number| core_of(number) == core);
    eventually("all slices", async || all_have("100".into())).await?;
    // A list and a watch of the own slice, the node as its owner, and the slice.
    let after_start = NODES * 4;
    eventually("all watches", async || api.requests("") == after_start).await?;
    for change in 1..=CHANGES {
        for node in &nodes {
            node.send(vec![gpu(100 - change)])?;
        }
        eventually("all slices", async || all_have((100 - change).to_string())).await?;
        for node in &nodes {
            // The same again is no change.
            node.send(vec![gpu(100 - change)])?;
        }
    }
    let writes = api.requests(&format!("PUT {SLICES}"));
    assert_eq!(writes, NODES * usize::from(CHANGES));
    let idle = api.requests("");
    assert_eq!(idle, after_start + writes, "nothing but the writes");
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!(api.requests(""), idle, "no request without a change");
    Ok(())
}

#[tokio::test]
async fn a_cluster_that_shares_no_devices_gets_none() -> Result<()> {
    let api = ApiServer::start()?;
    api.drop_member("allowMultipleAllocations");
    let _node = publish(&api, "n1").await?;
    eventually("an attempt", async || api.requests(&format!("DELETE {SLICES}")) == 1).await?;
    assert_eq!(api.list(SLICES), Vec::<Value>::new());
    let events = "/apis/events.k8s.io/v1/namespaces/default/events";
    eventually("an event", async || !api.list(events).is_empty()).await?;
    let note = api.list(events)[0]["note"].to_string();
    assert!(
        note.contains("The cluster shares no devices: it dropped allowMultipleAllocations"),
        "{note}"
    );
    Ok(())
}
