//! `libvirt ...`: domains that have vGPUs.
//!
//! * [`virsh`]: how a domain is read and written
//! * [`hook`]: what libvirt runs when a domain starts and ends; [`claims`] is what it remembers
//! * [`install`]: how libvirt comes to run it

mod claims;
mod hook;
mod install;
mod virsh;

use std::fs;
use std::path::{Path, PathBuf};

use hyper::Method;
use integrate::domain::{Attachment, Domain, Vgpu as Wanted};
use integrate::nodedev::{Mdev, Parent, Type};
use mdev_core::definition::Attrs;
use mdev_core::ids::VgpuId;
use serde_json::json;
use vfio_user_server::api::model::{
    self, Attribute, ModifyVgpu, ParentTypes, Version, Vgpu, VgpuState,
};

use self::virsh::Virsh;
use crate::cli::Output;
use crate::cli::libvirt::{self as cli, Attach, Detach, Libvirt, LibvirtCommand, Nodedev};
use crate::client::{Client, vgpu_path};
use crate::failure::Failure;
use crate::mdevctl::pretty;

/// `libvirt`
pub async fn libvirt(client: &Client, args: Libvirt) -> Result<Vec<u8>, Failure> {
    match args.command {
        LibvirtCommand::Attach(args) => attach(client, args).await,
        LibvirtCommand::Detach(args) => detach(&args),
        LibvirtCommand::InstallHook(args) => install::install(client.socket(), &args),
        LibvirtCommand::Nodedev(args) => nodedev(client, args).await,
        LibvirtCommand::Hook(args) => hook::hook(client, args).await.map(|()| Vec::new()),
    }
}

/// `libvirt attach`
async fn attach(client: &Client, args: Attach) -> Result<Vec<u8>, Failure> {
    let asked = &args.domain;
    let virsh = Virsh::at(&asked.connect);
    let xml = changeable(&virsh, asked)?;
    let domain = parse(&xml, asked)?;
    let vgpu = if let Some(uuid) = args.uuid {
        nobodys(client.vgpu(uuid, None).await?.uuid)
    } else {
        // The command line has one of both.
        offered(client, args.mdev_type.as_deref().unwrap_or_default(), args.parent.as_deref())
            .await?;
        let wanted = Wanted {
            mdev_type: args.mdev_type.clone(),
            parent: args.parent.clone(),
            core: args.core,
            ..nobodys(VgpuId::random())
        };
        of_its_own(&domain, wanted, asked)?
    };
    let version: Version = client.get("/v1/version").await?;
    let socket = Path::new(&version.run_dir).join("vgpus").join(vgpu.uuid.to_string());
    let attachment = Attachment { vgpu: vgpu.clone(), socket: socket.join("vfio.sock") };
    let changed = domain.attach(&attachment).map_err(|error| refused(asked, &error))?;
    if asked.print_xml {
        return Ok(changed.unwrap_or_else(|| xml.clone()).into_bytes());
    }
    if let (Some(uuid), Some(core)) = (args.uuid, args.core) {
        set_core(client, uuid, core).await?;
    }
    let what = vgpu.mdev_type.as_ref().map(|name| format!(" of type {name}")).unwrap_or_default();
    let VgpuId(uuid) = vgpu.uuid;
    let (name, uuid) = (domain.name(), uuid.hyphenated());
    let text = if changed.is_some() {
        format!("Domain '{name}' has vGPU {uuid}{what} from its next start on\n")
    } else {
        format!("Domain '{name}' has vGPU {uuid}{what} already; nothing was changed\n")
    };
    if let Some(changed) = &changed {
        virsh.define(&asked.name, changed)?;
    }
    for note in domain.notes() {
        eprintln!("vgpuctl: note: domain '{name}': {note}");
    }
    if asked.connect == "qemu:///system" && !Path::new("/").join(install::HOOK).exists() {
        eprintln!(
            "vgpuctl: note: nothing starts the vGPU before the domain yet; run `vgpuctl libvirt install-hook`"
        );
    }
    answer(asked, &domain, &vgpu, changed.is_some(), text)
}

/// `libvirt detach`
fn detach(args: &Detach) -> Result<Vec<u8>, Failure> {
    let asked = &args.domain;
    let virsh = Virsh::at(&asked.connect);
    let xml = changeable(&virsh, asked)?;
    let domain = parse(&xml, asked)?;
    let (changed, vgpu) = domain.detach(args.uuid).map_err(|error| refused(asked, &error))?;
    if asked.print_xml {
        return Ok(changed.into_bytes());
    }
    virsh.define(&asked.name, &changed)?;
    let text = format!("Domain '{}' has vGPU {} no more\n", domain.name(), vgpu.uuid);
    answer(asked, &domain, &vgpu, true, text)
}

/// A domain's definition, if it may be changed now.
fn changeable(virsh: &Virsh<'_>, asked: &cli::Domain) -> Result<String, Failure> {
    let name = &asked.name;
    let state = virsh.state(name)?;
    if !state.persistent {
        return Err(Failure::NotNow(format!(
            "Domain '{name}' has no definition that could be changed; define it first: \
             virsh dumpxml {name} > {name}.xml, virsh define {name}.xml"
        )));
    }
    if state.active && !asked.config && !asked.print_xml {
        return Err(Failure::NotNow(format!(
            "Domain '{name}' is running; shut it down first, or add --config to change what its next start takes"
        )));
    }
    virsh.definition(name)
}

fn parse<'a>(xml: &'a str, asked: &cli::Domain) -> Result<Domain<'a>, Failure> {
    Domain::parse(xml).map_err(|error| refused(asked, &error))
}

fn refused(asked: &cli::Domain, error: &integrate::domain::DomainError) -> Failure {
    Failure::NotNow(format!("Domain '{}' {error}", asked.name))
}

fn nobodys(uuid: VgpuId) -> Wanted {
    Wanted { uuid, mdev_type: None, parent: None, core: None }
}

/// A vGPU of the domain's own: the one that it has already, if that is such a one.
fn of_its_own(domain: &Domain<'_>, wanted: Wanted, asked: &cli::Domain) -> Result<Wanted, Failure> {
    let same = |there: &Wanted| Wanted { uuid: wanted.uuid, ..there.clone() } == wanted;
    let there = domain.vgpus();
    match there.iter().find(|there| same(there)).or(there.first()) {
        Some(there) if same(there) => Ok(there.clone()),
        // A command that is given twice must not become two vGPUs.
        Some(there) => Err(Failure::NotNow(format!(
            "Domain '{}' has vGPU {} already; detach that first, or add one that is defined, with --uuid",
            asked.name, there.uuid
        ))),
        None => Ok(wanted),
    }
}

/// Makes sure that a type can be had.
async fn offered(client: &Client, name: &str, parent: Option<&str>) -> Result<(), Failure> {
    let parents: Vec<ParentTypes> = client.get("/v1/types").await?;
    let mut on =
        parents.iter().filter(|on| parent.is_none_or(|parent| on.parent == parent)).peekable();
    if let (None, Some(parent)) = (on.peek(), parent) {
        return Err(Failure::NotFound(format!(
            "There is no parent {parent}; `vgpuctl types` shows what there is"
        )));
    }
    if on.any(|on| on.types.iter().any(|offered| offered.name == name)) {
        return Ok(());
    }
    Err(Failure::NotFound(format!(
        "No parent offers type {name}; `vgpuctl types` shows what there is"
    )))
}

/// Changes a defined vGPU's share.
async fn set_core(client: &Client, uuid: VgpuId, core: u8) -> Result<(), Failure> {
    let vgpu = client.vgpu(uuid, None).await?;
    let mut attrs: Attrs =
        vgpu.attrs.iter().flatten().map(|(name, value)| (name.clone(), value.clone())).collect();
    attrs.set("core", &core.to_string());
    let attrs: Vec<Attribute> =
        attrs.iter().map(|(name, value)| [(name.to_owned(), value.to_owned())].into()).collect();
    let request = ModifyVgpu { attrs: Some(attrs), ..ModifyVgpu::default() };
    client.order(Method::PATCH, &vgpu_path(uuid), &request).await
}

fn answer(
    asked: &cli::Domain,
    domain: &Domain<'_>,
    vgpu: &Wanted,
    changed: bool,
    text: String,
) -> Result<Vec<u8>, Failure> {
    if asked.output == Output::Text {
        return Ok(text.into_bytes());
    }
    pretty(&json!({
        "domain": domain.name(),
        "domain_uuid": domain.uuid(),
        "uuid": vgpu.uuid,
        "mdev_type": vgpu.mdev_type,
        "parent": vgpu.parent,
        "core": vgpu.core,
        "changed": changed,
    }))
}

/// The vendor's and the device's number of a PCI function of this host.
fn pci_ids(name: &str) -> Option<[String; 2]> {
    // Not a path of somebody's making.
    let plain = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
    if !name.chars().all(plain) {
        return None;
    }
    let folder = Path::new("/sys/bus/pci/devices").join(name);
    let read = |file| Some(fs::read_to_string(folder.join(file)).ok()?.trim().to_owned());
    Some([read("vendor")?, read("device")?])
}

/// `libvirt nodedev`
async fn nodedev(client: &Client, args: Nodedev) -> Result<Vec<u8>, Failure> {
    let parents: Vec<model::Parent> = client.get("/v1/parents").await?;
    let types: Vec<ParentTypes> = client.get("/v1/types").await?;
    let vgpus: Vec<Vgpu> = client.get("/v1/vgpus").await?;
    let mut devices: Vec<(String, String)> = Vec::new();
    for (index, parent) in (0..).zip(parents) {
        let offered = types.iter().filter(|on| on.parent == parent.name).flat_map(|on| &on.types);
        let parent = Parent {
            types: offered
                .map(|info| Type { name: info.name.clone(), available: info.available_instances })
                .collect(),
            description: parent.description,
            ids: pci_ids(&parent.name),
            index,
            name: parent.name,
        };
        devices.push((parent.device_name(), parent.xml()));
    }
    for vgpu in vgpus.into_iter().filter(|vgpu| vgpu.state != VgpuState::Stopped) {
        let socket = PathBuf::from(vgpu.socket.unwrap_or_default());
        let attributes = vgpu.live_attrs.unwrap_or(vgpu.attrs);
        let mdev = Mdev {
            uuid: vgpu.uuid,
            parent: vgpu.parent,
            mdev_type: vgpu.mdev_type,
            attributes: attributes.into_iter().flatten().collect(),
            path: socket.parent().unwrap_or(&socket).to_string_lossy().into_owned(),
        };
        devices.push((mdev.device_name(), mdev.xml()));
    }
    if let Some(name) = args.name {
        devices.retain(|(device, _)| *device == name);
        let Some((_, xml)) = devices.first() else {
            return Err(Failure::NotFound(format!(
                "There is no node device {name}; `vgpuctl libvirt nodedev --list` names those that there are"
            )));
        };
        if args.output == Output::Text {
            return Ok(xml.clone().into_bytes());
        }
    }
    let text = match args.output {
        Output::Json if args.list => {
            return pretty(&devices.iter().map(|(name, _)| name).collect::<Vec<_>>());
        }
        Output::Json => {
            let one = |(name, xml)| json!({ "name": name, "xml": xml });
            return pretty(&devices.into_iter().map(one).collect::<Vec<_>>());
        }
        Output::Text if args.list => devices.iter().flat_map(|(name, _)| [name, "\n"]).collect(),
        Output::Text => {
            let all: String = devices.into_iter().map(|(_, xml)| xml).collect();
            format!("<devices>\n{all}</devices>\n")
        }
    };
    Ok(text.into_bytes())
}
