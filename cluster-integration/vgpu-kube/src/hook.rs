//! Hooks of KubeVirt, which add a vGPU to a VM's domain.
//!
//! KubeVirt knows no vfio-user devices. A sidecar gets the domain's XML before libvirt does, and
//! returns it with the device of a vGPU and with memory that other processes can map.
//!
//! * a hook sidecar: `OnDefineDomain` v1alpha3, on a socket in `/var/run/kubevirt-hooks`, or as a
//!   command that KubeVirt's `sidecar-shim` runs
//! * a plugin: `MutateDomain`, on a socket in `/var/run/kubevirt-plugin/NAME`

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use integrate::domain::{Domain, DomainError};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::cli::Hook;
use crate::grpc;
use crate::injection::{DEFAULT_NAME, FOLDER};
use crate::proto::kubevirt::{info, plugins, v1alpha3};

/// Largest XML of a domain, in bytes.
const MAX_DOMAIN: usize = 4 << 20;
/// Hypervisor of domains that are libvirt's XML.
const LIBVIRT: &str = "libvirt";

/// Adds vGPUs to domains.
#[derive(Clone, Debug)]
pub struct Editor {
    /// Names of the vGPUs: the requests of the VM's claims.
    names: Vec<String>,
}

/// Error of a domain that cannot get a vGPU.
#[derive(Debug, thiserror::Error)]
pub enum HookError {
    /// Not XML of libvirt.
    #[error("The domain's XML is too long or not UTF-8")]
    Text,
    /// The domain has no place for the device.
    #[error("The VM's domain {0}")]
    Domain(#[from] DomainError),
    /// Another hypervisor.
    #[error("The VM's domain is of type {0:?}; a vGPU needs libvirt")]
    Type(String),
}

impl Editor {
    /// Creates an editor for vGPUs with these names, or for that of the only request of a claim.
    pub fn new(mut names: Vec<String>) -> Result<Self> {
        if names.is_empty() {
            names.push(DEFAULT_NAME.to_owned());
        }
        for name in &names {
            let valid = |byte: u8| byte.is_ascii_alphanumeric() || b"-.".contains(&byte);
            if name.is_empty() || name.starts_with('.') || !name.bytes().all(valid) {
                bail!("--vgpu: {name:?} is not the name of a claim's request (a-z, 0-9 and -)");
            }
        }
        Ok(Self { names })
    }

    /// Returns a domain's XML with the vGPUs. A domain that has them is unchanged.
    pub fn edit(&self, xml: &[u8]) -> Result<String, HookError> {
        let text = std::str::from_utf8(xml).ok().filter(|text| text.len() <= MAX_DOMAIN);
        let mut text = text.ok_or(HookError::Text)?.to_owned();
        for name in &self.names {
            let socket = Path::new(FOLDER).join(name).join("vfio.sock");
            let edited = Domain::parse(&text)?.add_device(&socket, &format!("vgpu-{name}"))?;
            text = edited.unwrap_or(text);
        }
        Ok(text)
    }
}

fn status(error: &HookError) -> Status {
    log::error!("{error}");
    Status::failed_precondition(error.to_string())
}

#[tonic::async_trait]
impl info::info_server::Info for Editor {
    async fn info(
        &self,
        _: Request<info::InfoParams>,
    ) -> Result<Response<info::InfoResult>, Status> {
        Ok(Response::new(info::InfoResult {
            name: "tessera-vgpu".to_owned(),
            hook_points: vec![info::HookPoint { name: "OnDefineDomain".to_owned(), priority: 0 }],
            versions: vec!["v1alpha3".to_owned()],
        }))
    }
}

#[tonic::async_trait]
impl v1alpha3::callbacks_server::Callbacks for Editor {
    async fn on_define_domain(
        &self,
        request: Request<v1alpha3::OnDefineDomainParams>,
    ) -> Result<Response<v1alpha3::OnDefineDomainResult>, Status> {
        let edited = self.edit(&request.into_inner().domain_xml).map_err(|error| status(&error))?;
        Ok(Response::new(v1alpha3::OnDefineDomainResult { domain_xml: edited.into_bytes() }))
    }

    async fn pre_cloud_init_iso(
        &self,
        request: Request<v1alpha3::PreCloudInitIsoParams>,
    ) -> Result<Response<v1alpha3::PreCloudInitIsoResult>, Status> {
        // Not subscribed: unchanged.
        let params = request.into_inner();
        Ok(Response::new(v1alpha3::PreCloudInitIsoResult {
            cloud_init_no_cloud_source: params.cloud_init_no_cloud_source,
            cloud_init_data: params.cloud_init_data,
        }))
    }

    async fn shutdown(
        &self,
        _: Request<v1alpha3::ShutdownParams>,
    ) -> Result<Response<v1alpha3::ShutdownResult>, Status> {
        Ok(Response::new(v1alpha3::ShutdownResult {}))
    }
}

#[tonic::async_trait]
impl plugins::domain_hook_service_server::DomainHookService for Editor {
    async fn mutate_domain(
        &self,
        request: Request<plugins::MutateDomainRequest>,
    ) -> Result<Response<plugins::MutateDomainResponse>, Status> {
        let request = request.into_inner();
        if request.domain_type != LIBVIRT {
            return Err(status(&HookError::Type(request.domain_type)));
        }
        let edited = self.edit(&request.domain).map_err(|error| status(&error))?;
        Ok(Response::new(plugins::MutateDomainResponse { domain: edited.into_bytes() }))
    }
}

/// Runs `hook`: prints one edited domain, or serves a socket until the future is dropped.
pub async fn run(args: Hook) -> Result<()> {
    let editor = Editor::new(args.vgpu)?;
    if let Some(xml) = args.domain {
        print!("{}", editor.edit(xml.as_bytes())?);
        return Ok(());
    }
    let path = args.socket.unwrap_or_else(default_socket);
    let incoming = grpc::listen(&path)
        .with_context(|| format!("--socket: cannot listen at {}", path.display()))?;
    log::info!("Adding vGPUs to domains, at {}", path.display());
    Server::builder()
        .add_service(info::info_server::InfoServer::new(editor.clone()))
        .add_service(v1alpha3::callbacks_server::CallbacksServer::new(editor.clone()))
        .add_service(plugins::domain_hook_service_server::DomainHookServiceServer::new(editor))
        .serve_with_incoming(incoming)
        .await?;
    Ok(())
}

/// Returns the socket of a hook sidecar. KubeVirt mounts the folder of the container's hooks.
fn default_socket() -> PathBuf {
    let folder = Path::new("/var/run/kubevirt-hooks");
    // Each sidecar has a subfolder, where there is only one.
    let mut subfolders = fs::read_dir(folder).into_iter().flatten().flatten();
    let only =
        subfolders.next().filter(|entry| entry.path().is_dir() && subfolders.next().is_none());
    only.map_or(folder.to_owned(), |entry| entry.path()).join("tessera-vgpu.sock")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DOMAIN: &str = "<domain type=\"kvm\">\n  <name>ns_vm1</name>\n  <memory unit=\"b\">1</memory>\n  \
        <os><type arch=\"x86_64\" machine=\"q35\">hvm</type></os>\n  <devices/>\n</domain>\n";

    #[test]
    fn the_domain_gets_shared_memory_and_the_device_once() {
        let editor = Editor::new(Vec::new()).unwrap();
        let edited = editor.edit(DOMAIN.as_bytes()).unwrap();
        for part in [
            "<source type=\"memfd\"/>",
            "<access mode=\"shared\"/>",
            "vfio-user-pci",
            "/run/tessera/vgpu/vfio.sock",
            "vgpu-vgpu",
        ] {
            assert_eq!(edited.matches(part).count(), 1, "{part}: {edited}");
        }
        assert_eq!(editor.edit(edited.as_bytes()).unwrap(), edited);
        let two =
            Editor::new(vec!["a".into(), "b".into()]).unwrap().edit(DOMAIN.as_bytes()).unwrap();
        assert!(
            two.contains("/run/tessera/a/vfio.sock") && two.contains("/run/tessera/b/vfio.sock")
        );
        assert_eq!(two.matches("memfd").count(), 1);
    }

    #[test]
    fn errors_are_one_line() {
        let editor = Editor::new(Vec::new()).unwrap();
        let error = |xml: &[u8]| editor.edit(xml).unwrap_err().to_string();
        assert_eq!(error(&[0xff]), "The domain's XML is too long or not UTF-8");
        let lxc = error(b"<domain type='lxc'><name>a</name></domain>");
        assert_eq!(lxc, "The VM's domain is of type lxc; a vGPU needs QEMU (type kvm or qemu)");
        let said = Editor::new(vec!["../x".into()]).unwrap_err().to_string();
        assert!(said.ends_with("is not the name of a claim's request (a-z, 0-9 and -)"), "{said}");
        let other = HookError::Type("chv".into()).to_string();
        assert_eq!(other, "The VM's domain is of type \"chv\"; a vGPU needs libvirt");
    }
}
