//! The agent with a real vgpud on the software GPU. Kubelet is played by clients and servers of the
//! same interfaces; the apiserver is a stand-in that stores objects and counts requests.
//!
//! * `apiserver`: the stand-in; `bed`: vgpud, agent and kubelet's folders
//! * `claims`: prepare and unprepare, by kubelet's calls
//! * `resilience`: kills of agent and vgpud
//! * `slices`: what is published, and how often
//! * `device_plugin`: device plugins
//! * `commands`: the other commands

mod apiserver;
mod bed;
mod claims;
mod commands;
mod device_plugin;
mod resilience;
mod slices;
