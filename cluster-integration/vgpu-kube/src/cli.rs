//! Definition of the command line.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Gives containers and KubeVirt VMs of a Kubernetes node vGPUs.
///
/// The agent runs on each node beside vgpud, as root. Pods ask for a share of a GPU by a resource
/// claim (dynamic resource allocation), or for a vGPU of a type by a resource (device plugin).
#[derive(Debug, Parser)]
#[command(name = "vgpu-kube", version, max_term_width = 100)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// Commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the agent of this node
    Run(Run),
    /// Check what this node and its cluster lack, with the fix for each problem
    Doctor(Doctor),
    /// Print the objects that the cluster needs, for `kubectl apply -f -`
    Manifests(Manifests),
    /// Add a vGPU to the domain of a KubeVirt VM, as a sidecar of its pod
    Hook(Hook),
    /// Print the manual page
    #[command(hide = true)]
    Man,
}

/// Access to the apiserver.
#[derive(Args, Clone, Debug)]
pub struct Access {
    /// Access to the apiserver [default: $KUBECONFIG, ~/.kube/config, or that of a pod]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
}

/// Arguments that `run` and `doctor` share: the node, and what runs on it.
#[derive(Args, Clone, Debug)]
pub struct Common {
    /// Name of this node in the cluster
    #[arg(long, value_name = "NAME")]
    pub node: String,

    /// Access to the apiserver
    #[command(flatten)]
    pub access: Access,

    /// Control socket of vgpud
    #[arg(long, value_name = "PATH", default_value = "/run/vgpud/control.sock")]
    pub control_socket: PathBuf,

    /// Folder of kubelet
    #[arg(long, value_name = "DIR", default_value = "/var/lib/kubelet")]
    pub plugin_dir: PathBuf,

    /// Preload library for containers [default: libtessera_cuda.so of the package]
    #[arg(long, value_name = "FILE")]
    pub library: Option<PathBuf>,
}

/// Arguments of `doctor`.
#[derive(Args, Clone, Debug)]
pub struct Doctor {
    /// The node and what runs on it
    #[command(flatten)]
    pub common: Common,
}

/// Arguments of `manifests`.
#[derive(Args, Clone, Debug)]
pub struct Manifests {
    /// Print the account of the agent on this node instead
    #[arg(long, value_name = "NAME")]
    pub node: Option<String>,
}

/// Arguments of `hook`.
#[derive(Args, Clone, Debug)]
pub struct Hook {
    /// Request of the VM's claim that the vGPU is for; several times for several vGPUs [default:
    /// vgpu]
    #[arg(long, value_name = "REQUEST")]
    pub vgpu: Vec<String>,

    /// Socket to serve [default: tessera-vgpu.sock in /var/run/kubevirt-hooks]
    #[arg(long, value_name = "PATH", conflicts_with = "domain")]
    pub socket: Option<PathBuf>,

    /// Print this domain's XML with the vGPU, as KubeVirt's sidecar-shim runs it
    #[arg(long, value_name = "XML")]
    pub domain: Option<String>,

    /// The VM's object in JSON, which sidecar-shim passes; not used
    #[arg(long, value_name = "JSON")]
    pub vmi: Option<String>,
}

/// Arguments of `run`.
#[derive(Args, Clone, Debug)]
pub struct Run {
    /// The node and what runs on it
    #[command(flatten)]
    pub common: Common,

    /// Folder of the Container Device Interface, which the container runtime reads
    #[arg(long, value_name = "DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,

    /// Folder for records of prepared claims, empty after a reboot
    #[arg(long, value_name = "DIR", default_value = "/run/vgpu-kube")]
    pub state_dir: PathBuf,

    /// Serve device plugins: a resource tessera.io/TYPE for each vGPU type
    ///
    /// Without --device-plugin and --dra, the agent serves claims if the apiserver has
    /// resource.k8s.io/v1, and device plugins otherwise.
    #[arg(long)]
    pub device_plugin: bool,

    /// Serve resource claims: the driver gpu.tessera.dev
    #[arg(long)]
    pub dra: bool,

    /// User, by number, that containers with a device of a device plugin run as
    ///
    /// Kubelet does not name the pod to a device plugin. Root of the host may use every vGPU.
    /// Claims need no such setting: their vGPUs belong to the user in the pod's security context.
    #[arg(long, value_name = "UID", default_value_t = 0)]
    pub device_owner: u32,

    /// Seconds after which the vGPU of a device plugin is stopped that kubelet lists for no pod
    ///
    /// It has to be longer than the time from kubelet's call to the pod's entry in kubelet's list.
    #[arg(long, value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u16).range(2..=3600))]
    pub stop_unused_after: u16,

    /// Serve Prometheus' metrics at /metrics of this loopback address, such as 127.0.0.1:9470
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub metrics: Option<SocketAddr>,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
