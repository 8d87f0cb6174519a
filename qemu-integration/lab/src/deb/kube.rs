//! Package for the nodes of a Kubernetes cluster: `tessera-kube` with `vgpu-kube`, its service and
//! the objects of the cluster.

use std::path::PathBuf;

use anyhow::Result;

use super::{Options, Stage, output};
use crate::build;
use crate::cleanup::Scratch;
use crate::progress::Progress;

/// Files: source and target.
const FILES: [(&str, &str); 7] = [
    ("packaging/vgpu-kube.service", "usr/lib/systemd/system/vgpu-kube.service"),
    ("packaging/vgpu-kube.default", "etc/default/vgpu-kube"),
    ("docs/kubernetes.md", "usr/share/doc/tessera-kube/kubernetes.md"),
    ("packaging/debian/copyright", "usr/share/doc/tessera-kube/copyright"),
    (
        "cluster-integration/manifests/example-pod.yaml",
        "usr/share/doc/tessera-kube/examples/pod.yaml",
    ),
    (
        "cluster-integration/manifests/example-device-plugin.yaml",
        "usr/share/doc/tessera-kube/examples/device-plugin.yaml",
    ),
    (
        "cluster-integration/manifests/example-kubevirt.yaml",
        "usr/share/doc/tessera-kube/examples/kubevirt.yaml",
    ),
];

/// Writes the package and returns its path.
pub fn write(options: &Options, progress: &Progress) -> Result<PathBuf> {
    let program = build::kube(options.profile, progress)?;
    let step = progress.step("Putting the cluster's package together");
    let scratch = Scratch::new()?;
    let stage = Stage::new(scratch.path(), "tessera-kube", "packaging/debian/kube");
    stage.binary("usr/bin/vgpu-kube", &program)?;
    stage.copies(&FILES)?;
    stage.page("vgpu-kube", "8", &String::from_utf8(output(&program, &["man"])?)?)?;
    stage.file("DEBIAN/conffiles", 0o644, b"/etc/default/vgpu-kube\n")?;
    let libc = [stage.libc(&["usr/bin/vgpu-kube"])?];
    let package = stage.finish(options, "amd64", &["postinst", "prerm"], &libc)?;
    step.done();
    Ok(package)
}
