//! Sockets of device plugins, and their registrations at kubelet.
//!
//! Kubelet forgets plugins when it ends, and removes their sockets when it starts. A plugin listens
//! again where its socket is gone, and registers at each new socket of kubelet.

use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::transport::Server;

use super::Context;
use super::devices::{Inventory, Resource};
use super::service::{OPTIONS, Service};
use crate::grpc::{self, FileId, SocketFile};
use crate::proto::deviceplugin as api;

/// Version of the interface.
const VERSION: &str = "v1beta1";

/// Served device plugin.
#[derive(Debug)]
pub struct Plugin {
    service: Service,
    listening: Option<Listening>,
    /// Kubelet's socket at the last registration.
    registered: Option<FileId>,
    /// Last error, which is logged once.
    error: Option<String>,
}

#[derive(Debug)]
struct Listening {
    socket: SocketFile,
    /// Task that serves the socket, until it is dropped.
    _server: JoinSet<()>,
}

impl Plugin {
    /// Creates a plugin that does not listen yet.
    pub fn new(
        context: Arc<Context>,
        resource: Resource,
        inventory: watch::Receiver<Inventory>,
    ) -> Self {
        let service = Service { context, resource, inventory };
        Self { service, listening: None, registered: None, error: None }
    }

    /// Listens and registers, where that is not done yet or kubelet was restarted.
    pub async fn keep_registered(&mut self) {
        let kubelet = self.folder().join("kubelet.sock");
        let current = FileId::of(&kubelet);
        let served = self.listening.as_ref().is_some_and(|own| own.socket.is_there());
        if current.is_none() || (served && self.registered == current) {
            return;
        }
        let resource = self.service.resource.clone();
        let done = async {
            if !served {
                self.listening = Some(self.listen()?);
            }
            self.register(&kubelet).await
        };
        match done.await {
            Ok(()) => {
                log::info!("Kubelet has the device plugin of {resource}");
                (self.registered, self.error) = (current, None);
                self.service.context.metrics.count_registration(&resource.to_string());
            }
            Err(error) => {
                let error = format!("{error:#}");
                if self.error.as_ref() != Some(&error) {
                    log::warn!("Cannot register {resource} at {}: {error}", kubelet.display());
                    self.error = Some(error);
                }
            }
        }
    }

    fn folder(&self) -> PathBuf {
        self.service.context.plugin_dir.join("device-plugins")
    }

    fn listen(&self) -> anyhow::Result<Listening> {
        let path = self.folder().join(self.service.resource.socket());
        let incoming = grpc::listen(&path)?;
        let service = api::device_plugin_server::DevicePluginServer::new(self.service.clone());
        let server = Server::builder().add_service(service).serve_with_incoming(incoming);
        let name = self.service.resource.to_string();
        let mut task = JoinSet::new();
        task.spawn(async move {
            if let Err(error) = server.await {
                log::warn!("The device plugin of {name} has ended: {error}");
            }
        });
        Ok(Listening { socket: SocketFile::new(path), _server: task })
    }

    async fn register(&self, kubelet: &std::path::Path) -> anyhow::Result<()> {
        let channel = grpc::connect(kubelet).await?;
        let request = api::RegisterRequest {
            version: VERSION.to_owned(),
            endpoint: self.service.resource.socket(),
            resource_name: self.service.resource.to_string(),
            options: Some(OPTIONS),
        };
        let mut client = api::registration_client::RegistrationClient::new(channel);
        client
            .register(request)
            .await
            .map_err(|status| anyhow::anyhow!("kubelet refuses: {}", status.message()))?;
        Ok(())
    }
}
