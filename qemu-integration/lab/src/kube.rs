//! A Kubernetes cluster of one node, from Debian's packages alone.
//!
//! * [`source`]: apiserver, scheduler and kubelet, compiled from Debian's source package
//! * [`node`]: the node: a Debian in namespaces of its own, with containerd
//! * [`cluster`]: etcd, apiserver, scheduler and kubelet on the node
//! * [`resource_types`]: types of dynamic resource allocation, which this Kubernetes lacks
//! * [`kubectl`]: calls of kubectl, for this cluster or for another one
//! * [`image`]: container images made of a program of this machine
//!
//! Debian has containerd, runc, etcd and kubectl, but no programs of a control plane and no
//! kubelet. Compiling them takes some ten minutes. They are cached.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::cleanup::Scratch;
use crate::debs::{self, Debs};
use crate::progress::Progress;
use crate::root::{cache_folder, lock};

pub mod cluster;
pub mod image;
pub mod kubectl;
pub mod node;
pub mod resource_types;
pub mod source;

/// Environment variable of the tests: number of deaths of each process.
pub const KILLS_VARIABLE: &str = "TESSERA_TEST_KUBE_KILLS";
/// Environment variable of the tests: configuration of the user's cluster.
pub const CONFIG_VARIABLE: &str = "TESSERA_TEST_KUBECONFIG";
/// Environment variable of the tests: image of pods in the user's cluster.
pub const IMAGE_VARIABLE: &str = "TESSERA_TEST_KUBE_IMAGE";
/// Environment variable of the tests: file to write that image to.
pub const IMAGE_FILE_VARIABLE: &str = "TESSERA_TEST_KUBE_IMAGE_FILE";

/// Version of the cached folder's contents.
const LAYOUT: &str = "1";

/// Packages of the node, from Debian's release.
const PACKAGES: [&str; 9] = [
    "?essential",
    "busybox-static",
    "containerd",
    "etcd-server",
    "iproute2",
    "kubectl",
    "mount",
    "openssl",
    "procps",
];

/// Parts of the packages that the node does not read.
const NOT_NEEDED: [&str; 3] = ["usr/share/doc", "usr/share/locale", "usr/share/man"];

/// Everything that a cluster runs: the root of its node.
#[derive(Clone, Debug)]
pub struct Kubernetes {
    root: PathBuf,
}

impl Kubernetes {
    /// Returns the reason why this machine cannot run a cluster, if any.
    pub fn impossible() -> Option<String> {
        node::impossible()
    }

    /// Finds Kubernetes in the cache.
    pub fn cached() -> Result<Option<Self>> {
        let root = folder()?.join("root");
        Ok(root.exists().then_some(Self { root }))
    }

    /// Finds Kubernetes in the cache, or fetches and compiles it.
    pub fn open(progress: &Progress) -> Result<Self> {
        if let Some(found) = Self::cached()? {
            return Ok(found);
        }
        let folder = folder()?;
        // Has a lock of its own: other parts of the lab need not wait for the compiler.
        let _lock = lock(&folder, progress)?;
        if let Some(found) = Self::cached()? {
            return Ok(found);
        }
        let partial = Scratch::at(folder.join("partial"))?;
        let root = partial.path().join("root");
        fetch(&folder.join("fetched"), &root, progress)?;
        let programs = root.join("usr/local/bin");
        fs::create_dir_all(&programs)?;
        source::compile(&folder, &programs, progress).context("Cannot compile Kubernetes")?;
        fs::rename(&root, folder.join("root")).context("Cannot keep the compiled Kubernetes")?;
        let _ = fs::remove_dir_all(folder.join("fetched"));
        Self::cached()?.context("The compiled Kubernetes has disappeared")
    }

    /// Returns the root folder of the node.
    pub fn root(&self) -> &Path {
        &self.root
    }
}

/// Returns the cached folder.
fn folder() -> Result<PathBuf> {
    Ok(cache_folder()?.join(format!("kubernetes-{}-{LAYOUT}", source::VERSION)))
}

/// Fetches and unpacks the node's packages.
fn fetch(fetched: &Path, root: &Path, progress: &Progress) -> Result<()> {
    let step = progress.step("Fetching containerd, etcd and kubectl");
    let debs = Debs::open(fetched)?;
    debs.fetch_chosen(&PACKAGES)?;
    fs::create_dir_all(root)?;
    debs::unpack(&debs.packages()?, root)?;
    for part in NOT_NEEDED {
        let _ = fs::remove_dir_all(root.join(part));
    }
    step.done();
    Ok(())
}
