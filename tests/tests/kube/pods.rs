//! Pods that run this test program, and their output.

use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use lab::kube::kubectl::Kubectl;
use serde_json::{Value, json};

use crate::inside::MARK;

/// User of the pods' processes.
pub const USER: u32 = 1000;

const LIMIT: Duration = Duration::from_secs(60);

/// A pod to be made.
#[derive(Clone, Debug)]
pub struct Pod {
    /// Name.
    pub name: String,
    /// Resource of which the pod wants one.
    pub resource: Option<String>,
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
}

impl Pod {
    /// Returns a pod that runs one of [`crate::inside`] on a vGPU.
    pub fn new(name: &str, program: &'static str, resource: &str) -> Self {
        Self { resource: Some(resource.to_owned()), ..Self::without_vgpu(name, program) }
    }

    /// Returns a pod without a vGPU.
    pub fn without_vgpu(name: &str, program: &'static str) -> Self {
        Self { name: name.to_owned(), resource: None, program, user: USER }
    }

    fn object(&self, image: &str) -> Value {
        let program = format!("inside::{}", self.program);
        let resources = self.resource.iter().map(|name| (name.clone(), json!("1")));
        let limits: serde_json::Map<_, _> = resources.collect();
        json!({
            "apiVersion": "v1", "kind": "Pod",
            "metadata": { "name": self.name, "labels": { "app": "tessera-test" } },
            "spec": {
                "restartPolicy": "Never",
                // The lab's cluster has no network plugin.
                "hostNetwork": true,
                "automountServiceAccountToken": false,
                "terminationGracePeriodSeconds": 1,
                "containers": [{
                    "name": "main", "image": image, "imagePullPolicy": "IfNotPresent",
                    "command": ["/program", "--exact", program, "--ignored", "--nocapture"],
                    "env": [{ "name": MARK, "value": "1" }],
                    "securityContext": { "runAsUser": self.user },
                    "resources": { "limits": limits },
                }],
            },
        })
    }
}

impl Pods<'_> {
    /// Makes a pod.
    pub fn start(&self, pod: &Pod) -> Result<()> {
        self.kubectl.apply(&pod.object(self.image))
    }

    /// Runs a pod, whose program must succeed, and returns its output.
    pub fn run(&self, pod: &Pod) -> Result<String> {
        self.start(pod)?;
        let phase = self.wait_for_phase(&pod.name, &["Succeeded", "Failed"])?;
        let log = self.log(&pod.name)?;
        ensure!(phase == "Succeeded" && log.contains("1 passed"), "{}: {phase}: {log}", pod.name);
        self.delete(&pod.name)?;
        Ok(log)
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

    /// Deletes a pod and waits until it is gone.
    pub fn delete(&self, name: &str) -> Result<()> {
        self.kubectl.delete("pod", name).with_context(|| format!("{name} is not deleted"))
    }

    /// Returns the work that a pod has reported: rounds, and the time of the last one in seconds.
    pub fn work(&self, name: &str) -> Result<(u64, f64)> {
        let line = self.wait_for_line(name, "round ")?;
        let mut words = line.split(' ').skip(1);
        let mut number = || words.next().context("A short line");
        Ok((number()?.parse()?, number()?.parse()?))
    }
}
