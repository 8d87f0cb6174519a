//! The long-running agent of a node.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use kube::Client as KubeClient;
use kube::config::{Config, KubeConfigOptions, Kubeconfig};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use vgpud_client::Client;

use crate::cli::{Access, Run};
use crate::device_plugin;
use crate::dra::cdi::CdiDir;
use crate::dra::cluster::{Cluster, limited};
use crate::dra::driver::{Driver, Locks};
use crate::dra::publisher::Publisher;
use crate::dra::records::Records;
use crate::dra::{inventory, reconcile, service};
use crate::host::Libraries;
use crate::metrics::Metrics;
use crate::vgpus::Vgpus;

/// Group of the apiserver's interface for claims, and its version.
pub const RESOURCE_API: (&str, &str) = ("resource.k8s.io", "v1");

/// Interfaces of kubelet that the agent serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Interfaces {
    device_plugin: bool,
    dra: bool,
}

/// Runs the agent until SIGTERM or SIGINT. vGPUs continue without it.
pub async fn run(args: Run) -> Result<()> {
    let mut terminated = signal(SignalKind::terminate()).context("Cannot wait for signals")?;
    let mut interrupted = signal(SignalKind::interrupt()).context("Cannot wait for signals")?;
    tokio::select! {
        result = serve(args) => result,
        _ = terminated.recv() => Ok(()),
        _ = interrupted.recv() => Ok(()),
    }
}

async fn serve(args: Run) -> Result<()> {
    let metrics = Metrics::new()?;
    let libraries = Libraries::find(args.common.library.as_deref());
    if libraries.preload.is_none() {
        log::warn!("There is no preload library: containers get no CUDA; see --library");
    }
    let vgpus = Vgpus::new(Client::new(args.common.control_socket.clone()));
    let interfaces = interfaces(&args).await?;
    let cluster = if interfaces.dra {
        Some(Cluster::new(connect(&args.common.access).await?, &args.common.node))
    } else {
        // Device plugins alone need no apiserver.
        None
    };
    if interfaces.dra && interfaces.device_plugin {
        log::warn!(
            "Serving claims and device plugins: a pod that finds the GPU used by pods of the other \
             interface is refused"
        );
    }
    let plugins = device_plugin::Context {
        vgpus: vgpus.clone(),
        node: args.common.node.clone(),
        plugin_dir: args.common.plugin_dir.clone(),
        libraries: libraries.clone(),
        owner: args.device_owner,
        cluster: cluster.clone(),
        stop_unused_after: Duration::from_secs(args.stop_unused_after.into()),
        metrics: metrics.clone(),
    };
    let serve_plugins = async {
        if !interfaces.device_plugin {
            std::future::pending::<()>().await;
        }
        device_plugin::run(plugins).await;
        Ok(())
    };
    let serve_claims = async {
        match cluster {
            Some(cluster) => Box::pin(dra(&args, cluster, vgpus, libraries, metrics.clone())).await,
            None => std::future::pending().await,
        }
    };
    let serve_metrics = async {
        match args.metrics {
            Some(address) => metrics.clone().serve(address).await,
            None => std::future::pending().await,
        }
    };
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    tokio::select! {
        result = serve_plugins => result,
        result = serve_claims => result,
        result = serve_metrics => result,
    }
}

/// Serves claims.
async fn dra(
    args: &Run,
    cluster: Cluster,
    vgpus: Vgpus,
    libraries: Libraries,
    metrics: Metrics,
) -> Result<()> {
    let folder = |name: &'static str, path: &std::path::Path| format!("{name}: {}", path.display());
    let driver = Arc::new(Driver {
        node: args.common.node.clone(),
        vgpus,
        cluster: cluster.clone(),
        records: Records::open(&args.state_dir)
            .with_context(|| folder("--state-dir", &args.state_dir))?,
        cdi: CdiDir::open(&args.cdi_dir).with_context(|| folder("--cdi-dir", &args.cdi_dir))?,
        libraries,
        metrics: metrics.clone(),
        locks: Locks::default(),
    });
    let (sender, gpus) = watch::channel(Vec::new());
    let node = args.common.node.clone();
    let publisher = Publisher { node, cluster, gpus, metrics, stores_taints: true };
    tokio::select! {
        () = publisher.run() => Ok(()),
        () = inventory::run(&driver, &sender) => Ok(()),
        () = reconcile::run(&driver) => Ok(()),
        result = service::serve(Arc::clone(&driver), &args.common.plugin_dir) => result,
    }
}

/// Returns the interfaces that are named, or those that fit the cluster.
async fn interfaces(args: &Run) -> Result<Interfaces> {
    let Run { device_plugin, dra, .. } = *args;
    if device_plugin || dra {
        return Ok(Interfaces { device_plugin, dra });
    }
    let client = connect(&args.common.access).await?;
    let dra = serves_claims(&client).await?;
    let chosen = if dra { "resource claims" } else { "device plugins" };
    log::info!("Serving {chosen}, by what the apiserver has");
    Ok(Interfaces { device_plugin: !dra, dra })
}

/// Returns whether the apiserver has the interface for claims.
pub async fn serves_claims(client: &KubeClient) -> Result<bool> {
    let groups = limited(client.list_api_groups()).await?;
    let group = groups.groups.into_iter().find(|group| group.name == RESOURCE_API.0);
    Ok(group.is_some_and(|group| group.versions.iter().any(|v| v.version == RESOURCE_API.1)))
}

/// Returns a client of the apiserver.
pub async fn connect(access: &Access) -> Result<KubeClient> {
    const REMEDY: &str =
        "Cannot use the cluster's apiserver; name its kubeconfig with --kubeconfig";
    let config = match &access.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).context(REMEDY)?;
            Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .context(REMEDY)?
        }
        None => Config::infer().await.context(REMEDY)?,
    };
    KubeClient::try_from(config).context(REMEDY)
}
