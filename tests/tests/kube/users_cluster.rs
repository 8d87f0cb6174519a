//! Pods on a cluster of the user's, whose nodes run vgpud and the agent.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use lab::kube::kubectl::{self, Kubectl};
use lab::kube::{CONFIG_VARIABLE, IMAGE_FILE_VARIABLE, IMAGE_VARIABLE, Kubernetes};
use lab::progress::Progress;
use lab::root::Root;
use system_tests::skipped;

use crate::device_plugin::compute_and_reach_nothing_else;
use crate::lab_cluster::{LabCluster, RESOURCE, TEST_IMAGE, write_test_image};
use crate::pods::{Interface, Pods};
use crate::shares;

/// Variable that is set where the user's cluster is the lab's, which has no network plugin.
const IS_LAB: &str = "TESSERA_TEST_KUBE_IS_LAB";

/// Writes the image that the user gives to the cluster.
#[test]
#[ignore = "for `cargo lab kube --write-image`"]
fn image() -> Result<()> {
    let Some(file) = std::env::var_os(IMAGE_FILE_VARIABLE).map(PathBuf::from) else {
        return Ok(());
    };
    let busybox = Root::open(&Progress::new())?.kernel.busybox;
    write_test_image(&busybox, &file)?;
    println!("{}: the image {TEST_IMAGE}", file.display());
    Ok(())
}

#[test]
#[ignore = "runs on a cluster of the user's"]
fn pods_compute_with_their_shares_and_reach_nothing_else() -> Result<()> {
    let Some(config) = std::env::var_os(CONFIG_VARIABLE).map(PathBuf::from) else {
        skipped(
            "a cluster of the user's: `cargo lab kube --kubeconfig FILE --image NAME` names one",
        );
        return Ok(());
    };
    kubectl::on_host()?;
    let image = std::env::var(IMAGE_VARIABLE).context("No image")?;
    let kubectl = Kubectl::Host(&config);
    let host_network = std::env::var_os(IS_LAB).is_some();
    let pods = Pods { kubectl, image: &image, host_network, by: interface(kubectl)? };
    println!("pods ask for vGPUs by {:?}", pods.by);
    compute_and_reach_nothing_else(&pods)?;
    shares::are_kept(&pods)
}

/// Returns the interface of the cluster's agents.
fn interface(kubectl: Kubectl<'_>) -> Result<Interface> {
    let nodes = kubectl.get(&["nodes"])?;
    let mut nodes = nodes["items"].as_array().into_iter().flatten();
    if nodes.any(|node| node["status"]["allocatable"].get(RESOURCE).is_some()) {
        return Ok(Interface::DevicePlugin);
    }
    let class = kubectl.try_run(&["get", "deviceclass", "gpu.tessera.dev"], "")?;
    ensure!(
        class.status == 0,
        "No node offers {RESOURCE}, and there is no DeviceClass gpu.tessera.dev"
    );
    Ok(Interface::Claims)
}

/// The lab's cluster as a user's: by a configuration, and with this machine's kubectl.
#[test]
#[ignore = "runs a Kubernetes cluster"]
fn a_configuration_leads_to_a_cluster() -> Result<()> {
    let Some(lab) = LabCluster::start()? else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    let config = folder.path().join("config");
    std::fs::write(&config, lab.cluster.kubeconfig_outside().to_string())?;
    let kubernetes = Kubernetes::cached()?.context("Kubernetes has disappeared")?;
    symlink(kubernetes.root().join("usr/bin/kubectl"), folder.path().join("kubectl"))?;
    let path = std::env::var("PATH")?;
    let mut command = Command::new("nsenter");
    command.arg(format!("--net=/proc/{}/ns/net", lab.cluster.node().init()));
    command.arg(std::env::current_exe()?).args(["users_cluster::pods", "--ignored", "--nocapture"]);
    command.env("PATH", format!("{}:{path}", folder.path().display())).env(IS_LAB, "1");
    let output = command.env(CONFIG_VARIABLE, &config).env(IMAGE_VARIABLE, TEST_IMAGE).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success() && text.contains("1 passed"), "{text}{errors}");
    ensure!(text.contains("pods ask for vGPUs by DevicePlugin"), "{text}");
    lab.wait_until_nothing_is_left()
}
