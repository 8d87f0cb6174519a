//! Kubelet's device plugins, v1beta1: one resource for each vGPU type, for clusters without dynamic
//! resource allocation.
//!
//! * [`devices`]: the devices of each resource, and their health
//! * [`service`]: the calls of kubelet
//! * [`registration`]: sockets and registrations, again for each new kubelet
//! * [`reaper`]: stops vGPUs of pods that have ended

pub mod devices;
pub mod reaper;
pub mod registration;
pub mod service;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::dra::cluster::Cluster;
use crate::host::Libraries;
use crate::metrics::Metrics;
use crate::vgpus::Vgpus;
use devices::{Inventory, Resource};
use registration::Plugin;

/// Interval of queries to vgpud and of looks at kubelet's socket. Both are local and cheap.
const INTERVAL: Duration = Duration::from_secs(1);
/// Time without an answer of vgpud after which all devices are unhealthy. A restart of vgpud takes
/// about a second, and vGPUs continue.
const SILENCE_LIMIT: Duration = Duration::from_secs(30);

/// What all device plugins share.
#[derive(Debug)]
pub struct Context {
    /// Operations on vGPUs.
    pub vgpus: Vgpus,
    /// Name of the node, part of the UUIDs of vGPUs.
    pub node: String,
    /// Kubelet's folder.
    pub plugin_dir: PathBuf,
    /// Libraries for containers.
    pub libraries: Libraries,
    /// User that the containers run as.
    pub owner: u32,
    /// Time after which a vGPU that kubelet lists for no pod is stopped.
    pub stop_unused_after: Duration,
    /// The apiserver, for events of the node.
    pub cluster: Option<Cluster>,
    /// Counters.
    pub metrics: Metrics,
}

/// Serves a device plugin for each vGPU type, until the future is dropped.
pub async fn run(context: Context) {
    let context = Arc::new(context);
    let mut plugins: BTreeMap<Resource, (watch::Sender<Inventory>, Plugin)> = BTreeMap::new();
    let mut reaper = reaper::Reaper::new(context.stop_unused_after);
    let mut last_answer = Instant::now();
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        match devices::inventories(&context).await {
            Ok(inventories) => {
                last_answer = Instant::now();
                for (resource, inventory) in inventories {
                    let (sender, _) = plugins.entry(resource.clone()).or_insert_with(|| {
                        let (sender, receiver) = watch::channel(Inventory::default());
                        (sender, Plugin::new(Arc::clone(&context), resource, receiver))
                    });
                    set(sender, inventory);
                }
            }
            Err(error) => {
                log::debug!("vgpud does not answer: {error}");
                if last_answer.elapsed() > SILENCE_LIMIT {
                    for (sender, _) in plugins.values() {
                        let unhealthy = sender.borrow().unhealthy();
                        set(sender, unhealthy);
                    }
                }
            }
        }
        for (_, plugin) in plugins.values_mut() {
            plugin.keep_registered().await;
        }
        let known = plugins.iter().map(|(resource, (sender, _))| (resource, sender));
        reaper.run(&context, known.map(|(resource, sender)| (resource, sender.borrow()))).await;
    }
}

/// Sets what a channel has. Only a change wakes its receivers.
pub(crate) fn set<T: PartialEq>(sender: &watch::Sender<T>, value: T) {
    sender.send_if_modified(|current| {
        let changed = *current != value;
        *current = value;
        changed
    });
}
