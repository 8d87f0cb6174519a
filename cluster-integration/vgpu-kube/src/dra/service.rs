//! The calls of kubelet, v1 and v1beta1, and the registration of the driver.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::DRIVER;
use super::claim::ClaimRef;
use super::driver::Driver;
use crate::grpc::{self, SocketFile};
use crate::proto::dra::{v1, v1beta1};
use crate::proto::pluginregistration as registration;

/// Kind of plugin, as kubelet spells it.
const PLUGIN_TYPE: &str = "DRAPlugin";
/// Versions of the interface, as kubelet spells them.
const VERSIONS: [&str; 2] = ["v1.DRAPlugin", "v1beta1.DRAPlugin"];
/// Interval of looks at the sockets. Kubelet, or the node's administrator, may have removed them.
const INTERVAL: Duration = Duration::from_secs(1);

/// Service of a driver.
#[derive(Clone, Debug)]
pub struct Service(pub Arc<Driver>);

impl Service {
    async fn prepare(&self, claim: v1::Claim) -> v1::NodePrepareResourceResponse {
        let (by, began) = (reference(claim), Instant::now());
        let prepared = self.0.prepare(&by).await;
        self.0.metrics.count_call("prepare", prepared.is_ok(), began.elapsed());
        match prepared {
            Ok(devices) => {
                let devices = devices.into_iter().map(|device| v1::Device {
                    request_names: vec![device.request],
                    pool_name: self.0.node.clone(),
                    device_name: device.device,
                    cdi_device_ids: vec![device.cdi_id],
                });
                v1::NodePrepareResourceResponse { devices: devices.collect(), error: String::new() }
            }
            Err(error) => {
                let error = error.to_string();
                log::warn!("Cannot prepare claim {by}: {error}");
                self.0.cluster.warn_claim(&by, "PrepareFailed", &error).await;
                v1::NodePrepareResourceResponse { devices: Vec::new(), error }
            }
        }
    }

    async fn unprepare(&self, claim: v1::Claim) -> v1::NodeUnprepareResourceResponse {
        let (by, began) = (reference(claim), Instant::now());
        let unprepared = self.0.unprepare(&by).await;
        self.0.metrics.count_call("unprepare", unprepared.is_ok(), began.elapsed());
        let error = unprepared.err().map(|error| error.to_string()).unwrap_or_default();
        if !error.is_empty() {
            log::warn!("Cannot unprepare claim {by}: {error}");
            self.0.cluster.warn_claim(&by, "UnprepareFailed", &error).await;
        }
        v1::NodeUnprepareResourceResponse { error }
    }

    async fn prepare_all(
        &self,
        request: v1::NodePrepareResourcesRequest,
    ) -> v1::NodePrepareResourcesResponse {
        let mut response = v1::NodePrepareResourcesResponse::default();
        for claim in request.claims {
            let uid = claim.uid.clone();
            response.claims.insert(uid, self.prepare(claim).await);
        }
        self.count_claims();
        response
    }

    async fn unprepare_all(
        &self,
        request: v1::NodeUnprepareResourcesRequest,
    ) -> v1::NodeUnprepareResourcesResponse {
        let mut response = v1::NodeUnprepareResourcesResponse::default();
        for claim in request.claims {
            let uid = claim.uid.clone();
            response.claims.insert(uid, self.unprepare(claim).await);
        }
        self.count_claims();
        response
    }

    fn count_claims(&self) {
        if let Ok(records) = self.0.records.all() {
            self.0.metrics.set_claims(records.len());
        }
    }
}

fn reference(claim: v1::Claim) -> ClaimRef {
    ClaimRef { namespace: claim.namespace, name: claim.name, uid: claim.uid }
}

#[tonic::async_trait]
impl v1::dra_plugin_server::DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
        Ok(Response::new(self.prepare_all(request.into_inner()).await))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        Ok(Response::new(self.unprepare_all(request.into_inner()).await))
    }
}

#[tonic::async_trait]
impl v1beta1::dra_plugin_server::DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
        Ok(Response::new(self.prepare_all(request.into_inner()).await))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        Ok(Response::new(self.unprepare_all(request.into_inner()).await))
    }
}

/// Registration of the driver at kubelet.
#[derive(Clone, Debug)]
struct Registration {
    endpoint: PathBuf,
}

#[tonic::async_trait]
impl registration::registration_server::Registration for Registration {
    async fn get_info(
        &self,
        _: Request<registration::InfoRequest>,
    ) -> Result<Response<registration::PluginInfo>, Status> {
        Ok(Response::new(registration::PluginInfo {
            r#type: PLUGIN_TYPE.to_owned(),
            name: DRIVER.to_owned(),
            endpoint: self.endpoint.to_string_lossy().into_owned(),
            supported_versions: VERSIONS.map(str::to_owned).into(),
        }))
    }

    async fn notify_registration_status(
        &self,
        request: Request<registration::RegistrationStatus>,
    ) -> Result<Response<registration::RegistrationStatusResponse>, Status> {
        match request.into_inner() {
            status if status.plugin_registered => log::info!("Kubelet has the driver {DRIVER}"),
            status => log::warn!("Kubelet refuses the driver {DRIVER}: {}", status.error),
        }
        Ok(Response::new(registration::RegistrationStatusResponse {}))
    }
}

/// Serves a driver's sockets in kubelet's folder, until the future is dropped.
pub async fn serve(driver: Arc<Driver>, plugin_dir: &Path) -> anyhow::Result<()> {
    let endpoint = plugin_dir.join("plugins").join(DRIVER).join("dra.sock");
    let registry = plugin_dir.join("plugins_registry").join(format!("{DRIVER}-reg.sock"));
    let mut sockets: Option<[SocketFile; 2]> = None;
    let mut servers = JoinSet::new();
    loop {
        if !sockets.as_ref().is_some_and(|all| all.iter().all(SocketFile::is_there)) {
            servers.abort_all();
            // The registration comes last: kubelet calls as soon as it sees that socket.
            let incoming = grpc::listen(&endpoint)?;
            let service = Service(Arc::clone(&driver));
            let calls = Server::builder()
                .add_service(v1::dra_plugin_server::DraPluginServer::new(service.clone()))
                .add_service(v1beta1::dra_plugin_server::DraPluginServer::new(service));
            servers.spawn(log_failure(calls.serve_with_incoming(incoming)));
            let incoming = grpc::listen(&registry)?;
            let service = Registration { endpoint: endpoint.clone() };
            let service = registration::registration_server::RegistrationServer::new(service);
            let registration = Server::builder().add_service(service);
            servers.spawn(log_failure(registration.serve_with_incoming(incoming)));
            sockets = Some([endpoint.clone(), registry.clone()].map(SocketFile::new));
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

async fn log_failure(server: impl Future<Output = Result<(), tonic::transport::Error>>) {
    if let Err(error) = server.await {
        log::warn!("A socket of the driver is not served any more: {error}");
    }
}
