//! Cluster: etcd, apiserver, scheduler and kubelet on one node.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use crate::kube::Kubernetes;
use crate::kube::kubectl::Kubectl;
use crate::kube::node::Node;
use crate::kube::resource_types;

/// Name of the node.
pub const NODE: &str = "node1";
/// Account of the agent on the node, as `manifests/node.yaml` makes it, and its group, to which
/// `manifests/rbac.yaml` gives the rights.
const AGENT: [&str; 2] = ["system:serviceaccount:tessera:node1", "system:serviceaccounts:tessera"];
/// Configuration of the agent, in the node.
pub const AGENT_CONFIG: &str = "/etc/kubernetes/vgpu-kube.conf";
/// Image of the pods' sandboxes, and the smallest one with a shell.
pub const BASE_IMAGE: &str = "tessera.test/base:1";

const ADMIN_TOKEN: &str = "admin-of-the-lab";
const AGENT_TOKEN: &str = "agent-of-the-lab";
const CERTIFICATES: &str = "/etc/kubernetes/pki";
/// Certificate of the apiserver, which it makes itself.
const AUTHORITY: &str = "/etc/kubernetes/pki/apiserver.crt";
/// Key that signs tokens of service accounts.
const TOKEN_KEY: &str = "/etc/kubernetes/pki/tokens.key";

const CONTAINERD: &str = r#"version = 2
disabled_plugins = ["io.containerd.internal.v1.opt"]
[plugins."io.containerd.grpc.v1.cri"]
  enable_cdi = true
  cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]
  restrict_oom_score_adj = true
  sandbox_image = "tessera.test/base:1"
"#;

const KUBELET: &str = "\
apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
authentication: {anonymous: {enabled: true}, webhook: {enabled: false}}
authorization: {mode: AlwaysAllow}
cgroupDriver: cgroupfs
enforceNodeAllocatable: []
evictionHard: {nodefs.available: '0%', nodefs.inodesFree: '0%', imagefs.available: '0%'}
failSwapOn: false
hairpinMode: none
makeIPTablesUtilChains: false
nodeStatusReportFrequency: 10s
nodeStatusUpdateFrequency: 1s
resolvConf: ''
";

/// Services in the order of their start, with their commands. Etcd keeps nothing: a node ends with
/// all that it has written.
const SERVICES: [(&str, &str); 5] = [
    ("containerd", "containerd"),
    (
        "etcd",
        "etcd --data-dir /var/lib/etcd/data --unsafe-no-fsync \
         --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
         --listen-peer-urls http://127.0.0.1:2380",
    ),
    (
        "kube-apiserver",
        "kube-apiserver --etcd-servers http://127.0.0.1:2379 --advertise-address 10.99.0.1 \
         --bind-address 127.0.0.1 --cert-dir /etc/kubernetes/pki \
         --service-cluster-ip-range 10.98.0.0/24 --authorization-mode RBAC \
         --token-auth-file /etc/kubernetes/tokens.csv \
         --service-account-issuer https://kubernetes.default.svc \
         --service-account-signing-key-file /etc/kubernetes/pki/tokens.key \
         --service-account-key-file /etc/kubernetes/pki/tokens.key \
         --disable-admission-plugins ServiceAccount,TaintNodesByCondition \
         --feature-gates APIPriorityAndFairness=false",
    ),
    (
        "kube-scheduler",
        "kube-scheduler --kubeconfig /root/.kube/config --leader-elect=false \
         --authentication-skip-lookup",
    ),
    (
        "kubelet",
        "kubelet --kubeconfig /root/.kube/config --config /etc/kubernetes/kubelet.yaml \
         --hostname-override node1 --node-ip 10.99.0.1 --oom-score-adj 0 \
         --container-runtime remote \
         --container-runtime-endpoint unix:///run/containerd/containerd.sock",
    ),
];

/// Running cluster, removed when dropped.
#[derive(Debug)]
pub struct Cluster {
    node: Node,
    /// Time until the node was ready for pods.
    pub start_time: Duration,
}

impl Cluster {
    /// Starts a cluster. `base_image` becomes [`BASE_IMAGE`].
    pub fn start(kubernetes: &Kubernetes, base_image: &Path) -> Result<Self> {
        let started = Instant::now();
        let node = Node::start(kubernetes.root())?;
        let mut cluster = Self { node, start_time: Duration::ZERO };
        cluster.configure()?;
        for (name, _) in SERVICES.iter().take(3) {
            cluster.start_service(name)?;
        }
        cluster.import(base_image)?;
        cluster.wait_for_api()?;
        cluster.start_service("kube-scheduler")?;
        cluster.start_service("kubelet")?;
        cluster.wait_until_ready()?;
        cluster.start_time = started.elapsed();
        Ok(cluster)
    }

    fn configure(&self) -> Result<()> {
        let node = &self.node;
        node.write("/etc/containerd/config.toml", CONTAINERD)?;
        node.write("/etc/kubernetes/kubelet.yaml", KUBELET)?;
        let authority = PathBuf::from(AUTHORITY);
        let [user, group] = AGENT;
        let tokens = format!(
            "{ADMIN_TOKEN},admin,admin,system:masters\n\
             {AGENT_TOKEN},{user},agent,{group}\n"
        );
        node.write("/etc/kubernetes/tokens.csv", &tokens)?;
        node.write("/root/.kube/config", &kubeconfig(ADMIN_TOKEN, &authority).to_string())?;
        node.write(AGENT_CONFIG, &kubeconfig(AGENT_TOKEN, &authority).to_string())?;
        node.sh(&format!(
            "mkdir -p {CERTIFICATES} && \
             openssl ecparam -name prime256v1 -genkey -noout -out {TOKEN_KEY}"
        ))
        .map(drop)
    }

    /// Returns the node.
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Returns kubectl for this cluster.
    pub fn kubectl(&self) -> Kubectl<'_> {
        Kubectl::Node(&self.node)
    }

    /// Returns the administrator's configuration, for a client outside of the node's root and in
    /// the node's network.
    pub fn kubeconfig_outside(&self) -> Value {
        kubeconfig(ADMIN_TOKEN, &self.node.path(AUTHORITY))
    }

    /// Starts one of the cluster's services, initially or after it was killed.
    pub fn start_service(&self, name: &str) -> Result<()> {
        let found = SERVICES.iter().find(|(service, _)| *service == name);
        let (_, command) = found.with_context(|| format!("No service {name}"))?;
        self.node.start_service(name, command)
    }

    /// Imports an image into containerd.
    pub fn import(&self, image: &Path) -> Result<()> {
        self.node.wait_for("containerd answers", || {
            Ok(self.node.path("/run/containerd/containerd.sock").exists()
                && self.node.run("ctr version")?.status == 0)
        })?;
        self.node.install(image, "/tmp/image.tar")?;
        self.node.sh("ctr -n k8s.io images import /tmp/image.tar && rm /tmp/image.tar").map(drop)
    }

    /// Makes the apiserver serve the types of dynamic resource allocation.
    pub fn serve_resource_types(&self) -> Result<()> {
        self.kubectl().apply(&resource_types::definitions())?;
        for name in resource_types::names() {
            self.node.wait_for(&format!("{name} is served"), || {
                Ok(self.kubectl().try_run(&["get", &name], "")?.status == 0)
            })?;
        }
        Ok(())
    }

    fn wait_for_api(&self) -> Result<()> {
        let ready = self.node.wait_for("the apiserver answers", || {
            let pid = self.node.service("kube-apiserver")?;
            ensure!(self.node.is_running(pid), "The apiserver has ended");
            Ok(self.kubectl().try_run(&["get", "--raw", "/readyz"], "")?.status == 0)
        });
        ready.with_context(|| self.node.log("kube-apiserver"))
    }

    /// Waits until pods can be scheduled to the node.
    pub fn wait_until_ready(&self) -> Result<()> {
        let ready = self.node.wait_for("the node is ready", || {
            let pid = self.node.service("kubelet")?;
            ensure!(self.node.is_running(pid), "kubelet has ended");
            let Ok(node) = self.kubectl().get(&["node", NODE]) else { return Ok(false) };
            let conditions = node["status"]["conditions"].as_array().cloned().unwrap_or_default();
            // Without a network plugin, kubelet calls the node not ready, and still runs pods in
            // the node's network.
            Ok(conditions.iter().any(|one| {
                one["type"] == "Ready"
                    && (one["status"] == "True"
                        || one["message"].as_str().is_some_and(only_lacks_network))
            }))
        });
        ready.with_context(|| self.node.log("kubelet"))
    }
}

/// Returns true if a node's message says that it lacks a network plugin and nothing else.
fn only_lacks_network(message: &str) -> bool {
    message.contains("NetworkPluginNotReady") && !message.contains(", ")
}

/// Returns a configuration for clients with a token. `authority` is the apiserver's certificate.
fn kubeconfig(token: &str, authority: &Path) -> Value {
    let server = json!({ "server": "https://127.0.0.1:6443", "certificate-authority": authority });
    json!({
        "apiVersion": "v1", "kind": "Config", "current-context": "lab",
        "clusters": [{ "name": "lab", "cluster": server }],
        "users": [{ "name": "lab", "user": { "token": token } }],
        "contexts": [{ "name": "lab", "context": { "cluster": "lab", "user": "lab" } }],
    })
}
