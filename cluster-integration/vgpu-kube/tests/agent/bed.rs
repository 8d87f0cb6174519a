//! vgpud, agent and kubelet's folders.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use system_tests::{TIMEOUT, Vgpud, kill_process};
use tempfile::TempDir;
use tonic::transport::Channel;
use vgpu_kube::grpc;
use vgpu_kube::proto::dra::v1;

use crate::apiserver::ApiServer;

/// Name of the node.
pub const NODE: &str = "n1";
/// Path of the node's slice.
pub const SLICE: &str = "/apis/resource.k8s.io/v1/resourceslices/n1-gpu.tessera.dev";
/// Collection of slices.
pub const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// Node with vgpud, whose GPU has 2 GiB.
#[derive(Debug)]
pub struct Bed {
    pub vgpud: Vgpud,
    pub api: ApiServer,
    pub dir: TempDir,
    agent: Option<Child>,
    args: Vec<String>,
}

impl Bed {
    /// Starts vgpud, the stand-in for the apiserver, and the agent.
    pub fn start(args: &[&str]) -> Result<Self> {
        let vgpud = Vgpud::start_with(&["--parent", "soft:soft0,vram=2G"])?;
        let api = ApiServer::start()?;
        let node = json!({"metadata": {"name": NODE, "uid": "node-uid"}});
        api.put("/api/v1/nodes/n1", node);
        let dir = tempfile::Builder::new().prefix("kube").tempdir()?;
        fs::create_dir_all(dir.path().join("kubelet/device-plugins"))?;
        fs::write(dir.path().join("libtessera_cuda.so"), "")?;
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let mut bed = Self { vgpud, api, dir, agent: None, args };
        bed.start_agent()?;
        Ok(bed)
    }

    /// Returns kubelet's folder.
    pub fn kubelet(&self) -> PathBuf {
        self.dir.path().join("kubelet")
    }

    /// Returns the folder of CDI files.
    pub fn cdi(&self) -> PathBuf {
        self.dir.path().join("cdi")
    }

    /// Returns the folder of records.
    pub fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// Starts an agent.
    pub fn start_agent(&mut self) -> Result<()> {
        let mut command = Command::new(env!("CARGO_BIN_EXE_vgpu-kube"));
        command.arg("run").args(["--node", NODE]).arg("--kubeconfig");
        command.arg(self.api.kubeconfig(self.dir.path())?);
        command.arg("--control-socket").arg(self.vgpud.api_socket());
        command.arg("--plugin-dir").arg(self.kubelet()).arg("--cdi-dir").arg(self.cdi());
        command.arg("--state-dir").arg(self.state());
        command.arg("--library").arg(self.dir.path().join("libtessera_cuda.so"));
        command.args(&self.args).stdin(Stdio::null());
        self.agent = Some(command.spawn().context("Cannot start vgpu-kube")?);
        Ok(())
    }

    /// Ends the agent.
    pub fn end_agent(&mut self, signal: Signal) -> Result<()> {
        let mut agent = self.agent.take().context("There is no agent")?;
        kill_process(agent.id(), signal)?;
        agent.wait()?;
        Ok(())
    }

    /// Connects as kubelet.
    pub async fn dra(&self) -> Result<Channel> {
        let socket = self.kubelet().join("plugins/gpu.tessera.dev/dra.sock");
        let mut channel = None;
        eventually("the driver's socket", async || {
            channel = grpc::connect(&socket).await.ok();
            channel.is_some()
        })
        .await?;
        channel.context("A channel")
    }

    /// Prepares a claim, as kubelet does.
    pub async fn prepare(&self, claim: &v1::Claim) -> Result<v1::NodePrepareResourceResponse> {
        let mut client = v1::dra_plugin_client::DraPluginClient::new(self.dra().await?);
        let request = v1::NodePrepareResourcesRequest { claims: vec![claim.clone()] };
        let mut answer = client.node_prepare_resources(request).await?.into_inner();
        answer.claims.remove(&claim.uid).context("An answer for the claim")
    }

    /// Unprepares a claim, as kubelet does. Returns the error.
    pub async fn unprepare(&self, claim: &v1::Claim) -> Result<String> {
        let mut client = v1::dra_plugin_client::DraPluginClient::new(self.dra().await?);
        let request = v1::NodeUnprepareResourcesRequest { claims: vec![claim.clone()] };
        let mut answer = client.node_unprepare_resources(request).await?.into_inner();
        Ok(answer.claims.remove(&claim.uid).context("An answer for the claim")?.error)
    }

    /// Stores a claim with one share, and its pod.
    pub fn put_claim(&self, name: &str, core: u8, vram: &str, config: &Value) -> v1::Claim {
        let uid = format!("uid-of-{name}");
        let result = json!({
            "driver": "gpu.tessera.dev", "pool": NODE, "device": "soft0", "request": "vgpu",
            "shareID": "s1", "consumedCapacity": {"core": core.to_string(), "vram": vram},
        });
        let mut devices = json!({"results": [result]});
        if !config.is_null() {
            let mut parameters = config.clone();
            parameters["apiVersion"] = json!("gpu.tessera.dev/v1alpha1");
            parameters["kind"] = json!("VgpuConfig");
            let opaque = json!({"driver": "gpu.tessera.dev", "parameters": parameters});
            devices["config"] = json!([{"source": "FromClaim", "opaque": opaque}]);
        }
        let claim = json!({
            "metadata": {"namespace": "ns", "name": name, "uid": uid}, "spec": {},
            "status": {"allocation": {"devices": devices},
                       "reservedFor": [{"resource": "pods", "name": name, "uid": format!("pod-{name}")}]},
        });
        self.api.put(&claim_path(name), claim);
        let pod = json!({
            "metadata": {"namespace": "ns", "name": name, "uid": format!("pod-{name}")},
            "spec": {"securityContext": {"runAsUser": 1000},
                     "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
                     "containers": [{"name": "c", "resources": {"claims": [{"name": "gpu"}]}}]},
        });
        self.api.put(&format!("/api/v1/namespaces/ns/pods/{name}"), pod);
        v1::Claim { namespace: "ns".into(), uid, name: name.into() }
    }

    /// Returns the condition of a claim's only device: status, reason and message.
    pub fn condition(&self, name: &str) -> Option<[String; 3]> {
        let claim = self.api.get(&claim_path(name))?;
        let device = &claim["status"]["devices"][0];
        let condition = &device["conditions"][0];
        if device["shareID"] != "s1" || condition["type"] != "Ready" {
            return None;
        }
        let text = |member: &str| Some(condition[member].as_str()?.to_owned());
        Some([text("status")?, text("reason")?, text("message")?])
    }

    /// Returns the running vGPUs.
    pub fn vgpus(&self) -> Result<Vec<Value>> {
        Ok(serde_json::from_value(self.vgpud.get("/v1/vgpus")?)?)
    }

    /// Returns what is left of claims: vGPUs, CDI files and records.
    pub fn left(&self) -> Result<(usize, usize, usize)> {
        let count = |folder| fs::read_dir(folder).map_or(0, Iterator::count);
        Ok((self.vgpus()?.len(), count(self.cdi()), count(self.state().join("claims"))))
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(mut agent) = self.agent.take() {
            let _ = agent.kill();
            let _ = agent.wait();
        }
    }
}

/// Returns the path of a claim.
pub fn claim_path(name: &str) -> String {
    format!("/apis/resource.k8s.io/v1/namespaces/ns/resourceclaims/{name}")
}

/// Waits until a condition holds.
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) -> Result<()> {
    let wait = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, wait).await.with_context(|| format!("{what}: not in time"))
}
