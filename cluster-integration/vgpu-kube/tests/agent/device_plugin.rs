//! Device plugins, with kubelet's registration and pod resources played by the test.

use std::fs;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::task::JoinHandle;
use tokio_stream::StreamExt;
use tonic::transport::Server;
use tonic::{Request, Response, Status};
use vgpu_kube::grpc;
use vgpu_kube::proto::deviceplugin as api;

use crate::bed::{Bed, SLICE, eventually};

/// Kubelet's registration socket.
#[derive(Clone, Debug, Default)]
struct Kubelet {
    registered: Arc<Mutex<Vec<api::RegisterRequest>>>,
}

#[tonic::async_trait]
impl api::registration_server::Registration for Kubelet {
    async fn register(
        &self,
        request: Request<api::RegisterRequest>,
    ) -> Result<Response<api::Empty>, Status> {
        self.registered().push(request.into_inner());
        Ok(Response::new(api::Empty {}))
    }
}

impl Kubelet {
    fn registered(&self) -> MutexGuard<'_, Vec<api::RegisterRequest>> {
        self.registered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts in a folder, as kubelet does: removes all sockets first.
    fn start(&self, folder: &Path) -> Result<JoinHandle<()>> {
        for entry in fs::read_dir(folder)? {
            fs::remove_file(entry?.path())?;
        }
        self.registered().clear();
        let incoming = grpc::listen(&folder.join("kubelet.sock"))?;
        let service = api::registration_server::RegistrationServer::new(self.clone());
        let server = Server::builder().add_service(service).serve_with_incoming(incoming);
        Ok(tokio::spawn(async { assert!(server.await.is_ok()) }))
    }

    fn find(&self, resource: &str) -> Option<api::RegisterRequest> {
        let registered = self.registered();
        registered.iter().find(|request| request.resource_name == resource).cloned()
    }
}

type Plugin = api::device_plugin_client::DevicePluginClient<tonic::transport::Channel>;

async fn plugin(bed: &Bed, kubelet: &Kubelet, resource: &str) -> Result<Plugin> {
    eventually("the registration", async || kubelet.find(resource).is_some()).await?;
    let request = kubelet.find(resource).context("A registration")?;
    assert_eq!(request.version, "v1beta1");
    let socket = bed.kubelet().join("device-plugins").join(request.endpoint);
    Ok(Plugin::new(grpc::connect(&socket).await?))
}

fn healthy(list: &api::ListAndWatchResponse) -> Vec<&str> {
    let healthy = list.devices.iter().filter(|device| device.health == "Healthy");
    healthy.map(|device| device.id.as_str()).collect()
}

fn allocation(ids: &[&str]) -> api::AllocateRequest {
    let devices_ids = ids.iter().map(|id| (*id).to_owned()).collect();
    api::AllocateRequest { container_requests: vec![api::ContainerAllocateRequest { devices_ids }] }
}

#[tokio::test]
async fn a_container_gets_a_vgpu_of_the_type_that_it_asks_for() -> Result<()> {
    let bed = Bed::start(&["--device-plugin", "--device-owner", "1000"])?;
    let folder = bed.kubelet().join("device-plugins");
    let kubelet = Kubelet::default();
    let first = kubelet.start(&folder)?;
    let mut small = plugin(&bed, &kubelet, "tessera.io/soft-512mc").await?;
    let mut large = plugin(&bed, &kubelet, "tessera.io/soft-1q").await?;
    let mut lists = large.list_and_watch(api::Empty {}).await?.into_inner();
    let list = lists.next().await.context("A list")??;
    assert_eq!(healthy(&list), ["soft0-0", "soft0-1"]);

    let answer = small.allocate(allocation(&["soft0-3"])).await?.into_inner();
    let container = &answer.container_responses[0];
    assert_eq!(container.envs["TESSERA_CUDA_SOCKET"], "/run/tessera/vgpu/cuda.sock");
    assert_eq!(container.envs["LD_PRELOAD"], "/usr/lib/tessera/libtessera_cuda.so");
    assert!(container.mounts.iter().all(|mount| mount.read_only));
    let vgpus = bed.vgpus()?;
    let [vgpu] = vgpus.as_slice() else { panic!("{vgpus:?}") };
    let clients = bed.vgpud.vgpu_dir(vgpu["uuid"].as_str().unwrap()).join("clients");
    assert_eq!(container.mounts[0].host_path, clients.to_string_lossy());
    assert_eq!(container.mounts[0].container_path, "/run/tessera/vgpu");
    assert_eq!(vgpu["live_type"], "SOFT-512MC");
    let attrs = vgpu["live_attrs"].to_string();
    assert!(attrs.contains(r#"{"core":"25"}"#) && attrs.contains(r#"{"owner":"1000"}"#), "{attrs}");

    // The memory that is left has room for one of the large type.
    let list = lists.next().await.context("A list")??;
    assert_eq!((healthy(&list), list.devices.len()), (vec!["soft0-0"], 2));

    let refused = small.allocate(allocation(&["soft0-0", "soft0-1"])).await.unwrap_err();
    assert!(
        refused.message().starts_with("A container can use one vGPU, and asks for 2"),
        "{refused}"
    );
    let refused = small.allocate(allocation(&["soft0-9"])).await.unwrap_err();
    assert!(refused.message().starts_with("There is no device \"soft0-9\""), "{refused}");
    let refused = large.allocate(allocation(&["soft0-1"])).await;
    assert!(refused.is_ok(), "unhealthy for kubelet, but there is room");
    let refused = large.allocate(allocation(&["soft0-0"])).await.unwrap_err();
    assert!(refused.message().contains("Not enough video memory"), "{refused}");

    // Another container on the same device gets a vGPU of its own, with new memory.
    let pid = bed.vgpus()?[0]["pid"].clone();
    small.allocate(allocation(&["soft0-3"])).await?;
    assert!(
        bed.vgpus()?.iter().all(|vgpu| vgpu["pid"] != pid || vgpu["live_type"] != "SOFT-512MC")
    );

    // A new kubelet has removed the sockets.
    first.abort();
    let _second = kubelet.start(&folder)?;
    let mut small = plugin(&bed, &kubelet, "tessera.io/soft-512mc").await?;
    let list = small.list_and_watch(api::Empty {}).await?.into_inner().next().await;
    assert!(healthy(&list.context("A list")??).contains(&"soft0-3"), "it is in use");
    Ok(())
}

/// A kubelet that was restarted gives away what containers have that it does not know yet.
#[tokio::test]
async fn a_device_of_a_running_container_is_given_to_no_other() -> Result<()> {
    let bed = Bed::start(&["--device-plugin"])?;
    let kubelet = Kubelet::default();
    let _server = kubelet.start(&bed.kubelet().join("device-plugins"))?;
    let mut small = plugin(&bed, &kubelet, "tessera.io/soft-512mc").await?;
    let options = small.get_device_plugin_options(api::Empty {}).await?.into_inner();
    assert!(options.get_preferred_allocation_available);
    let registered = kubelet.find("tessera.io/soft-512mc").and_then(|request| request.options);
    assert_eq!(registered, Some(options), "kubelet asks for what it knows by the registration");
    small.allocate(allocation(&["soft0-1"])).await?;

    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
    let request = |must: &[&str], size| {
        let container = api::ContainerPreferredAllocationRequest {
            available_device_i_ds: ids(&["soft0-1", "soft0-0", "soft0-2"]),
            must_include_device_i_ds: ids(must),
            allocation_size: size,
        };
        let request = api::PreferredAllocationRequest { container_requests: vec![container] };
        let mut small = small.clone();
        async move {
            let answer = small.get_preferred_allocation(request).await?.into_inner();
            anyhow::Ok(answer.container_responses[0].device_i_ds.clone())
        }
    };
    assert_eq!(request(&[], 1).await?, ["soft0-0"]);
    assert_eq!(request(&[], 3).await?, ["soft0-0", "soft0-2", "soft0-1"]);
    assert_eq!(request(&["soft0-1"], 2).await?, ["soft0-1", "soft0-0"]);
    assert!(request(&[], -1).await?.is_empty());

    let vgpus = bed.vgpus()?;
    let uuid = vgpus[0]["uuid"].as_str().context("A vGPU")?;
    let client = std::os::unix::net::UnixStream::connect(bed.vgpud.vfio_socket(uuid))?;
    eventually("the vGPU is in use", async || {
        bed.vgpus().is_ok_and(|vgpus| !vgpus[0]["vm"].is_null())
    })
    .await?;
    let refused = small.allocate(allocation(&["soft0-1"])).await.unwrap_err();
    let told = "Device soft0-1 is another container's, which still runs: ";
    assert!(refused.message().starts_with(told), "{refused}");
    assert_eq!(bed.vgpus()?[0]["pid"], vgpus[0]["pid"], "the container's vGPU goes on");
    drop(client);
    small.allocate(allocation(&["soft0-1"])).await?;
    assert_ne!(bed.vgpus()?[0]["pid"], vgpus[0]["pid"]);
    Ok(())
}

#[tokio::test]
async fn devices_survive_kills_of_agent_and_vgpud() -> Result<()> {
    let mut bed = Bed::start(&["--device-plugin"])?;
    let kubelet = Kubelet::default();
    let _server = kubelet.start(&bed.kubelet().join("device-plugins"))?;
    let mut small = plugin(&bed, &kubelet, "tessera.io/soft-256mc").await?;
    small.allocate(allocation(&["soft0-0"])).await?;
    let before = bed.vgpus()?;
    bed.end_agent(Signal::SIGKILL)?;
    bed.vgpud.end(Signal::SIGKILL)?;
    bed.vgpud.start_again()?;
    kubelet.registered().clear();
    bed.start_agent()?;
    let mut small = plugin(&bed, &kubelet, "tessera.io/soft-256mc").await?;
    let mut lists = small.list_and_watch(api::Empty {}).await?.into_inner();
    let list = lists.next().await.context("A list")??;
    assert_eq!(healthy(&list).len(), 8, "one in use and seven free");
    let after = bed.vgpus()?;
    let ids = |vgpus: &[Value]| [vgpus[0]["uuid"].clone(), vgpus[0]["pid"].clone()];
    assert_eq!(ids(&before), ids(&after));
    Ok(())
}

#[tokio::test]
async fn claims_and_device_plugins_do_not_overcommit_a_gpu() -> Result<()> {
    let bed = Bed::start(&["--dra", "--device-plugin"])?;
    let kubelet = Kubelet::default();
    let _server = kubelet.start(&bed.kubelet().join("device-plugins"))?;
    let mut half = plugin(&bed, &kubelet, "tessera.io/soft-1c").await?;
    let mut lists = half.list_and_watch(api::Empty {}).await?.into_inner();
    assert_eq!(healthy(&lists.next().await.context("A list")??).len(), 2);

    // A claim has memory for two left, and time for one.
    let claim = bed.put_claim("c1", 40, "256Mi", &Value::Null);
    assert_eq!(bed.prepare(&claim).await?.error, "");
    let list = lists.next().await.context("A list")??;
    assert_eq!(healthy(&list), ["soft0-0"], "one of 50 % fits beside the claim's 40 %");
    half.allocate(allocation(&["soft0-0"])).await?;
    eventually("what the device leaves to claims", async || {
        let slice = bed.api.get(SLICE).unwrap_or_default();
        slice["spec"]["devices"][0]["capacity"]["core"]["value"] == "50"
    })
    .await?;

    // The scheduler may decide before it knows.
    let late = bed.put_claim("late", 20, "256Mi", &Value::Null);
    let said = bed.prepare(&late).await?.error;
    assert!(said.contains("10"), "{said}");
    assert_eq!(bed.condition("late").map(|[status, ..]| status).as_deref(), Some("False"));
    let refused = half.allocate(allocation(&["soft0-1"])).await.unwrap_err();
    assert_eq!(bed.vgpus()?.len(), 2, "{refused}");
    let notes: Vec<_> = ["ns", "default"]
        .iter()
        .flat_map(|space| {
            bed.api.list(&format!("/apis/events.k8s.io/v1/namespaces/{space}/events"))
        })
        .map(|event| event["note"].as_str().unwrap_or_default().to_owned())
        .collect();
    let note =
        format!("Cannot give a container a device of tessera.io/soft-1c: {}", refused.message());
    for expected in [&said, &note] {
        assert!(notes.iter().any(|note| note.contains(expected)), "{expected}: {notes:?}");
    }
    Ok(())
}
