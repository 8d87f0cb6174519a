//! Attaches vGPUs to the XML of a libvirt domain and detaches them. All other bytes stay unchanged.
//!
//! * [`metadata`]: the list of a domain's vGPUs in its XML
//! * [`memory`]: shared guest memory
//! * [`pci_slot`]: free PCI slots
//! * [`save_guard`]: an image that keeps libvirt from saving the domain without its vGPUs

pub mod memory;
pub mod metadata;
pub mod pci_slot;
pub mod save_guard;

use std::path::{Path, PathBuf};

use mdev_core::ids::VgpuId;
use quick_xml::escape::escape;

use crate::device::Device;
use crate::libvirt_xml::NAMESPACE as QEMU;
use crate::xml::{Edits, Element, XmlError};

pub use metadata::{NAMESPACE, Vgpu};

/// Reason why a domain cannot be changed. Each message continues a sentence that begins with the
/// domain's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DomainError {
    /// The XML cannot be parsed.
    #[error("cannot be read: {0}")]
    Xml(#[from] XmlError),
    /// The root element is not `<domain>`.
    #[error("is not a libvirt domain: the root element of its XML is <{0}>")]
    NoDomain(String),
    /// The hypervisor is not QEMU.
    #[error("is of type {0}; a vGPU needs QEMU (type kvm or qemu)")]
    NotQemu(String),
    /// The machine has no PCI bus.
    #[error("has no PCI bus for a vGPU; use the machine type q35")]
    NoBus,
    /// All slots are in use.
    #[error(
        "has no free slot on its first PCI bus; remove a device, or move one behind a root port"
    )]
    NoSlot,
    /// The domain explicitly requests private memory.
    #[error(
        "requests memory that no other process can map ({0}), but a GPU accesses guest pages \
         directly; make the memory shared, or remove that setting"
    )]
    PrivateMemory(&'static str),
    /// The domain has the vGPU as a defined one, or as a transient one, and not as requested.
    #[error("already has vGPU {0} with other settings; detach that vGPU first")]
    Differs(VgpuId),
    /// The domain has the vGPU, but no metadata of it.
    #[error(
        "already has vGPU {0} in a <qemu:commandline> that was not written by attach; \
         remove that element (`virsh edit`) first"
    )]
    ByHand(VgpuId),
    /// The domain has no vGPU.
    #[error("has no vGPU from `vgpuctl libvirt attach`")]
    None,
    /// The domain has other vGPUs than the named one.
    #[error("has no vGPU {0}; its vGPUs are: {1}")]
    NotThis(VgpuId, String),
    /// The domain has several vGPUs, and none was named.
    #[error("has several vGPUs; name one of them with --uuid: {0}")]
    Several(String),
}

/// vGPU to attach to a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// Entry for the metadata.
    pub vgpu: Vgpu,
    /// Path of the vGPU's vfio-user socket.
    pub socket: PathBuf,
}

/// Parsed XML of a domain.
#[derive(Clone, Debug)]
pub struct Domain<'a> {
    text: &'a str,
    root: Element,
}

impl<'a> Domain<'a> {
    /// Parses the XML of a domain.
    pub fn parse(text: &'a str) -> Result<Self, DomainError> {
        let root = Element::parse(text)?;
        if root.name != "domain" {
            return Err(DomainError::NoDomain(root.name));
        }
        Ok(Self { text, root })
    }

    /// Returns the domain's name.
    pub fn name(&self) -> String {
        self.root.child("name").map(|name| name.text(self.text)).unwrap_or_default()
    }

    /// Returns the domain's uuid.
    pub fn uuid(&self) -> String {
        self.root.child("uuid").map(|uuid| uuid.text(self.text)).unwrap_or_default()
    }

    /// Returns the vGPUs that the metadata lists.
    pub fn vgpus(&self) -> Vec<Vgpu> {
        metadata::find(&self.root).map(metadata::vgpus).unwrap_or_default()
    }

    /// Returns the user and group of the domain's QEMU process: a name, or `+64055` for a number.
    /// libvirt adds them to the XML before the `start` hook.
    pub fn qemu_user(&self) -> Option<(String, String)> {
        let label =
            self.root.children_in("", "seclabel").find(|l| l.attribute("model") == Some("dac"));
        let label = label?.child("label")?.text(self.text);
        let (user, group) = label.split_once(':')?;
        Some((user.to_owned(), group.to_owned()))
    }

    /// Returns notes for the user who attaches a vGPU with or without a display head.
    pub fn notes(&self, head: bool) -> Vec<String> {
        let mut notes = vec![format!(
            "virsh refuses to save it while it has a vGPU (save, managedsave, snapshots with \
                 memory); use `vgpuctl vm save --domain {}`",
            self.name()
        )];
        let devices = self.root.child("devices");
        let mut videos = devices.into_iter().flat_map(|devices| devices.children_in("", "video"));
        let model = |video: &Element| Some(video.child("model")?.attribute("type")?.to_owned());
        if let Some(model) = videos.find_map(model).filter(|model| head && model != "none") {
            notes.push(format!(
                "the domain also has a display adapter ({model}), on which it starts: the vGPU's \
                 screen stays off until the guest's driver turns it on. For the vGPU alone, replace \
                 <video> by <video><model type='none'/></video> (`virsh edit`)"
            ));
        }
        if devices.is_some_and(|devices| devices.child("iommu").is_some()) {
            notes.push(
                "the domain has an emulated IOMMU; a vGPU loses access to guest memory when the \
                 guest enables that IOMMU"
                    .to_owned(),
            );
        }
        notes
    }

    /// Returns the XML with a vGPU attached, or `None` if the same vGPU is already attached. A
    /// transient vGPU of the same uuid gets the new settings.
    pub fn attach(&self, attachment: &Attachment) -> Result<Option<String>, DomainError> {
        let Attachment { vgpu, socket } = attachment;
        if let Some(existing) = self.vgpus().into_iter().find(|other| other.uuid == vgpu.uuid) {
            if existing == *vgpu {
                return Ok(None);
            }
            if existing.mdev_type.is_none() || vgpu.mdev_type.is_none() {
                return Err(DomainError::Differs(vgpu.uuid));
            }
            let mut edits = Edits::new(self.text);
            metadata::replace(&self.root, vgpu, &mut edits);
            return Ok(Some(edits.apply()));
        }
        if self.devices().iter().any(|device| is_device_of(device, vgpu.uuid)) {
            return Err(DomainError::ByHand(vgpu.uuid));
        }
        let device = self.device(socket, &device_id(vgpu.uuid))?;
        let mut args = vec![("-device", device.json())];
        if self.vgpus().is_empty() {
            args.push((
                "-blockdev",
                save_guard::block_device(&save_guard::path(socket)).to_string(),
            ));
        }
        let mut edits = Edits::new(self.text);
        let added = memory::share(&self.root, &mut edits)?;
        metadata::add(&self.root, vgpu, added, &mut edits);
        self.add_arguments(&args, &mut edits);
        Ok(Some(edits.apply()))
    }

    /// Returns the XML with a vfio-user device at a socket, or `None` if the domain has a device
    /// there. For domains whose XML is made anew for each start: without metadata.
    pub fn add_device(&self, socket: &Path, id: &str) -> Result<Option<String>, DomainError> {
        if self.devices().iter().any(|device| is_at(device, socket)) {
            return Ok(None);
        }
        let device = self.device(socket, id)?;
        let mut edits = Edits::new(self.text);
        memory::share(&self.root, &mut edits)?;
        self.add_arguments(&[("-device", device.json())], &mut edits);
        Ok(Some(edits.apply()))
    }

    /// Returns the XML of a domain that waits for its saved state when it starts.
    pub fn awaiting_state(&self) -> String {
        let mut edits = Edits::new(self.text);
        if !self.arguments().iter().any(|(_, [option, _])| *option == "-incoming") {
            self.add_arguments(&[("-incoming", "defer".to_owned())], &mut edits);
        }
        edits.apply()
    }

    /// Returns the XML without the named vGPU, or without the only one, and the removed vGPU.
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
        let mut edits = Edits::new(self.text);
        let last = all.len() == 1;
        let ours = |value: &str| {
            is_device_of(value, vgpu.uuid) || (last && save_guard::is_argument(value))
        };
        self.remove_arguments(ours, &mut edits);
        if let Some(added) = metadata::remove(&self.root, vgpu.uuid, &mut edits) {
            memory::unshare(&self.root, added, &mut edits);
        }
        Ok((edits.apply(), vgpu.clone()))
    }

    /// Returns a device at a free slot.
    fn device(&self, socket: &Path, id: &str) -> Result<Device, DomainError> {
        let kind = self.root.attribute("type").unwrap_or_default();
        if !matches!(kind, "kvm" | "qemu") {
            return Err(DomainError::NotQemu(kind.to_owned()));
        }
        let free = pci_slot::Free::find(&self.root, &self.devices())?;
        Ok(Device::new(socket).with_id(id).at(free.bus, format!("{:#x}", free.first)))
    }

    fn commandline(&self) -> Option<&Element> {
        self.root.child_in(QEMU, "commandline")
    }

    /// Returns the options that the domain passes through, with both elements and the value.
    fn arguments(&self) -> Vec<([&Element; 2], [&str; 2])> {
        let args: Vec<_> = self
            .commandline()
            .into_iter()
            .flat_map(|line| line.children_in(QEMU, "arg"))
            .map(|arg| (arg, arg.attribute("value").unwrap_or_default()))
            .collect();
        let pairs = args.iter().zip(args.iter().skip(1));
        pairs
            .filter(|((_, option), _)| option.starts_with('-'))
            .map(|((option, name), (element, value))| ([*option, *element], [*name, *value]))
            .collect()
    }

    /// Returns the values of `-device` that the domain passes through.
    fn devices(&self) -> Vec<&str> {
        let devices = self.arguments().into_iter().filter(|(_, [option, _])| *option == "-device");
        devices.map(|(_, [_, value])| value).collect()
    }

    fn add_arguments(&self, options: &[(&str, String)], edits: &mut Edits<'a>) {
        let declared = self.root.attributes.iter().find_map(|(name, value)| {
            name.strip_prefix("xmlns:").filter(|_| value == QEMU).map(str::to_owned)
        });
        let prefix = declared.clone().unwrap_or_else(|| "qemu".to_owned());
        if declared.is_none() {
            let end = self.root.tag.end - 1;
            edits.replace(end..end, format!(" xmlns:{prefix}=\"{QEMU}\""));
        }
        let arg = |value: &str| format!("<{prefix}:arg value=\"{}\"/>", escape(value));
        let args: Vec<_> =
            options.iter().flat_map(|(option, value)| [arg(option), arg(value)]).collect();
        if let Some(line) = self.commandline() {
            edits.add_last(line, &args);
        } else {
            let mut lines = vec![format!("<{prefix}:commandline>")];
            lines.extend(args.iter().map(|arg| format!("  {arg}")));
            lines.push(format!("</{prefix}:commandline>"));
            edits.add_last(&self.root, &lines);
        }
    }

    fn remove_arguments(&self, is_ours: impl Fn(&str) -> bool, edits: &mut Edits<'a>) {
        let arguments = self.arguments();
        let ours: Vec<_> = arguments
            .iter()
            .filter(|(_, [_, value])| is_ours(value))
            .flat_map(|(pair, _)| pair)
            .collect();
        let Some(line) = self.commandline() else { return };
        if line.children.len() > ours.len() {
            return ours.into_iter().for_each(|arg| edits.remove(arg));
        }
        edits.remove(line);
        // Remove the namespace declaration too if no other element needs it.
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

/// Returns the QEMU device ID of a vGPU.
fn device_id(uuid: VgpuId) -> String {
    let uuid = uuid.to_string();
    format!("vgpu-{}", uuid.split('-').next().unwrap_or(&uuid))
}

/// Returns whether a value of `-device` is a vfio-user device at this socket.
fn is_at(device: &str, socket: &Path) -> bool {
    let value: serde_json::Value = serde_json::from_str(device).unwrap_or_default();
    value["driver"] == "vfio-user-pci" && value["socket"]["path"] == *socket.to_string_lossy()
}

/// Returns whether a value of `-device` is the device of this vGPU.
fn is_device_of(value: &str, uuid: VgpuId) -> bool {
    value.contains("vfio-user-pci") && value.contains(&format!("/{uuid}/"))
}

#[cfg(test)]
mod tests;
