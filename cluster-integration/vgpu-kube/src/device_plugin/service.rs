//! Calls of kubelet to a device plugin.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};
use vgpud_api::ErrorCode;

use super::Context;
use super::devices::{Device, Inventory, Resource};
use crate::injection::{DEFAULT_NAME, Injection};
use crate::proto::deviceplugin as api;
use crate::vgpus::{Purpose, WantedVgpu};

/// Health of devices, as kubelet spells it.
const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

/// What kubelet may ask of a plugin besides devices.
pub const OPTIONS: api::DevicePluginOptions = api::DevicePluginOptions {
    pre_start_required: false,
    get_preferred_allocation_available: true,
};

/// Device plugin of one resource.
#[derive(Clone, Debug)]
pub struct Service {
    /// What all device plugins share.
    pub context: Arc<Context>,
    /// The resource.
    pub resource: Resource,
    /// Its devices.
    pub inventory: watch::Receiver<Inventory>,
}

impl Service {
    /// Starts the vGPU of a device for a container.
    async fn allocate_one(&self, ids: &[String]) -> Result<api::ContainerAllocateResponse, String> {
        let resource = &self.resource;
        let [id] = ids else {
            let count = ids.len();
            return Err(format!(
                "A container can use one vGPU, and asks for {count} of {resource}; ask for 1 of a larger type"
            ));
        };
        let device = self.inventory.borrow().0.get(id).cloned();
        let device = device.ok_or_else(|| {
            format!(
                "There is no device {id:?} of {resource}; restart kubelet if it keeps asking for it"
            )
        })?;
        // The device's last container has ended, unless kubelet was restarted: before it knows all
        // of its pods, it gives away what they have.
        let vgpu = self.context.vgpus.renew(&self.wanted(&device)).await;
        let vgpu = vgpu.map_err(|error| match error.code() {
            Some(ErrorCode::InUse) => {
                format!("Device {id} is another container's, which still runs: {error}")
            }
            _ => error.to_string(),
        })?;
        let injection = Injection::new(&vgpu, DEFAULT_NAME, &self.context.libraries);
        let injection = injection.ok_or_else(|| format!("vGPU {} does not run", vgpu.uuid))?;
        Ok(response(&injection))
    }

    /// Says why a container gets no device: to kubelet, which tells the pod, and in an event.
    async fn refuse(&self, error: String) -> Status {
        let note = format!("Cannot give a container a device of {}: {error}", self.resource);
        log::warn!("{note}");
        if let Some(cluster) = &self.context.cluster {
            cluster.warn_node(&self.context.node, "AllocateFailed", &note).await;
        }
        Status::failed_precondition(error)
    }

    fn wanted(&self, device: &Device) -> WantedVgpu {
        WantedVgpu {
            id: device.vgpu,
            purpose: Purpose::Device,
            parent: device.parent.clone(),
            mdev_type: self.resource.mdev_type().to_owned(),
            owner: self.context.owner,
            attrs: vec![("core", device.core.to_string())],
        }
    }
}

fn response(injection: &Injection) -> api::ContainerAllocateResponse {
    let mounts = injection.mounts.iter().map(|mount| api::Mount {
        container_path: mount.container.to_string_lossy().into_owned(),
        host_path: mount.host.to_string_lossy().into_owned(),
        read_only: true,
    });
    let envs = injection.env.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
    api::ContainerAllocateResponse { envs: envs.collect(), mounts: mounts.collect() }
}

/// Returns the devices that a container should get: those without a running vGPU first.
fn preferred(
    request: api::ContainerPreferredAllocationRequest,
    is_running: impl Fn(&String) -> bool,
) -> api::ContainerPreferredAllocationResponse {
    let mut device_ids = request.must_include_device_i_ds;
    let (running, free): (Vec<_>, Vec<_>) =
        request.available_device_i_ds.into_iter().partition(is_running);
    for id in free.into_iter().chain(running) {
        if !device_ids.contains(&id) {
            device_ids.push(id);
        }
    }
    device_ids.truncate(usize::try_from(request.allocation_size).unwrap_or(0));
    api::ContainerPreferredAllocationResponse { device_i_ds: device_ids }
}

fn list(inventory: &Inventory) -> api::ListAndWatchResponse {
    let devices = inventory.0.iter().map(|(id, device)| api::Device {
        id: id.clone(),
        health: if device.healthy { HEALTHY } else { UNHEALTHY }.to_owned(),
    });
    api::ListAndWatchResponse { devices: devices.collect() }
}

#[tonic::async_trait]
impl api::device_plugin_server::DevicePlugin for Service {
    type ListAndWatchStream =
        Pin<Box<dyn Stream<Item = Result<api::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let changes = WatchStream::new(self.inventory.clone());
        Ok(Response::new(Box::pin(changes.map(|inventory| Ok(list(&inventory))))))
    }

    async fn get_preferred_allocation(
        &self,
        request: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        let running = self.context.vgpus.of(Purpose::Device).await.unwrap_or_default();
        let inventory = self.inventory.borrow();
        let is_running = |id: &String| {
            let device = inventory.0.get(id);
            device.is_some_and(|device| running.iter().any(|vgpu| vgpu.uuid == device.vgpu))
        };
        let requests = request.into_inner().container_requests.into_iter();
        let container_responses = requests.map(|request| preferred(request, is_running)).collect();
        Ok(Response::new(api::PreferredAllocationResponse { container_responses }))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let mut response = api::AllocateResponse::default();
        for container in request.into_inner().container_requests {
            let allocated = self.allocate_one(&container.devices_ids).await;
            self.context.metrics.count_allocation(&self.resource.to_string(), allocated.is_ok());
            match allocated {
                Ok(container) => response.container_responses.push(container),
                Err(error) => return Err(self.refuse(error).await),
            }
        }
        Ok(Response::new(response))
    }

    async fn pre_start_container(
        &self,
        _: Request<api::PreStartContainerRequest>,
    ) -> Result<Response<api::PreStartContainerResponse>, Status> {
        Ok(Response::new(api::PreStartContainerResponse {}))
    }
}
