//! Domains of libvirt that are saved and restored with their vGPUs.

use std::path::PathBuf;

use integrate::domain::{Domain, save_guard};
use serde_json::json;
use vgpud_api::{Version, Vgpu};

use super::monitor::{Address, Monitor, failed};
use crate::commands::libvirt::virsh::Virsh;
use crate::failure::Failure;
use vgpud_client::Client;

/// Domain with vGPUs.
#[derive(Debug)]
pub struct VmDomain {
    uri: String,
    name: String,
    uuid: String,
    /// XML of the running domain, or of the saved one.
    pub xml: String,
    run_dir: PathBuf,
}

impl VmDomain {
    /// Returns a running domain.
    pub async fn running(client: &Client, uri: &str, name: &str) -> Result<Self, Failure> {
        let virsh = Virsh::at(uri);
        if !virsh.state(name)?.active {
            return Err(Failure::NotNow(format!("Domain '{name}' is not running")));
        }
        let (uuid, xml) = (virsh.uuid(name)?, virsh.running(name)?);
        Self::new(client, uri, name, uuid, xml).await
    }

    /// Returns a domain that was saved, if it can be started now.
    pub async fn saved(
        client: &Client,
        uri: &str,
        name: &str,
        xml: String,
    ) -> Result<Self, Failure> {
        let domain = parse(name, &xml)?;
        let (found, uuid) = (domain.name(), domain.uuid());
        if name != found && name != uuid {
            let message = format!("The file has domain '{found}', and not '{name}'");
            return Err(Failure::Usage(message));
        }
        // A host that does not have the domain gets it.
        let state = Virsh::at(uri).state(&uuid);
        if state.as_ref().is_ok_and(|state| state.active) {
            let message = format!("Domain '{found}' runs already; shut it down first");
            return Err(Failure::NotNow(message));
        }
        if let Err(failure) = state
            && failure.exit_status() != 4
        {
            return Err(failure);
        }
        Self::new(client, uri, &found, uuid, xml).await
    }

    async fn new(
        client: &Client,
        uri: &str,
        name: &str,
        uuid: String,
        xml: String,
    ) -> Result<Self, Failure> {
        let version: Version = client.get("/v1/version").await?;
        let (uri, name) = (uri.to_owned(), name.to_owned());
        Ok(Self { uri, name, uuid, xml, run_dir: version.run_dir.into() })
    }

    /// Returns where the domain's monitor is.
    pub fn monitor(&self) -> Address {
        Address::Domain { uri: self.uri.clone(), uuid: self.uuid.clone() }
    }

    /// Returns the domain's first vGPU, which has started.
    pub async fn vgpu(&self, client: &Client) -> Result<Vgpu, Failure> {
        let vgpus = parse(&self.name, &self.xml)?.vgpus();
        let Some(first) = vgpus.first() else {
            return Err(Failure::Usage(format!(
                "Domain '{}' has no vGPU from `vgpuctl libvirt attach`; virsh saves and restores it",
                self.name
            )));
        };
        Ok(client.vgpu(first.uuid, None).await?)
    }

    /// Starts the domain, paused, so that it waits for its state.
    pub fn start(&self) -> Result<(), Failure> {
        let xml = parse(&self.name, &self.xml)?.awaiting_state();
        Virsh::at(&self.uri).create_paused(&self.name, &xml)
    }

    /// Ends the domain.
    pub fn destroy(&self) -> Result<(), Failure> {
        Virsh::at(&self.uri).change("destroy", &self.uuid)
    }

    /// Forbids QEMU again to save the domain.
    pub fn add_guard(&self, monitor: &mut Monitor) -> Result<(), Failure> {
        save_guard::write(&self.run_dir).map_err(|error| failed(&error))?;
        let device = save_guard::block_device(&self.run_dir.join(save_guard::FILE));
        monitor.execute("blockdev-add", &device).map(drop)
    }
}

/// Lets QEMU save a VM. Returns whether the VM had a guard.
pub fn remove_guard(monitor: &mut Monitor) -> bool {
    monitor.execute("blockdev-del", &json!({ "node-name": save_guard::NODE })).is_ok()
}

fn parse<'a>(name: &str, xml: &'a str) -> Result<Domain<'a>, Failure> {
    Domain::parse(xml).map_err(|error| Failure::Local(format!("Domain '{name}' {error}")))
}
