//! Prepare and unprepare, by kubelet's calls.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use vgpu_kube::grpc;
use vgpu_kube::proto::dra::{v1, v1beta1};
use vgpu_kube::proto::pluginregistration as registration;

use crate::bed::{Bed, NODE, eventually};

#[tokio::test]
async fn a_claim_gets_its_share_in_a_container() -> Result<()> {
    let bed = Bed::start(&["--dra"])?;
    let config = json!({"mode": "hard", "limits": {"maxChannels": 8}});
    let claim = bed.put_claim("c1", 30, "1280Mi", &config);
    let prepared = bed.prepare(&claim).await?;
    assert_eq!(prepared.error, "");
    let [device] = prepared.devices.as_slice() else { panic!("{prepared:?}") };
    assert_eq!((device.pool_name.as_str(), device.device_name.as_str()), (NODE, "soft0"));
    assert_eq!(device.request_names, ["vgpu"]);

    let vgpus = bed.vgpus()?;
    let [vgpu] = vgpus.as_slice() else { panic!("{vgpus:?}") };
    let uuid = vgpu["uuid"].as_str().unwrap();
    assert_eq!(vgpu["live_type"], "SOFT-1280MC");
    let expected = json!([{"core": "30"}, {"mode": "hard"}, {"max_channels": "8"},
                          {"name": format!("kube-claim-{uuid}")}, {"owner": "1000"}]);
    assert_eq!(vgpu["live_attrs"], expected);
    assert_eq!(device.cdi_device_ids, [format!("gpu.tessera.dev/claim={uuid}")]);
    let file = bed.cdi().join("gpu.tessera.dev-uid-of-c1.json");
    let clients = bed.vgpud.vgpu_dir(uuid).join("clients");
    check_edits(&serde_json::from_slice(&std::fs::read(&file)?)?, &clients);
    let sockets: BTreeSet<_> =
        std::fs::read_dir(&clients)?.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(sockets, ["cuda.sock".into(), "vfio.sock".into()].into());
    assert_eq!(std::fs::metadata(clients.join("cuda.sock"))?.uid(), 1000);

    let says = ["True", "Prepared", &format!("vGPU {uuid} runs")].map(str::to_owned);
    assert_eq!(bed.condition("c1"), Some(says));
    let writes = bed.api.requests("PATCH");

    // Kubelet repeats its calls, in either version.
    let inode = std::fs::metadata(&file)?.ino();
    let mut beta = v1beta1::dra_plugin_client::DraPluginClient::new(bed.dra().await?);
    let request = v1::NodePrepareResourcesRequest { claims: vec![claim.clone()] };
    let again = beta.node_prepare_resources(request).await?.into_inner();
    assert_eq!(again.claims[&claim.uid], prepared);
    assert_eq!(bed.vgpus()?[0]["pid"], vgpu["pid"], "the same worker");
    assert_eq!(std::fs::metadata(&file)?.ino(), inode, "the file is not written again");
    assert_eq!(bed.api.requests("PATCH"), writes, "the condition is not written again");

    for _ in 0..2 {
        assert_eq!(bed.unprepare(&claim).await?, "");
        assert_eq!(bed.left()?, (0, 0, 0));
    }
    // The right to write conditions may be missing: the claim works without.
    bed.api.forbid(Some("/status"));
    let silent = bed.put_claim("silent", 30, "256Mi", &Value::Null);
    assert_eq!(bed.prepare(&silent).await?.error, "");
    assert_eq!(bed.condition("silent"), None);
    Ok(())
}

/// Checks what a container gets: sockets and libraries, read-only, and no device node.
fn check_edits(file: &Value, clients: &Path) {
    assert_eq!(
        (&file["cdiVersion"], &file["kind"]),
        (&json!("0.5.0"), &json!("gpu.tessera.dev/claim"))
    );
    let device = &file["devices"][0]["containerEdits"];
    let members: Vec<_> = device.as_object().into_iter().flat_map(|all| all.keys()).collect();
    assert_eq!(members, ["env", "mounts"], "no device nodes, no hooks");
    assert_eq!(
        device["env"],
        json!([
            "TESSERA_CUDA_SOCKET=/run/tessera/vgpu/cuda.sock",
            "LD_PRELOAD=/usr/lib/tessera/libtessera_cuda.so"
        ])
    );
    let mounts = device["mounts"].as_array().cloned().unwrap_or_default();
    assert_eq!(mounts[0]["hostPath"], json!(clients));
    assert_eq!(mounts[0]["containerPath"], "/run/tessera/vgpu");
    for mount in mounts {
        assert!(mount["options"][0] == "ro", "{mount}");
        assert!(!mount["containerPath"].to_string().starts_with("\"/dev"), "{mount}");
    }
}

#[tokio::test]
async fn a_claim_that_cannot_be_prepared_leaves_nothing_and_says_why() -> Result<()> {
    let bed = Bed::start(&["--dra"])?;
    let forged = bed.put_claim("forged", 30, "256Mi", &json!({"owner": "0"}));
    let said = bed.prepare(&forged).await?.error;
    assert!(said.contains("unknown field `owner`"), "{said}");
    let large = bed.put_claim("large", 30, "4Gi", &Value::Null);
    let said = bed.prepare(&large).await?.error;
    assert!(said.contains("has no type \"SOFT-4C\""), "{said}");
    let condition = ["False".to_owned(), "PrepareFailed".to_owned(), said];
    assert_eq!(bed.condition("large"), Some(condition));
    let gone = v1::Claim { name: "gone".into(), ..large.clone() };
    let said = bed.prepare(&gone).await?.error;
    assert_eq!(said, "There is no claim ns/gone; delete the pod that uses it");
    let odd = v1::Claim { uid: "../x".into(), ..large.clone() };
    let said = bed.prepare(&odd).await?.error;
    assert!(said.ends_with("has other characters than letters, digits and dashes"), "{said}");
    bed.put_claim("elsewhere", 30, "256Mi", &Value::Null);
    let path = crate::bed::claim_path("elsewhere");
    let mut elsewhere = bed.api.get(&path).unwrap();
    elsewhere["status"]["allocation"]["devices"]["results"][0]["device"] = json!("soft9");
    bed.api.put(&path, elsewhere);
    let claim =
        v1::Claim { uid: "uid-of-elsewhere".into(), name: "elsewhere".into(), ..large.clone() };
    let said = bed.prepare(&claim).await?.error;
    assert_eq!(
        said,
        "Node n1 has no GPU soft9 any more; delete the pod, so that it gets another GPU"
    );
    bed.api.forbid(Some("/pods/"));
    let said = bed.prepare(&large).await?.error;
    assert!(
        said.starts_with("The apiserver: ") && said.ends_with("; see `vgpu-kube doctor`"),
        "{said}"
    );
    bed.api.forbid(None);
    assert_eq!(bed.vgpus()?.len(), 0);
    // The first and the second have a record, which kubelet's unprepare removes.
    for claim in [&forged, &large, &gone, &claim] {
        assert_eq!(bed.unprepare(claim).await?, "");
    }
    assert_eq!(bed.left()?, (0, 0, 0));
    let events = "/apis/events.k8s.io/v1/namespaces/ns/events";
    let notes: Vec<_> =
        bed.api.list(events).iter().map(|event| event["note"].to_string()).collect();
    assert!(notes.iter().any(|note| note.contains("unknown field `owner`")), "{notes:?}");
    assert!(notes.iter().all(|note| note.lines().count() == 1));
    Ok(())
}

#[tokio::test]
async fn kubelet_finds_the_driver_by_its_registration() -> Result<()> {
    let bed = Bed::start(&["--dra"])?;
    let socket = bed.kubelet().join("plugins_registry/gpu.tessera.dev-reg.sock");
    for _ in 0..2 {
        // A socket exists shortly before it accepts connections.
        let mut channel = None;
        eventually("the registration", async || {
            channel = grpc::connect(&socket).await.ok();
            channel.is_some()
        })
        .await?;
        let channel = channel.context("No connection")?;
        let mut client = registration::registration_client::RegistrationClient::new(channel);
        let info = client.get_info(registration::InfoRequest {}).await?.into_inner();
        assert_eq!((info.r#type.as_str(), info.name.as_str()), ("DRAPlugin", "gpu.tessera.dev"));
        assert_eq!(info.supported_versions, ["v1.DRAPlugin", "v1beta1.DRAPlugin"]);
        let endpoint = Path::new(&info.endpoint);
        assert!(endpoint.exists(), "{info:?}");
        let status =
            registration::RegistrationStatus { plugin_registered: true, error: String::new() };
        client.notify_registration_status(status).await?;
        // A socket that was removed is made anew.
        std::fs::remove_file(&socket)?;
    }
    Ok(())
}
