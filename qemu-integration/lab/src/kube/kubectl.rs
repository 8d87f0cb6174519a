//! Calls of kubectl.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::debs::in_path;
use crate::guest::Output;
use crate::kube::node::Node;

/// kubectl for one cluster.
#[derive(Clone, Copy, Debug)]
pub enum Kubectl<'a> {
    /// The node's kubectl, for the cluster of that node.
    Node(&'a Node),
    /// This machine's kubectl, with a configuration of the user's.
    Host(&'a Path),
}

impl Kubectl<'_> {
    /// Runs kubectl with these words and returns any status. Standard input has `input`.
    pub fn try_run(&self, args: &[&str], input: &str) -> Result<Output> {
        let file = tempfile::NamedTempFile::new()?;
        std::fs::write(file.path(), input)?;
        let mut command = match self {
            Self::Node(node) => node.command(&["kubectl"]),
            Self::Host(_) => Command::new("kubectl"),
        };
        if let Self::Host(config) = self {
            command.arg("--kubeconfig").arg(config);
        }
        command.args(args).stdin(Stdio::from(file.reopen()?));
        Ok(command.output().context("Cannot run kubectl")?.into())
    }

    /// Runs kubectl, which must succeed, and returns its output.
    pub fn run(&self, args: &[&str]) -> Result<String> {
        self.run_with(args, "")
    }

    fn run_with(&self, args: &[&str], input: &str) -> Result<String> {
        let Output { status, stdout, stderr } = self.try_run(args, input)?;
        if status != 0 {
            bail!("`kubectl {}` failed with {status}: {}", args.join(" "), stderr.trim());
        }
        Ok(stdout)
    }

    /// Returns an object, or a list of objects.
    pub fn get(&self, args: &[&str]) -> Result<Value> {
        let mut all = vec!["get", "--output", "json"];
        all.extend(args);
        let text = self.run(&all)?;
        serde_json::from_str(&text).context("kubectl printed no JSON")
    }

    /// Creates or changes objects.
    pub fn apply(&self, objects: &Value) -> Result<()> {
        self.apply_text(&objects.to_string())
    }

    /// Creates or changes objects in YAML or JSON.
    pub fn apply_text(&self, objects: &str) -> Result<()> {
        // Checked by the server alone: kubectl is newer, and knows other fields.
        let args = ["apply", "--validate=false", "--filename", "-"];
        self.run_with(&args, objects).map(drop)
    }

    /// Deletes an object at once and waits until it is gone.
    pub fn delete(&self, kind: &str, name: &str) -> Result<()> {
        self.run(&["delete", kind, name, "--now", "--ignore-not-found"]).map(drop)
    }
}

/// Returns the path of this machine's kubectl, or the reason why there is none.
pub fn on_host() -> Result<PathBuf> {
    in_path("kubectl").context("kubectl is not installed on this machine")
}
