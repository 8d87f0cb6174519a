//! `doctor`: checks of this node and its cluster, with a fix for each problem. Nothing is changed.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, bail};
use host_inventory::{Finding, finding};
use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourcePool, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::api::PostParams;
use kube::{Api, Client as KubeClient};
use mdev_core::untrusted::{TABLE, read_text};
use vgpud_api::{Parent, ParentState};
use vgpud_client::{Client, ClientError};

use crate::agent;
use crate::cli::Doctor;
use crate::device_plugin::devices::DOMAIN;
use crate::dra::DRIVER;
use crate::dra::cluster::{ClusterError, limited};
use crate::dra::publisher::slice_name;
use crate::dra::slices::{self, Gpu};
use crate::host::Libraries;

const VGPUD: &str = "vgpud";
const LIBRARY: &str = "library";
const KUBELET: &str = "kubelet";
const RUNTIME: &str = "runtime";
const CLUSTER: &str = "cluster";
const RIGHTS: &str = "rights";
const CLAIMS: &str = "claims";

/// Timeout of a request to vgpud.
const ANSWER_LIMIT: Duration = Duration::from_secs(3);

/// Rights that the agent needs: group, resource and verbs, as in `manifests/rbac.yaml`.
const NEEDED: [(&str, &str, &[&str]); 6] = [
    ("resource.k8s.io", "resourceclaims", &["get"]),
    ("resource.k8s.io", "resourceclaims/status", &["patch"]),
    ("resource.k8s.io", "resourceslices", &["get", "list", "watch", "create", "update", "delete"]),
    ("", "pods", &["get"]),
    ("", "nodes", &["get"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// Runs `doctor`.
pub async fn run(args: Doctor) -> Result<()> {
    let client = Client::new(args.common.control_socket.clone()).with_limit(ANSWER_LIMIT);
    let parents = client.get::<Vec<Parent>>("/v1/parents").await;
    let libraries = Libraries::find(args.common.library.as_deref());
    let mut findings = host(Path::new("/"), &args.common.plugin_dir, &libraries, &parents);
    findings.extend(cluster(&args).await);
    print!("{}", finding::text(&findings));
    match finding::problems(&findings) {
        0 => Ok(()),
        problems => bail!("{problems} of the findings above are problems: see their fixes"),
    }
}

/// Checks this node.
fn host(
    root: &Path,
    plugin_dir: &Path,
    libraries: &Libraries,
    parents: &Result<Vec<Parent>, ClientError>,
) -> Vec<Finding> {
    let mut findings = vgpud(parents);
    let nvidia = parents.iter().flatten().any(|parent| parent.backend == "nvidia");
    findings.push(match &libraries.preload {
        None => Finding::problem(
            LIBRARY,
            "There is no preload library, so that containers get no CUDA",
            "install Debian's package tessera of this release, or name the library with --library",
        ),
        Some(_) if nvidia && libraries.driver.is_empty() => Finding::problem(
            LIBRARY,
            "The host has no libcuda.so.1 for containers",
            "install the user-mode libraries of NVIDIA's driver in the driver's version (libcuda1)",
        ),
        Some(path) => Finding::ok(LIBRARY, format!("Containers get {}", path.display())),
    });
    let kubelet = plugin_dir.join("device-plugins/kubelet.sock");
    findings.push(if kubelet.exists() {
        Finding::ok(KUBELET, format!("Kubelet is in {}", plugin_dir.display()))
    } else {
        Finding::problem(
            KUBELET,
            format!("There is no kubelet: {} is absent", kubelet.display()),
            "start kubelet, or name its folder with --plugin-dir",
        )
    });
    findings.push(runtime(root));
    findings
}

fn vgpud(parents: &Result<Vec<Parent>, ClientError>) -> Vec<Finding> {
    let parents = match parents {
        Ok(parents) if parents.is_empty() => {
            return vec![Finding::problem(VGPUD, "vgpud has no GPU", "see `vgpuctl doctor`")];
        }
        Ok(parents) => parents,
        Err(error) => {
            return vec![Finding::problem(VGPUD, error.to_string(), "see `vgpuctl doctor`")];
        }
    };
    let shareable = slices::gpus(parents, &vgpud_api::Stats::default());
    let one = |parent: &Parent| {
        let name = &parent.name;
        if parent.state != ParentState::Ready {
            let what = format!("GPU {name} takes no vGPUs now");
            return Finding::problem(VGPUD, what, "see `vgpuctl parents` and vgpud's log");
        }
        match shareable.iter().find(|gpu| gpu.parent == *name) {
            Some(Gpu { model, .. }) => {
                Finding::ok(VGPUD, format!("GPU {name} ({model}) can be shared by claims"))
            }
            None => Finding::warning(
                VGPUD,
                format!("GPU {name} has no engines or too little memory for claims"),
                "use it by device plugins (vgpu-kube run --device-plugin)",
            ),
        }
    };
    parents.iter().map(one).collect()
}

/// Checks that the container runtime reads CDI files: containerd 2 does, 1.7 has it switched off.
fn runtime(root: &Path) -> Finding {
    let path = root.join("etc/containerd/config.toml");
    let text = read_text(&path, TABLE).unwrap_or_default();
    let squeezed: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    let off = squeezed.contains("enable_cdi=false");
    let old = squeezed.starts_with("version=2") && !squeezed.contains("enable_cdi=true");
    if off || old {
        return Finding::warning(
            RUNTIME,
            "containerd may not read CDI files, by which containers of claims get their vGPUs",
            "with containerd 1.7: enable_cdi = true in /etc/containerd/config.toml, section \
             [plugins.\"io.containerd.grpc.v1.cri\"], and restart containerd",
        );
    }
    Finding::ok(RUNTIME, "The container runtime is not set to ignore CDI files")
}

/// Checks the cluster.
async fn cluster(args: &Doctor) -> Vec<Finding> {
    let client = match agent::connect(&args.common.access).await {
        Ok(client) => client,
        Err(error) => {
            let fix =
                "name a kubeconfig with --kubeconfig; docs/kubernetes.md shows how to make it";
            return vec![Finding::problem(CLUSTER, format!("{error:#}"), fix)];
        }
    };
    let mut findings = Vec::new();
    let claims = match agent::serves_claims(&client).await {
        Ok(claims) => claims,
        Err(error) => {
            let fix = "check the kubeconfig's server and credentials (kubectl version)";
            return vec![Finding::problem(CLUSTER, format!("{error:#}"), fix)];
        }
    };
    findings.push(if claims {
        Finding::ok(CLUSTER, "The apiserver has resource.k8s.io/v1")
    } else {
        Finding::warning(
            CLUSTER,
            "The apiserver has no resource.k8s.io/v1, so that pods cannot ask for shares",
            "use device plugins (vgpu-kube run --device-plugin), or Kubernetes 1.36 and newer",
        )
    });
    findings.push(node(&client, &args.common.node).await);
    findings.push(rights(&client, claims).await);
    if claims {
        findings.push(classes(&client).await);
        findings.push(sharing(&client, &args.common.node).await);
        findings.extend(both(&client, &args.common.node).await);
    }
    findings
}

async fn node(client: &KubeClient, name: &str) -> Finding {
    match limited(Api::<Node>::all(client.clone()).get_opt(name)).await {
        Ok(Some(_)) => Finding::ok(CLUSTER, format!("Node {name} is in the cluster")),
        Ok(None) => Finding::problem(
            CLUSTER,
            format!("There is no node {name} in the cluster"),
            "name this node as `kubectl get nodes` does, with --node",
        ),
        Err(error) => Finding::problem(CLUSTER, error.to_string(), APPLY),
    }
}

/// Command that makes the cluster's objects.
const APPLY: &str = "vgpu-kube manifests | kubectl apply -f -";

async fn rights(client: &KubeClient, claims: bool) -> Finding {
    let needed = NEEDED.iter().filter(|(group, ..)| claims || *group != "resource.k8s.io");
    let mut missing = Vec::new();
    for (group, resource, verbs) in needed {
        for verb in *verbs {
            match may(client, group, resource, verb).await {
                Ok(true) => {}
                Ok(false) => missing.push(format!("{verb} {resource}")),
                Err(error) => return Finding::problem(RIGHTS, error.to_string(), APPLY),
            }
        }
    }
    if missing.is_empty() {
        return Finding::ok(RIGHTS, "The agent's account has the rights that it needs");
    }
    Finding::problem(RIGHTS, format!("The agent's account may not {}", missing.join(", ")), APPLY)
}

async fn may(
    client: &KubeClient,
    group: &str,
    resource: &str,
    verb: &str,
) -> Result<bool, ClusterError> {
    let (resource, subresource) = match resource.split_once('/') {
        Some((resource, part)) => (resource, Some(part.to_owned())),
        None => (resource, None),
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(ResourceAttributes {
                group: Some(group.to_owned()),
                resource: Some(resource.to_owned()),
                subresource,
                verb: Some(verb.to_owned()),
                ..ResourceAttributes::default()
            }),
            non_resource_attributes: None,
        },
        ..SelfSubjectAccessReview::default()
    };
    let api = Api::<SelfSubjectAccessReview>::all(client.clone());
    let answer = limited(api.create(&PostParams::default(), &review)).await?;
    Ok(answer.status.is_some_and(|status| status.allowed))
}

async fn classes(client: &KubeClient) -> Finding {
    match limited(Api::<DeviceClass>::all(client.clone()).get_opt(DRIVER)).await {
        Ok(Some(_)) => Finding::ok(CLAIMS, format!("There is a DeviceClass {DRIVER}")),
        Ok(None) => {
            Finding::problem(CLAIMS, format!("There is no DeviceClass {DRIVER} for claims"), APPLY)
        }
        // The agent itself needs no right to read classes.
        Err(_) => Finding::warning(
            CLAIMS,
            format!("The agent's account cannot see whether there is a DeviceClass {DRIVER}"),
            format!("kubectl get deviceclass {DRIVER}; if there is none: {APPLY}"),
        ),
    }
}

/// Returns a warning if the node serves claims and device plugins: the scheduler counts each by
/// itself.
async fn both(client: &KubeClient, name: &str) -> Option<Finding> {
    let slices = Api::<ResourceSlice>::all(client.clone());
    limited(slices.get_opt(&slice_name(name))).await.ok().flatten()?;
    let node = limited(Api::<Node>::all(client.clone()).get_opt(name)).await.ok().flatten()?;
    let resources = node.status?.allocatable?;
    let prefix = format!("{DOMAIN}/");
    let offered = |(name, count): (&String, &Quantity)| name.starts_with(&prefix) && count.0 != "0";
    resources.iter().any(offered).then(|| {
        Finding::warning(
            CLAIMS,
            format!("Node {name} serves claims and device plugins, which the scheduler counts separately"),
            "run vgpu-kube with --dra or with --device-plugin alone; otherwise, pods that find the GPU \
             used by the other interface's are refused",
        )
    })
}

/// Checks that the apiserver keeps what makes a device shared, without storing anything.
async fn sharing(client: &KubeClient, node: &str) -> Finding {
    let gpu = Gpu {
        parent: "doctor".to_owned(),
        model: String::new(),
        backend: String::new(),
        display: false,
        programs: false,
        core: 100,
        vram_bytes: 1 << 30,
        taint: None,
    };
    let slice = ResourceSlice {
        metadata: ObjectMeta { name: Some(format!("doctor-{DRIVER}")), ..ObjectMeta::default() },
        spec: ResourceSliceSpec {
            driver: DRIVER.to_owned(),
            node_name: Some(node.to_owned()),
            pool: ResourcePool { name: node.to_owned(), generation: 0, resource_slice_count: 1 },
            devices: Some(slices::devices(&[gpu])),
            ..ResourceSliceSpec::default()
        },
    };
    let api = Api::<ResourceSlice>::all(client.clone());
    let dry = PostParams { dry_run: true, field_manager: None };
    match limited(api.create(&dry, &slice)).await {
        Ok(kept) => {
            let mut devices = kept.spec.devices.iter().flatten();
            if devices.all(|device| device.allow_multiple_allocations == Some(true)) {
                return Finding::ok(CLAIMS, "The apiserver shares devices among claims");
            }
            Finding::problem(
                CLAIMS,
                "The apiserver shares no devices among claims",
                "enable the feature DRAConsumableCapacity of apiserver, scheduler and kubelet (on by \
                 default from Kubernetes 1.36), or use device plugins",
            )
        }
        Err(error) => Finding::problem(CLAIMS, error.to_string(), APPLY),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn parent(state: &str, backend: &str) -> Parent {
        let text = format!(
            r#"{{"name":"p0","backend":"{backend}","model":"M","description":"","state":"{state}",
            "vram_bytes":1073741824,"vram_free_bytes":8,"capabilities":["compute"],"scheduler":"","pid":null,
            "running":0}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    fn found(state: &str, backend: &str, libraries: &Libraries) -> String {
        let dir = tempfile::tempdir().unwrap();
        finding::text(&host(dir.path(), dir.path(), libraries, &Ok(vec![parent(state, backend)])))
    }

    #[test]
    fn a_node_that_lacks_something_has_the_fix() {
        let none = Libraries::default();
        let text = found("lost", "soft", &none);
        assert!(text.contains("GPU p0 takes no vGPUs now"), "{text}");
        assert!(text.contains("There is no preload library, so that containers"), "{text}");
        assert!(text.contains("There is no kubelet"), "{text}");
        let some = Libraries { preload: Some("/l.so".into()), ..none };
        let text = found("ready", "nvidia", &some);
        assert!(text.contains("The host has no libcuda.so.1 for containers"), "{text}");
        assert!(found("ready", "soft", &some).contains("can be shared by claims"));
        let silent = ClientError::Closed { socket: "/s".into() };
        assert!(vgpud(&Err(silent))[0].what.contains("closed the connection"));
        assert_eq!(vgpud(&Ok(Vec::new()))[0].what, "vgpud has no GPU");
    }

    #[test]
    fn a_runtime_that_ignores_cdi_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let level = |text: &str| {
            fs::create_dir_all(dir.path().join("etc/containerd")).unwrap();
            fs::write(dir.path().join("etc/containerd/config.toml"), text).unwrap();
            runtime(dir.path()).fix.is_some()
        };
        assert!(level("version = 2\n") && level("version = 3\nenable_cdi = false"));
        assert!(!level("version = 2\nenable_cdi = true") && !level("version = 3") && !level(""));
    }
}
