//! The other commands: doctor, hook, manifests; and errors of the command line.

use std::process::{Command, Output};

use anyhow::Result;
use vgpu_kube::grpc;
use vgpu_kube::proto::kubevirt::{info, plugins, v1alpha3};

use crate::bed::{Bed, SLICE, eventually};

const DOMAIN: &str = "<domain type='kvm'><name>vm1</name><memory>1</memory>\
    <os><type machine='q35'>hvm</type></os><devices/></domain>";

fn vgpu_kube(args: &[&str]) -> Result<Output> {
    Ok(Command::new(env!("CARGO_BIN_EXE_vgpu-kube")).args(args).output()?)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test]
async fn doctor_checks_node_and_cluster() -> Result<()> {
    let bed = Bed::start(&["--dra"])?;
    std::fs::write(bed.kubelet().join("device-plugins/kubelet.sock"), "")?;
    let kubeconfig = bed.api.kubeconfig(bed.dir.path())?;
    let control = bed.vgpud.api_socket();
    let library = bed.dir.path().join("libtessera_cuda.so");
    let path = |path: &std::path::Path| path.to_string_lossy().into_owned();
    let [kubeconfig, control, library] = [kubeconfig, control, library].map(|file| path(&file));
    let kubelet = path(&bed.kubelet());
    let run = |node: &str, kubeconfig: &str| {
        let [node, kubeconfig] = [node, kubeconfig].map(str::to_owned);
        let args = [
            "doctor",
            "--node",
            &node,
            "--kubeconfig",
            &kubeconfig,
            "--control-socket",
            &control,
            "--plugin-dir",
            &kubelet,
            "--library",
            &library,
        ];
        vgpu_kube(&args)
    };
    let done = run("n1", &kubeconfig)?;
    let said = text(&done.stdout);
    for part in [
        "GPU soft0 (SOFT) can be shared by claims",
        "The apiserver has resource.k8s.io/v1",
        "Node n1 is in the cluster",
        "The agent's account has the rights that it needs",
        "There is no DeviceClass gpu.tessera.dev for claims",
        "The apiserver shares devices among claims",
        "fix: vgpu-kube manifests | kubectl apply -f -",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(
        text(&done.stderr).contains("1 of the findings above are problems"),
        "{}",
        text(&done.stderr)
    );
    assert!(!said.contains("which the scheduler counts separately"), "{said}");
    eventually("the slice", async || bed.api.get(SLICE).is_some()).await?;
    let allocatable = serde_json::json!({ "tessera.io/soft-2c": "4" });
    let node = serde_json::json!({ "metadata": { "name": "n1" }, "status": { "allocatable": allocatable } });
    bed.api.put("/api/v1/nodes/n1", node);
    let said = text(&run("n1", &kubeconfig)?.stdout);
    assert!(
        said.contains(
            "Node n1 serves claims and device plugins, which the scheduler counts separately"
        ) && said.contains("run vgpu-kube with --dra or with --device-plugin alone"),
        "{said}"
    );
    let said = text(&run("n7", &kubeconfig)?.stdout);
    assert!(said.contains("There is no node n7 in the cluster"), "{said}");
    let said = text(&run("n1", "/nonexistent")?.stdout);
    assert!(said.contains("Cannot use the cluster's apiserver; name its kubeconfig"), "{said}");
    assert!(said.contains("; docs/kubernetes.md shows how to make it"), "{said}");
    bed.api.forbid(Some("/deviceclasses"));
    let said = text(&run("n1", &kubeconfig)?.stdout);
    assert!(said.contains("account cannot see whether there is a DeviceClass"), "{said}");
    assert!(said.contains("kubectl get deviceclass gpu.tessera.dev; if there is none: "), "{said}");
    bed.api.forbid(Some("/apis"));
    let said = text(&run("n1", &kubeconfig)?.stdout);
    assert!(said.contains("check the kubeconfig's server and credentials"), "{said}");
    bed.api.forbid(None);
    assert_eq!(bed.api.list("/apis/resource.k8s.io/v1/resourceslices").len(), 1, "the agent's");
    Ok(())
}

#[tokio::test]
async fn the_hook_serves_kubevirts_calls() -> Result<()> {
    let dir = tempfile::tempdir()?;
    let socket = dir.path().join("hook.sock");
    let mut sidecar = Command::new(env!("CARGO_BIN_EXE_vgpu-kube"))
        .args(["hook", "--vgpu", "gpu", "--socket"])
        .arg(&socket)
        .spawn()?;
    eventually("the socket", async || grpc::connect(&socket).await.is_ok()).await?;
    let channel = grpc::connect(&socket).await?;
    let mut described = info::info_client::InfoClient::new(channel.clone());
    let described = described.info(info::InfoParams {}).await?.into_inner();
    assert_eq!(described.versions, ["v1alpha3"]);
    assert_eq!(described.hook_points[0].name, "OnDefineDomain");
    let mut hook = v1alpha3::callbacks_client::CallbacksClient::new(channel.clone());
    let params = v1alpha3::OnDefineDomainParams { domain_xml: DOMAIN.into(), vmi: b"{}".to_vec() };
    let edited = hook.on_define_domain(params).await?.into_inner().domain_xml;
    let mut plugin = plugins::domain_hook_service_client::DomainHookServiceClient::new(channel);
    let request = |domain_type: &str| plugins::MutateDomainRequest {
        domain_type: domain_type.into(),
        domain: DOMAIN.into(),
        vmi: b"{}".to_vec(),
        sidecar_context: None,
    };
    let mutated = plugin.mutate_domain(request("libvirt")).await?.into_inner().domain;
    assert_eq!(text(&mutated), text(&edited));
    let refused = plugin.mutate_domain(request("other")).await.unwrap_err();
    assert!(refused.message().ends_with("; a vGPU needs libvirt"), "{refused}");
    // As KubeVirt's sidecar-shim runs a command.
    let shim = vgpu_kube(&["hook", "--vgpu", "gpu", "--vmi", "{}", "--domain", DOMAIN])?;
    assert_eq!(text(&shim.stdout), text(&edited));
    assert!(text(&edited).contains("/run/tessera/gpu/vfio.sock"));
    sidecar.kill()?;
    sidecar.wait()?;
    Ok(())
}

#[test]
fn mistakes_are_told_in_one_line() -> Result<()> {
    for (args, part) in [
        (vec!["run"], "Give --node <NAME>; see `vgpu-kube run --help`"),
        (vec!["hook", "--vgpu", "a/b", "--domain", DOMAIN], "is not the name of a claim's request"),
        (vec!["hook", "--domain", "<a/>"], "The VM's domain is not a libvirt domain"),
        (vec!["hook", "--socket", "/proc/x.sock"], "--socket: cannot listen at /proc/x.sock"),
        (vec!["manifests", "--node", "A B"], "is no name of a node"),
        (
            vec!["run", "--node", "n1", "--dra", "--kubeconfig", "/nonexistent"],
            "Cannot use the cluster's apiserver; name its kubeconfig with --kubeconfig",
        ),
        (
            vec!["run", "--node", "n1", "--device-plugin", "--metrics", "0.0.0.0:1"],
            "--metrics: 0.0.0.0:1 is reachable from other hosts",
        ),
    ] {
        let done = vgpu_kube(&args)?;
        let said = text(&done.stderr);
        let line = said.lines().last().unwrap_or_default();
        assert!(!done.status.success() && line.contains(part), "{args:?}: {said}");
        assert!(line.starts_with("vgpu-kube: "), "{said}");
    }
    let all = text(&vgpu_kube(&["manifests"])?.stdout);
    assert!(all.contains("kind: DeviceClass") && all.contains("kind: ClusterRole"), "{all}");
    Ok(())
}
