//! Node agent of Kubernetes for Tessera: gives containers and KubeVirt VMs vGPUs.
//!
//! * [`cli`]: definition of the command line
//! * [`agent`]: the long-running agent of a node
//! * [`host`]: libraries of the host for containers
//! * [`vgpus`]: vGPUs of containers, made and stopped through vgpud's control API
//! * [`injection`]: what a container gets of a vGPU
//! * [`device_plugin`]: kubelet's device plugins, v1beta1
//! * [`dra`]: dynamic resource allocation: the driver `gpu.tessera.dev`
//! * [`hook`]: hooks of KubeVirt, which add a vGPU to a VM's domain
//! * [`doctor`]: checks of node and cluster, with fixes
//! * [`manifests`]: objects that the cluster needs
//! * [`metrics`]: counters for Prometheus
//! * [`quantity`]: quantities of Kubernetes
//! * [`grpc`]: gRPC over UNIX sockets; [`proto`]: its messages

pub mod agent;
pub mod cli;
pub mod device_plugin;
pub mod doctor;
pub mod dra;
pub mod grpc;
pub mod hook;
pub mod host;
pub mod injection;
pub mod manifests;
pub mod metrics;
pub mod proto;
pub mod quantity;
pub mod vgpus;
