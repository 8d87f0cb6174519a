//! Generates the gRPC messages and services of kubelet and KubeVirt, without protoc.

use std::error::Error;

/// Definitions, in `proto/`.
const FILES: [&str; 8] = [
    "deviceplugin_v1beta1.proto",
    "dra_v1.proto",
    "dra_v1beta1.proto",
    "kubevirt_hooks_info.proto",
    "kubevirt_hooks_v1alpha3.proto",
    "kubevirt_plugins_v1alpha1.proto",
    "pluginregistration_v1.proto",
    "podresources_v1.proto",
];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(FILES, ["proto"])?;
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
