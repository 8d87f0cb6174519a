//! Pods that run this test program, and their output.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::kube::kubectl::Kubectl;
use serde_json::{Value, json};

use crate::inside::MARK;

/// User that the agent gives vGPUs of device plugins to.
pub const USER: u32 = 1000;

const LIMIT: Duration = Duration::from_secs(60);

/// Size of a vGPU on a GPU of 8 GiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// 25 % of the time and 2 GiB: a context of CUDA takes some 600 MiB.
    Quarter,
    /// 50 % of the time and 4 GiB.
    Half,
}

impl Size {
    /// Returns the resource of the device plugin.
    pub const fn resource(self) -> &'static str {
        match self {
            Self::Quarter => "tessera.io/soft-2c",
            Self::Half => "tessera.io/soft-4c",
        }
    }

    /// Returns the share in percent.
    pub const fn core(self) -> u8 {
        match self {
            Self::Quarter => 25,
            Self::Half => 50,
        }
    }

    /// Returns the video memory, as a claim names it.
    const fn vram(self) -> &'static str {
        match self {
            Self::Quarter => "2Gi",
            Self::Half => "4Gi",
        }
    }
}

/// Interface by which pods ask for vGPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Interface {
    /// A resource for each type.
    DevicePlugin,
    /// Resource claims.
    Claims,
}

/// A pod to be made.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Name.
    pub name: String,
    /// Size of its vGPU, if it has one.
    pub vgpu: Option<Size>,
    /// One of [`crate::inside`].
    pub program: &'static str,
    /// User of its process.
    pub user: u32,
}

/// Pods on a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Pods<'a> {
    /// The cluster.
    pub kubectl: Kubectl<'a>,
    /// Image with this test program.
    pub image: &'a str,
    /// Whether pods are in the node's network: the lab's cluster has no network plugin.
    pub host_network: bool,
    /// How pods ask for vGPUs.
    pub by: Interface,
}

impl Pod {
    /// Returns a pod that runs one of [`crate::inside`] on a vGPU, as root.
    pub fn new(name: &str, program: &'static str, vgpu: Size) -> Self {
        Self { vgpu: Some(vgpu), ..Self::without_vgpu(name, program) }
    }

    /// Returns a pod without a vGPU.
    pub fn without_vgpu(name: &str, program: &'static str) -> Self {
        Self { name: name.to_owned(), vgpu: None, program, user: 0 }
    }

    fn object(&self, pods: &Pods<'_>) -> Value {
        let program = format!("inside::{}", self.program);
        let (resources, claims) = match (self.vgpu, pods.by) {
            (None, _) => (json!({}), json!([])),
            (Some(size), Interface::DevicePlugin) => {
                (json!({ "limits": { size.resource(): "1" } }), json!([]))
            }
            (Some(_), Interface::Claims) => {
                let claim = json!({ "name": "gpu", "resourceClaimName": self.name });
                (json!({ "claims": [{ "name": "gpu" }] }), json!([claim]))
            }
        };
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": self.name, "labels": { "app": "tessera-test" } },
            "spec": {
                "restartPolicy": "Never",
                "hostNetwork": pods.host_network,
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 1,
                "resourceClaims": claims,
                "containers": [{
                    "name": "main", "image": pods.image, "imagePullPolicy": "IfNotPresent",
                    "command": ["/program", "--exact", program, "--ignored", "--nocapture"],
                    "env": [{ "name": MARK, "value": "1" }],
                    "securityContext": { "runAsUser": self.user },
                    "resources": resources,
                }],
            },
        })
    }

    /// Returns the claim of a pod.
    fn claim(&self, size: Size) -> Value {
        let requests = json!({ "core": size.core().to_string(), "vram": size.vram() });
        let exactly =
            json!({ "deviceClassName": "gpu.tessera.dev", "capacity": { "requests": requests } });
        json!({
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim",
            "metadata": { "name": self.name },
            "spec": { "devices": { "requests": [{ "name": "vgpu", "exactly": exactly }] } },
        })
    }
}

impl Pods<'_> {
    /// Makes a pod.
    pub fn start(&self, pod: &Pod) -> Result<()> {
        if let (Some(size), Interface::Claims) = (pod.vgpu, self.by) {
            self.kubectl.apply(&pod.claim(size))?;
        }
        self.kubectl.apply(&pod.object(self))
    }

    /// Runs a pod, whose program must succeed, and returns its output.
    pub fn run(&self, pod: &Pod) -> Result<String> {
        self.start(pod)?;
        let phase = self.wait_for_phase(&pod.name, &["Succeeded", "Failed"])?;
        // A pod that kubelet refuses has no output.
        let log = self.log(&pod.name).or_else(|_| self.status(&pod.name))?;
        ensure!(phase == "Succeeded" && log.contains("1 passed"), "{}: {phase}: {log}", pod.name);
        self.delete(&pod.name)?;
        Ok(log)
    }

    fn status(&self, name: &str) -> Result<String> {
        Ok(self.kubectl.get(&["pod", name])?["status"].to_string())
    }

    /// Returns a pod's phase.
    pub fn phase(&self, name: &str) -> Result<String> {
        let pod = self.kubectl.get(&["pod", name])?;
        Ok(pod["status"]["phase"].as_str().unwrap_or_default().to_owned())
    }

    /// Waits until a pod has one of these phases, and returns it.
    pub fn wait_for_phase(&self, name: &str, phases: &[&str]) -> Result<String> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let pod = self.kubectl.get(&["pod", name])?;
            let phase = pod["status"]["phase"].as_str().unwrap_or_default();
            if phases.contains(&phase) {
                return Ok(phase.to_owned());
            }
            if Instant::now() > deadline {
                let events = self.kubectl.run(&["get", "events"])?;
                bail!("{name} is {phase}, not {phases:?}: {}\n{events}", pod["status"]);
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Returns a pod's output so far.
    pub fn log(&self, name: &str) -> Result<String> {
        self.kubectl.run(&["logs", name])
    }

    /// Waits until a pod has printed a line that begins with this word, and returns the last one.
    pub fn wait_for_line(&self, name: &str, word: &str) -> Result<String> {
        let deadline = Instant::now() + LIMIT;
        loop {
            let log = self.log(name).unwrap_or_default();
            if let Some(line) = log.lines().rfind(|line| line.starts_with(word)) {
                return Ok(line.to_owned());
            }
            ensure!(Instant::now() < deadline, "{name} has not printed `{word}`: {log}");
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// Deletes a pod, and its claim if it has one, and waits until it is gone.
    pub fn delete(&self, name: &str) -> Result<()> {
        self.kubectl.delete("pod", name).with_context(|| format!("{name} is not deleted"))?;
        match self.by {
            Interface::DevicePlugin => Ok(()),
            Interface::Claims => self.kubectl.delete("resourceclaim", name),
        }
    }

    /// Returns the work that a pod has reported: rounds, and the time of the last one in seconds.
    pub fn work(&self, name: &str) -> Result<(u64, f64)> {
        let line = self.wait_for_line(name, "round ")?;
        let mut words = line.split(' ').skip(1);
        let mut number = || words.next().context("A short line");
        Ok((number()?.parse()?, number()?.parse()?))
    }
}
