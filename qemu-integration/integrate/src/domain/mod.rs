//! A libvirt domain's XML, with a vGPU and again without it. All else in it stays as it is, to the byte.
//!
//! * [`metadata`]: what we write down in a domain about its vGPUs
//! * [`memory`]: guest memory that a vGPU can reach
//! * [`place`]: where in the VM there is room for the device

pub mod memory;
pub mod metadata;
pub mod place;

use std::path::PathBuf;

use mdev_core::ids::VgpuId;
use quick_xml::escape::escape;

use crate::device::Device;
use crate::libvirt_xml::NAMESPACE as QEMU;
use crate::xml::{Edits, Element, XmlError};

pub use metadata::{NAMESPACE, Vgpu};

/// Why a domain cannot be changed, as what follows its name in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    /// Its XML cannot be read.
    #[error("cannot be read: {0}")]
    Xml(#[from] XmlError),
    /// The text is about something else.
    #[error("is no domain: its XML begins with <{0}>")]
    NoDomain(String),
    /// QEMU's arguments mean nothing to it.
    #[error("is of type {0}; a vGPU needs QEMU (type kvm or qemu)")]
    NotQemu(String),
    /// Nowhere to put the device.
    #[error("has no PCI bus that a vGPU could be on; use the machine q35")]
    NoBus,
    /// All slots are taken.
    #[error(
        "has no free slot on its first PCI bus; remove a device, or put one behind a root port"
    )]
    NoSlot,
    /// Its owner wants memory of a kind that nobody else can map.
    #[error(
        "asks for memory that no other process can map ({0}), and a GPU works on the VM's own pages; \
         make that shared, or remove it"
    )]
    PrivateMemory(&'static str),
    /// There already, with other settings.
    #[error("has vGPU {0} already, with other settings; detach that first")]
    Differs(VgpuId),
    /// There already, by somebody else's hand.
    #[error(
        "has vGPU {0} already, by a <qemu:commandline> that was not written by attach; \
         remove that (`virsh edit`) first"
    )]
    ByHand(VgpuId),
    /// Nothing to take away.
    #[error("has no vGPU that attach gave it")]
    None,
    /// Not the one that was named.
    #[error("has no vGPU {0}, but {1}")]
    NotThis(VgpuId, String),
    /// Which one?
    #[error("has several vGPUs; name one of them with --uuid: {0}")]
    Several(String),
}

/// What a domain is to be given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// What is written down.
    pub vgpu: Vgpu,
    /// Where QEMU finds it.
    pub socket: PathBuf,
}

/// A domain's XML that could be read.
#[derive(Clone, Debug)]
pub struct Domain<'a> {
    text: &'a str,
    root: Element,
}

impl<'a> Domain<'a> {
    /// Reads it.
    pub fn parse(text: &'a str) -> Result<Self, DomainError> {
        let root = Element::parse(text)?;
        if root.name != "domain" {
            return Err(DomainError::NoDomain(root.name));
        }
        Ok(Self { text, root })
    }

    /// Its name.
    pub fn name(&self) -> String {
        self.root.child("name").map(|name| name.text(self.text)).unwrap_or_default()
    }

    /// Its uuid.
    pub fn uuid(&self) -> String {
        self.root.child("uuid").map(|uuid| uuid.text(self.text)).unwrap_or_default()
    }

    /// The vGPUs that were attached to it.
    pub fn vgpus(&self) -> Vec<Vgpu> {
        metadata::find(&self.root).map(metadata::vgpus).unwrap_or_default()
    }

    /// The user and group that its QEMU runs as, as libvirt writes them once it has chosen: `+64055`, or a name.
    pub fn qemu_user(&self) -> Option<(String, String)> {
        let label =
            self.root.children_in("", "seclabel").find(|l| l.attribute("model") == Some("dac"));
        let label = label?.child("label")?.text(self.text);
        let (user, group) = label.split_once(':')?;
        Some((user.to_owned(), group.to_owned()))
    }

    /// What one should know who gives it a vGPU.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = Vec::new();
        let devices = self.root.child("devices");
        if devices.is_some_and(|devices| devices.child("iommu").is_some()) {
            notes.push(
                "it has an emulated IOMMU: a guest that switches it on takes its memory away from the vGPU"
                    .to_owned(),
            );
        }
        notes
    }

    /// Its XML with a vGPU; `None` where it has that already.
    pub fn attach(&self, attachment: &Attachment) -> Result<Option<String>, DomainError> {
        let Attachment { vgpu, socket } = attachment;
        if let Some(there) = self.vgpus().into_iter().find(|there| there.uuid == vgpu.uuid) {
            return if there == *vgpu { Ok(None) } else { Err(DomainError::Differs(vgpu.uuid)) };
        }
        if self.arguments().iter().any(|(_, device)| is_of(device, vgpu.uuid)) {
            return Err(DomainError::ByHand(vgpu.uuid));
        }
        let kind = self.root.attribute("type").unwrap_or_default();
        if !matches!(kind, "kvm" | "qemu") {
            return Err(DomainError::NotQemu(kind.to_owned()));
        }
        let taken: Vec<_> = self.arguments().into_iter().map(|(_, device)| device).collect();
        let (bus, slot) = place::find(&self.root, &taken)?;
        let device =
            Device::new(socket).with_id(device_id(vgpu.uuid)).at(bus, format!("{slot:#x}"));
        let mut edits = Edits::of(self.text);
        let changes = memory::share(&self.root, &mut edits)?;
        metadata::add(&self.root, vgpu, changes, &mut edits);
        self.add_arguments(&device, &mut edits);
        Ok(Some(edits.apply()))
    }

    /// Its XML without one of its vGPUs, or without the only one; and which that was.
    pub fn detach(&self, which: Option<VgpuId>) -> Result<(String, Vgpu), DomainError> {
        let all = self.vgpus();
        let names = || all.iter().map(|vgpu| vgpu.uuid.to_string()).collect::<Vec<_>>().join(", ");
        let vgpu = match (which, all.as_slice()) {
            (_, []) => return Err(DomainError::None),
            (Some(uuid), all) => {
                let found = all.iter().find(|vgpu| vgpu.uuid == uuid);
                found.ok_or_else(|| DomainError::NotThis(uuid, names()))?
            }
            (None, [only]) => only,
            (None, _) => return Err(DomainError::Several(names())),
        };
        let mut edits = Edits::of(self.text);
        self.remove_arguments(vgpu.uuid, &mut edits);
        if let Some(changes) = metadata::remove(&self.root, vgpu.uuid, &mut edits) {
            memory::unshare(&self.root, changes, &mut edits);
        }
        Ok((edits.apply(), vgpu.clone()))
    }

    fn commandline(&self) -> Option<&Element> {
        self.root.child_in(QEMU, "commandline")
    }

    /// The `-device` arguments that are passed through: the elements of each, and its value.
    fn arguments(&self) -> Vec<([&Element; 2], &str)> {
        let args: Vec<_> = self
            .commandline()
            .into_iter()
            .flat_map(|line| line.children_in(QEMU, "arg"))
            .map(|arg| (arg, arg.attribute("value").unwrap_or_default()))
            .collect();
        let pairs = args.iter().zip(args.iter().skip(1));
        pairs
            .filter(|((_, option), _)| *option == "-device")
            .map(|((option, _), (device, value))| ([*option, *device], *value))
            .collect()
    }

    fn add_arguments(&self, device: &Device, edits: &mut Edits<'a>) {
        let declared = self.root.attributes.iter().find_map(|(name, value)| {
            name.strip_prefix("xmlns:").filter(|_| value == QEMU).map(str::to_owned)
        });
        let prefix = declared.clone().unwrap_or_else(|| "qemu".to_owned());
        if declared.is_none() {
            let end = self.root.tag.end - 1;
            edits.replace(end..end, format!(" xmlns:{prefix}=\"{QEMU}\""));
        }
        let arg = |value: &str| format!("<{prefix}:arg value=\"{}\"/>", escape(value));
        let args = [arg("-device"), arg(&device.json())];
        if let Some(line) = self.commandline() {
            edits.add_last(line, &args);
        } else {
            let mut lines = vec![format!("<{prefix}:commandline>")];
            lines.extend(args.map(|arg| format!("  {arg}")));
            lines.push(format!("</{prefix}:commandline>"));
            edits.add_last(&self.root, &lines);
        }
    }

    fn remove_arguments(&self, uuid: VgpuId, edits: &mut Edits<'a>) {
        let arguments = self.arguments();
        let ours: Vec<_> = arguments
            .iter()
            .filter(|(_, value)| is_of(value, uuid))
            .flat_map(|(pair, _)| pair)
            .collect();
        let Some(line) = self.commandline() else { return };
        if line.children.len() > ours.len() {
            return ours.into_iter().for_each(|arg| edits.remove(arg));
        }
        edits.remove(line);
        // Its namespace, where nothing else is of it. libvirt drops an unused one by itself.
        let others = self.root.children.iter().filter(|child| child.namespace == QEMU).count();
        let tag = self.text.get(self.root.tag.clone()).unwrap_or_default();
        for quote in ['"', '\''] {
            let declaration = format!(" xmlns:qemu={quote}{QEMU}{quote}");
            if let Some(at) = tag.find(&declaration).filter(|_| others == 1) {
                let at = self.root.tag.start + at;
                edits.replace(at..at + declaration.len(), "");
            }
        }
    }
}

/// The device's name in QEMU, by which it can be unplugged.
fn device_id(uuid: VgpuId) -> String {
    let uuid = uuid.to_string();
    format!("vgpu-{}", uuid.split('-').next().unwrap_or(&uuid))
}

/// True for the value of a `-device` that is this vGPU.
fn is_of(value: &str, uuid: VgpuId) -> bool {
    value.contains("vfio-user-pci") && value.contains(&format!("/{uuid}/"))
}

#[cfg(test)]
mod tests;
