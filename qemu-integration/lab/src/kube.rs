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

use crate::cache::{self, cache_folder};
use crate::debs::{self, Debs};
use crate::progress::Progress;

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
/// Folder of the node's root in the cached folder.
const ROOT: &str = "root";

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
        Ok(Self::at(&folder()?.join(ROOT)))
    }

    /// Finds Kubernetes in the cache, or fetches and compiles it.
    pub fn open(progress: &Progress) -> Result<Self> {
        // Has a lock of its own: other parts of the lab need not wait for the compiler.
        let cache = folder()?;
        cache::find_or_prepare(&cache, ROOT, progress, Self::at, |root, fetched| {
            fetch(fetched, root, progress)?;
            let programs = root.join("usr/local/bin");
            fs::create_dir_all(&programs)?;
            source::compile(&cache, &programs, progress).context("Cannot compile Kubernetes")
        })
    }

    fn at(root: &Path) -> Option<Self> {
        root.exists().then(|| Self { root: root.to_owned() })
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
    debs::unpack(&debs.packages()?, root)?;
    debs::remove_parts(root, &NOT_NEEDED);
    step.done();
    Ok(())
}
