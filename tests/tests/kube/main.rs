//! Pods on vGPUs: the node agent with a real apiserver, scheduler, kubelet and containerd.
//!
//! * `lab_cluster`: the lab's cluster, with vgpud and the agent on its node
//! * `pods`: pods and their output
//! * `inside`: what programs in pods do
//! * `claims`: resource claims; `cri`: the calls to containerd that they need
//! * `device_plugin`: pods that ask for a vGPU, and what they can reach
//! * `kills`: deaths of every process
//! * `shares`: engine time of pods
//! * `users_cluster`: pods on a cluster of the user's
//!
//! `cargo lab kube` runs them all, after it has compiled Kubernetes, once. `cargo lab test` runs
//! those that use the lab's cluster, if Kubernetes is compiled, with few deaths.

#![allow(clippy::unwrap_used, reason = "tests")]

mod claims;
mod cri;
mod device_plugin;
mod inside;
mod kills;
mod lab_cluster;
mod pods;
mod shares;
mod users_cluster;
