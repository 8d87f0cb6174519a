//! The lab's cluster, with vgpud and the agent on its node.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use lab::build::{self, Profile};
use lab::cuda_libraries::CudaLibraries;
use lab::kube::Kubernetes;
use lab::kube::cluster::{AGENT_CONFIG, BASE_IMAGE, Cluster, NODE};
use lab::kube::image::Image;
use lab::progress::Progress;
use serde_json::Value;
use system_tests::{cuda_library, skipped, vgpud};

use crate::pods::{Interface, Pods, Size, USER};

/// Resource of the vGPUs.
pub const RESOURCE: &str = Size::Quarter.resource();
/// vGPUs of that type that the parent has room for.
pub const ROOM: u64 = 4;

/// Folder of CDI files that the agent writes.
const CDI: &str = "/run/cdi";
/// Folder where the node's programs find NVIDIA's libraries.
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Seconds after which the agent stops the vGPU of a pod that has ended.
const STOP_UNUSED_AFTER: u32 = 3;

const VGPUD: &str = "/usr/bin/vgpud run --parent soft:soft0,vram=8G";

/// The agent's rights. The lab's apiserver is too old for the policies beside them.
const RIGHTS: &str = include_str!("../../../cluster-integration/manifests/rbac.yaml");

/// A cluster whose node has vgpud and the agent.
#[derive(Debug)]
pub struct LabCluster {
    /// The cluster.
    pub cluster: Cluster,
}

impl LabCluster {
    /// Starts a cluster without Tessera; `None` if this machine cannot.
    pub fn bare() -> Result<Option<Self>> {
        let Some(kubernetes) = kubernetes()? else { return Ok(None) };
        let images = tempfile::tempdir()?;
        let busybox = kubernetes.root().join("usr/bin/busybox");
        Image::new(BASE_IMAGE, &busybox)?.write(&images.path().join("base.tar"))?;
        write_test_image(&busybox, &images.path().join("test.tar"))?;
        let cluster = Cluster::start(&kubernetes, &images.path().join("base.tar"))?;
        cluster.import(&images.path().join("test.tar"))?;
        Ok(Some(Self { cluster }))
    }

    /// Starts a cluster, vgpud and the agent; `None` if this machine cannot.
    pub fn start() -> Result<Option<Self>> {
        let Some(this) = Self::bare()? else { return Ok(None) };
        this.install()?;
        this.start_vgpud()?;
        this.cluster.serve_resource_types()?;
        this.cluster.kubectl().apply_text(RIGHTS)?;
        this.start_agent()?;
        this.wait_for_room(ROOM)?;
        Ok(Some(this))
    }

    /// Installs vgpud, vgpuctl, the agent, the preload library and NVIDIA's libraries.
    fn install(&self) -> Result<()> {
        let node = self.cluster.node();
        for name in ["vgpud", "vgpuctl"] {
            node.install(&vgpud()?.with_file_name(name), &format!("/usr/bin/{name}"))?;
        }
        node.install(&build::kube(Profile::Dev, &Progress::new())?, "/usr/bin/vgpu-kube")?;
        let preload = format!("/usr/lib/tessera/{}", build::CUDA_LIBRARY);
        node.install(cuda_library()?, &preload)?;
        let libraries = CudaLibraries::open(&Progress::new())?.folder();
        for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            node.install(&libraries.join(name), &format!("{LIBRARIES}/{name}"))?;
        }
        Ok(())
    }

    /// Starts vgpud, initially or after it was killed.
    pub fn start_vgpud(&self) -> Result<()> {
        let node = self.cluster.node();
        node.start_service("vgpud", VGPUD)?;
        let ready = node.wait_for("vgpud answers", || {
            ensure!(node.is_running(node.service("vgpud")?), "vgpud has ended");
            Ok(node.run("vgpuctl list")?.status == 0)
        });
        ready.with_context(|| node.log("vgpud"))
    }

    /// Starts the agent, initially or after it was killed.
    pub fn start_agent(&self) -> Result<()> {
        let command = format!(
            "/usr/bin/vgpu-kube run --node {NODE} --kubeconfig {AGENT_CONFIG} --dra \
             --device-plugin --device-owner {USER} --stop-unused-after {STOP_UNUSED_AFTER}"
        );
        self.cluster.node().start_service("vgpu-kube", &command)
    }

    /// Returns how often kubelet has taken the device plugin of [`RESOURCE`], of all agents so far.
    pub fn registrations(&self) -> usize {
        let log = self.cluster.node().read("/var/log/vgpu-kube.log");
        let line = format!("Kubelet has the device plugin of {RESOURCE}");
        log.lines().filter(|one| one.ends_with(&line)).count()
    }

    /// Waits for a registration after this number of them. Until then, the node's state may be that
    /// of an earlier kubelet or agent, and kubelet refuses pods.
    pub fn wait_for_registration(&self, before: usize) -> Result<()> {
        let node = self.cluster.node();
        let what = format!("kubelet has the device plugin of {RESOURCE}");
        let registered = node.wait_for(&what, || Ok(self.registrations() > before));
        registered.with_context(|| format!("{}\n{}", node.log("vgpu-kube"), node.log("kubelet")))
    }

    /// Returns the pods of the cluster.
    pub fn pods(&self) -> Pods<'_> {
        Pods {
            kubectl: self.cluster.kubectl(),
            image: TEST_IMAGE,
            host_network: true,
            by: Interface::DevicePlugin,
        }
    }

    /// Waits until the node offers this number of vGPUs.
    pub fn wait_for_room(&self, room: u64) -> Result<()> {
        let node = self.cluster.node();
        let offered = node.wait_for(&format!("the node offers {room} of {RESOURCE}"), || {
            let state = self.cluster.kubectl().get(&["node", NODE])?;
            let text = state["status"]["allocatable"][RESOURCE].as_str().unwrap_or("0");
            Ok(text.parse() == Ok(room))
        });
        offered.with_context(|| format!("{}\n{}", node.log("vgpu-kube"), node.log("kubelet")))
    }

    /// Returns the vGPUs that run.
    pub fn vgpus(&self) -> Result<Vec<Value>> {
        let text = self.cluster.node().sh("vgpuctl list --output json")?;
        let all: Vec<Value> = serde_json::from_str(&text)?;
        Ok(all.into_iter().filter(|vgpu| vgpu["state"] != "stopped").collect())
    }

    /// Waits until this number of vGPUs run, and as many CDI files or fewer exist.
    pub fn wait_until_left(&self, count: usize) -> Result<()> {
        let what = format!("{count} vGPUs and their CDI files are left");
        let left = self.cluster.node().wait_for(&what, || {
            Ok(self.vgpus()?.len() == count && self.cdi_files().len() <= count)
        });
        left.with_context(|| format!("{:?}, {:?}", self.vgpus(), self.cdi_files()))
    }

    /// Waits until no vGPU and no CDI file is left, and all of the GPU's memory is free.
    pub fn wait_until_nothing_is_left(&self) -> Result<()> {
        self.wait_until_left(0)?;
        let types = self.cluster.node().sh("vgpuctl types --output json")?;
        let parents: Value = serde_json::from_str(&types)?;
        let types = parents[0]["types"].as_array().context("No types")?;
        let free = types.iter().find(|one| one["name"] == "SOFT-2C").context("No type")?;
        ensure!(free["available_instances"].as_u64() == Some(ROOM), "{free}");
        Ok(())
    }

    /// Returns the names of CDI files.
    pub fn cdi_files(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.cluster.node().path(CDI));
        let names = entries.into_iter().flatten().flatten().map(|entry| entry.file_name());
        names.map(|name| name.to_string_lossy().into_owned()).collect()
    }
}

/// Name of the image with this test program.
pub const TEST_IMAGE: &str = "tessera.test/kube:1";

/// Returns Kubernetes, if this machine can run it and it is compiled.
fn kubernetes() -> Result<Option<Kubernetes>> {
    if let Some(reason) = Kubernetes::impossible() {
        skipped(&format!("a Kubernetes cluster: {reason}"));
        return Ok(None);
    }
    let found = Kubernetes::cached()?;
    if found.is_none() {
        skipped("Kubernetes is not compiled: run `cargo lab kube` once, which takes ten minutes");
    }
    Ok(found)
}

/// Writes the image with this test program.
pub fn write_test_image(busybox: &Path, to: &Path) -> Result<()> {
    let mut image = Image::new(TEST_IMAGE, busybox)?;
    image.add_program(&std::env::current_exe()?, "/program")?;
    // libcuda itself is the node's.
    image.add_libraries(&CudaLibraries::open(&Progress::new())?.folder().join("libcuda.so.1"))?;
    image.write(to)
}
