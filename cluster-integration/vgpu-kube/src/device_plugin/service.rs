//! Calls of kubelet to a device plugin.

use std::pin::Pin;
use std::sync::Arc;

use tokio::sync::watch;
use tokio_stream::wrappers::WatchStream;
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status};

use super::Context;
use super::devices::{Device, Inventory, Resource};
use crate::injection::{DEFAULT_NAME, Injection};
use crate::proto::deviceplugin as api;
use crate::vgpus::{Purpose, WantedVgpu};

/// Health of devices, as kubelet spells it.
const HEALTHY: &str = "Healthy";
const UNHEALTHY: &str = "Unhealthy";

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
        // The device's last container has ended: kubelet gives a device to one container at a time.
        let vgpu = self.context.vgpus.renew(&self.wanted(&device)).await;
        let vgpu = vgpu.map_err(|error| error.to_string())?;
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
        Ok(Response::new(api::DevicePluginOptions::default()))
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
        _: Request<api::PreferredAllocationRequest>,
    ) -> Result<Response<api::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("The plugin has no preferred devices"))
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
