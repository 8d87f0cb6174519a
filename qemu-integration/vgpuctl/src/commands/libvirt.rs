//! `libvirt`: attaches vGPUs to libvirt domains.
//!
//! * [`virsh`]: reads and writes domains
//! * [`hook`]: starts and stops vGPUs with their domains; [`claims`] has the hook's persistent
//!   state
//! * [`install_hook`]: installs and removes the hook

mod claims;
mod hook;
mod install_hook;
pub mod virsh;

use std::path::{Path, PathBuf};

use hyper::Method;
use integrate::domain::{Attachment, Domain, Vgpu as Wanted};
use integrate::nodedev::{Mdev, Parent, Type};
use mdev_core::definition::{Attrs, VgpuRef};
use mdev_core::ids::VgpuId;
use mdev_core::untrusted::{VALUE, read_text};
use serde_json::json;
use vgpud_api::{Attribute, ModifyVgpu, ParentTypes, Version, Vgpu, VgpuState};

use self::virsh::Virsh;
use crate::cli::Output;
use crate::cli::libvirt::{self as cli, Attach, Detach, Libvirt, LibvirtCommand, Nodedev};
use crate::commands::vm::{has_head, type_has_head};
use crate::failure::{Failure, say};
use crate::mdevctl::pretty;
use vgpud_client::{Client, vgpu_path};

/// Runs `libvirt`.
pub async fn libvirt(client: &Client, args: Libvirt) -> Result<Vec<u8>, Failure> {
    match args.command {
        LibvirtCommand::Attach(args) => attach(client, args).await,
        LibvirtCommand::Detach(args) => detach(client, &args).await,
        LibvirtCommand::InstallHook(args) => install_hook::install(client.socket(), &args),
        LibvirtCommand::UninstallHook(args) => install_hook::uninstall(&args),
        LibvirtCommand::Nodedev(args) => nodedev(client, args).await,
        LibvirtCommand::Hook(args) => hook::hook(client, args).await.map(|()| Vec::new()),
    }
}

/// Runs `libvirt attach`.
async fn attach(client: &Client, args: Attach) -> Result<Vec<u8>, Failure> {
    let asked = &args.domain;
    let virsh = Virsh::at(&asked.connect);
    let xml = changeable_definition(&virsh, asked)?;
    let domain = parse(&xml, asked)?;
    let vgpu = if let Some(vgpu) = args.vgpu.vgpu() {
        defined_vgpu(client.vgpu(vgpu, None).await?.uuid)
    } else {
        // The command line has either a vGPU or --type.
        check_offered(
            client,
            args.mdev_type.as_deref().unwrap_or_default(),
            args.parent.as_deref(),
        )
        .await?;
        let wanted = Wanted {
            mdev_type: args.mdev_type.clone(),
            parent: args.parent.clone(),
            core: args.core,
            name: args.vgpu_name.clone(),
            ..defined_vgpu(VgpuId::random())
        };
        transient_vgpu(&domain, wanted, asked)?
    };
    let version: Version = client.get("/v1/version").await?;
    let socket = Path::new(&version.run_dir).join("vgpus").join(vgpu.uuid.to_string());
    let attachment = Attachment { vgpu: vgpu.clone(), socket: socket.join("vfio.sock") };
    let changed = domain.attach(&attachment).map_err(|error| refused(asked, &error))?;
    if asked.print_xml {
        return Ok(changed.unwrap_or_else(|| xml.clone()).into_bytes());
    }
    let defined_core = args.core.filter(|_| vgpu.mdev_type.is_none());
    if let Some(core) = defined_core {
        set_core(client, vgpu.uuid, core).await?;
    }
    let of_type =
        vgpu.mdev_type.as_ref().map(|name| format!(" of type {name}")).unwrap_or_default();
    let VgpuId(uuid) = vgpu.uuid;
    let (name, uuid) = (domain.name(), uuid.hyphenated());
    let text = if changed.is_some() {
        format!("Domain '{name}' has vGPU {uuid}{of_type} from its next start on\n")
    } else if let Some(core) = defined_core {
        format!(
            "Domain '{name}' has vGPU {uuid} already; its core is {core} from its next start on\n"
        )
    } else {
        format!("Domain '{name}' has vGPU {uuid}{of_type} already; nothing was changed\n")
    };
    if let Some(changed) = &changed {
        virsh.define(&asked.name, changed)?;
    }
    let head = match &vgpu.mdev_type {
        Some(name) => type_has_head(client, name).await?,
        None => has_head(client, &client.vgpu(vgpu.uuid, None).await?).await?,
    };
    for note in domain.notes(head) {
        say(format_args!("note: domain '{name}': {note}"));
    }
    if asked.connect == "qemu:///system" && !Path::new("/").join(install_hook::HOOK).exists() {
        say(format_args!(
            "note: the hook that starts the vGPU is not installed; run `vgpuctl libvirt install-hook`"
        ));
    }
    result(asked, &domain, &vgpu, changed.is_some(), text)
}

/// Runs `libvirt detach`.
async fn detach(client: &Client, args: &Detach) -> Result<Vec<u8>, Failure> {
    let asked = &args.domain;
    let virsh = Virsh::at(&asked.connect);
    let xml = changeable_definition(&virsh, asked)?;
    let domain = parse(&xml, asked)?;
    let which = match args.vgpu.vgpu() {
        None => None,
        Some(VgpuRef::Id(id)) => Some(*id),
        // A transient vGPU does not exist while its domain is shut down.
        Some(VgpuRef::Name(name)) => {
            let vgpus = domain.vgpus();
            match vgpus.iter().find(|vgpu| vgpu.name.as_ref() == Some(name)) {
                Some(vgpu) => Some(vgpu.uuid),
                None => Some(client.vgpu(name, None).await?.uuid),
            }
        }
    };
    let (changed, vgpu) = domain.detach(which).map_err(|error| refused(asked, &error))?;
    if asked.print_xml {
        return Ok(changed.into_bytes());
    }
    virsh.define(&asked.name, &changed)?;
    let text = format!("vGPU {} is detached from domain '{}'\n", vgpu.uuid, domain.name());
    result(asked, &domain, &vgpu, true, text)
}

/// Returns a domain's definition. Fails if the definition cannot be changed now.
fn changeable_definition(virsh: &Virsh<'_>, asked: &cli::Domain) -> Result<String, Failure> {
    let name = &asked.name;
    let state = virsh.state(name)?;
    if !state.persistent {
        return Err(Failure::NotNow(format!(
            "Domain '{name}' has no definition that could be changed; define the domain first: \
             virsh dumpxml {name} > {name}.xml, virsh define {name}.xml"
        )));
    }
    if state.active && !asked.config && !asked.print_xml {
        return Err(Failure::NotNow(format!(
            "Domain '{name}' is running; shut it down first, or add --config to change its next start"
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

/// Returns the metadata of a defined vGPU.
fn defined_vgpu(uuid: VgpuId) -> Wanted {
    Wanted { uuid, mdev_type: None, parent: None, core: None, name: None }
}

/// Returns the metadata of a transient vGPU. The domain's transient vGPU, if there is one, gets the
/// requested settings and keeps the others: repeating the command must not attach a second vGPU.
fn transient_vgpu(
    domain: &Domain<'_>,
    wanted: Wanted,
    asked: &cli::Domain,
) -> Result<Wanted, Failure> {
    let same = |existing: &Wanted| Wanted { uuid: wanted.uuid, ..existing.clone() } == wanted;
    let vgpus = domain.vgpus();
    let found = vgpus.iter().find(|vgpu| same(vgpu));
    match found.or(vgpus.first()) {
        None => Ok(wanted),
        Some(existing) if found.is_some() => Ok(existing.clone()),
        Some(only) if vgpus.len() == 1 && only.mdev_type.is_some() => Ok(Wanted {
            uuid: only.uuid,
            mdev_type: wanted.mdev_type,
            parent: wanted.parent.or_else(|| only.parent.clone()),
            core: wanted.core.or(only.core),
            name: wanted.name.or_else(|| only.name.clone()),
        }),
        Some(existing) => Err(Failure::NotNow(format!(
            "Domain '{}' already has vGPU {}; detach that vGPU first, or attach a defined vGPU with --uuid",
            asked.name, existing.uuid
        ))),
    }
}

/// Checks that a parent offers the type.
async fn check_offered(client: &Client, name: &str, parent: Option<&str>) -> Result<(), Failure> {
    let parents: Vec<ParentTypes> = client.get("/v1/types").await?;
    let mut on =
        parents.iter().filter(|on| parent.is_none_or(|parent| on.parent == parent)).peekable();
    if let (None, Some(parent)) = (on.peek(), parent) {
        return Err(Failure::NotFound(format!(
            "There is no parent {parent}; `vgpuctl types` lists parents and types"
        )));
    }
    if on.any(|on| on.types.iter().any(|offered| offered.name == name)) {
        return Ok(());
    }
    Err(Failure::NotFound(format!(
        "No parent offers type {name}; `vgpuctl types` lists parents and types"
    )))
}

/// Changes the attribute `core` of a defined vGPU.
async fn set_core(client: &Client, uuid: VgpuId, core: u8) -> Result<(), Failure> {
    let vgpu = client.vgpu(uuid, None).await?;
    let mut attrs: Attrs =
        vgpu.attrs.iter().flatten().map(|(name, value)| (name.clone(), value.clone())).collect();
    attrs.set("core", &core.to_string());
    let attrs: Vec<Attribute> =
        attrs.iter().map(|(name, value)| [(name.to_owned(), value.to_owned())].into()).collect();
    let request = ModifyVgpu { attrs: Some(attrs), ..ModifyVgpu::default() };
    Ok(client.request(Method::PATCH, &vgpu_path(uuid), &request).await?)
}

/// Formats the result of `attach` and `detach`.
fn result(
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
        "name": vgpu.name,
        "changed": changed,
    }))
}

/// Returns the PCI vendor and device ID of a function of this host.
fn pci_ids(name: &str) -> Option<[String; 2]> {
    // Refuse names that are not PCI addresses, because the name becomes part of a path.
    let plain = |c: char| c.is_ascii_hexdigit() || c == ':' || c == '.';
    if !name.chars().all(plain) {
        return None;
    }
    let folder = Path::new("/sys/bus/pci/devices").join(name);
    let read = |file| Some(read_text(&folder.join(file), VALUE).ok()?.trim().to_owned());
    Some([read("vendor")?, read("device")?])
}

/// Runs `libvirt nodedev`.
async fn nodedev(client: &Client, args: Nodedev) -> Result<Vec<u8>, Failure> {
    let parents: Vec<vgpud_api::Parent> = client.get("/v1/parents").await?;
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
                "There is no node device {name}; `vgpuctl libvirt nodedev --list` lists the names"
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
