//! Package for the nodes of a Kubernetes cluster: `tessera-kube` with `vgpu-kube`, its service and
//! the objects of the cluster.

use std::fs;
use std::path::PathBuf;

use anyhow::Result;

use super::guest::{finish, read};
use super::{Options, Stage, date, libc_version, output, pages, strip};
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
    let root = scratch.path().join("tessera-kube");
    let stage = Stage { root: &root };
    stage.file("usr/bin/vgpu-kube", 0o755, &fs::read(&program)?)?;
    strip(&root.join("usr/bin/vgpu-kube"));
    for (from, to) in FILES {
        stage.file(to, 0o644, &read(from)?)?;
    }
    let page = String::from_utf8(output(&program, &["man"])?)?;
    let page = pages::tidy(&page, "vgpu-kube", "8", &date("%Y-%m-%d")?);
    stage.packed("usr/share/man/man8/vgpu-kube.8.gz", page.as_bytes())?;
    stage.file("DEBIAN/conffiles", 0o644, b"/etc/default/vgpu-kube\n")?;
    let libc = libc_version(&fs::read(root.join("usr/bin/vgpu-kube"))?);
    let libc = [("@LIBC@", format!("{}.{}", libc.0, libc.1))];
    let package = finish(&stage, options, "kube", "amd64", &["postinst", "prerm"], &libc)?;
    step.done();
    Ok(package)
}
