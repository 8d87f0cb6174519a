//! Pods on a cluster of the user's, whose nodes run vgpud and the agent.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use lab::kube::kubectl::{self, Kubectl};
use lab::kube::{CONFIG_VARIABLE, IMAGE_FILE_VARIABLE, IMAGE_VARIABLE};
use lab::progress::Progress;
use lab::root::Root;
use system_tests::skipped;

use crate::lab_cluster::{RESOURCE, write_test_image};
use crate::pods::{Pod, Pods};

/// Writes the image that the user gives to the cluster.
#[test]
#[ignore = "for `cargo lab kube --write-image`"]
fn image() -> Result<()> {
    let Some(file) = std::env::var_os(IMAGE_FILE_VARIABLE).map(PathBuf::from) else {
        return Ok(());
    };
    let busybox = Root::open(&Progress::new())?.kernel.busybox;
    write_test_image(&busybox, &file)?;
    println!("{}: the image {}", file.display(), crate::lab_cluster::TEST_IMAGE);
    Ok(())
}

#[test]
#[ignore = "runs on a cluster of the user's"]
fn pods_compute_on_vgpus_and_reach_nothing_else() -> Result<()> {
    let Some(config) = std::env::var_os(CONFIG_VARIABLE).map(PathBuf::from) else {
        skipped(
            "a cluster of the user's: `cargo lab kube --kubeconfig FILE --image NAME` names one",
        );
        return Ok(());
    };
    kubectl::on_host()?;
    let image = std::env::var(IMAGE_VARIABLE).context("No image")?;
    let pods = Pods { kubectl: Kubectl::Host(&config), image: &image };
    for name in ["tessera-first", "tessera-second"] {
        pods.start(&Pod::new(name, "computes", RESOURCE))?;
    }
    for name in ["tessera-first", "tessera-second"] {
        pods.work(name)?;
    }
    pods.run(&Pod::without_vgpu("tessera-without", "sees_no_gpu"))?;
    pods.run(&Pod::new("tessera-forger", "cannot_get_around_its_vgpu", RESOURCE))?;
    for name in ["tessera-first", "tessera-second"] {
        ensure!(pods.phase(name)? == "Running", "{name} has ended: {}", pods.log(name)?);
        pods.delete(name)?;
    }
    Ok(())
}
