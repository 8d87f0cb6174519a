//! Metadata element in a domain that lists its vGPUs. libvirt keeps the element with the domain
//! and passes it to the hook.
//!
//! ```xml
//! <tessera:vgpus xmlns:tessera="urn:tessera:domain:1" added="memoryBacking">
//!   <tessera:vgpu uuid="..." type="SOFT-1Q" core="50" name="web1"/>
//! </tessera:vgpus>
//! ```

use std::fmt::Write as _;

use mdev_core::definition::VgpuName;
use mdev_core::ids::VgpuId;
use quick_xml::escape::escape;

use super::memory::AddedMemory;
use crate::xml::{Edits, Element};

/// Namespace of the metadata element. libvirt permits one metadata element per namespace.
pub const NAMESPACE: &str = "urn:tessera:domain:1";

/// vGPU of a domain, as the metadata records it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vgpu {
    /// Uuid of the vGPU.
    pub uuid: VgpuId,
    /// Type of a transient vGPU, which is created for each start of the domain. `None` for a
    /// defined vGPU.
    pub mdev_type: Option<String>,
    /// Parent of a transient vGPU. `None` selects the first parent with room.
    pub parent: Option<String>,
    /// Share of a transient vGPU in hundredths of the GPU.
    pub core: Option<u8>,
    /// Name of a transient vGPU.
    pub name: Option<VgpuName>,
}

impl Vgpu {
    /// Formats the vGPU as an XML element.
    fn line(&self) -> String {
        let mut line = format!("<tessera:vgpu uuid=\"{}\"", self.uuid);
        let core = self.core.map(|core| core.to_string());
        let own = self.name.as_ref().map(ToString::to_string);
        for (name, value) in
            [("type", &self.mdev_type), ("parent", &self.parent), ("core", &core), ("name", &own)]
        {
            if let Some(value) = value {
                // Writing to a String does not fail.
                let _ = write!(line, " {name}=\"{}\"", escape(value.as_str()));
            }
        }
        line + "/>"
    }

    fn parse(element: &Element) -> Option<Self> {
        let text = |name| element.attribute(name).map(str::to_owned);
        Some(Self {
            uuid: element.attribute("uuid")?.parse().ok()?,
            mdev_type: text("type"),
            parent: text("parent"),
            core: element.attribute("core").and_then(|core| core.parse().ok()),
            name: element.attribute("name").and_then(|name| name.parse().ok()),
        })
    }
}

/// Returns the metadata element of a domain.
pub fn find(domain: &Element) -> Option<&Element> {
    domain.child("metadata")?.child_in(NAMESPACE, "vgpus")
}

/// Returns the vGPUs that a metadata element lists.
pub fn vgpus(element: &Element) -> Vec<Vgpu> {
    element.children_in(NAMESPACE, "vgpu").filter_map(Vgpu::parse).collect()
}

/// Adds a vGPU to the metadata. The first one also records the added memory elements.
pub(super) fn add(domain: &Element, vgpu: &Vgpu, added: AddedMemory, edits: &mut Edits<'_>) {
    if let Some(element) = find(domain) {
        return edits.add_last(element, &[vgpu.line()]);
    }
    let added = added.names().join(" ");
    let added = if added.is_empty() { added } else { format!(" added=\"{added}\"") };
    let lines = [
        format!("<tessera:vgpus xmlns:tessera=\"{NAMESPACE}\"{added}>"),
        format!("  {}", vgpu.line()),
        "</tessera:vgpus>".to_owned(),
    ];
    if let Some(metadata) = domain.child("metadata") {
        return edits.add_last(metadata, &lines);
    }
    let mut whole = vec!["<metadata>".to_owned()];
    whole.extend(lines.map(|line| format!("  {line}")));
    whole.push("</metadata>".to_owned());
    match domain.child("uuid").or_else(|| domain.child("name")) {
        Some(sibling) => edits.add_after(sibling, &whole),
        None => edits.add_last(domain, &whole),
    }
}

/// Replaces the entry of a vGPU.
pub(super) fn replace(domain: &Element, vgpu: &Vgpu, edits: &mut Edits<'_>) {
    let listed =
        find(domain).into_iter().flat_map(|element| element.children_in(NAMESPACE, "vgpu"));
    let same = |child: &&Element| Vgpu::parse(child).is_some_and(|found| found.uuid == vgpu.uuid);
    for child in listed.filter(same) {
        edits.replace(child.span.clone(), vgpu.line());
    }
}

/// Removes a vGPU from the metadata. For the last one, returns the memory elements to remove.
pub(super) fn remove(domain: &Element, uuid: VgpuId, edits: &mut Edits<'_>) -> Option<AddedMemory> {
    let metadata = domain.child("metadata")?;
    let element = metadata.child_in(NAMESPACE, "vgpus")?;
    let of = |child: &&Element| Vgpu::parse(child).is_some_and(|vgpu| vgpu.uuid == uuid);
    if vgpus(element).iter().any(|vgpu| vgpu.uuid != uuid) {
        let ours = element.children_in(NAMESPACE, "vgpu").filter(of);
        ours.for_each(|child| edits.remove(child));
        return None;
    }
    edits.remove(if metadata.children.len() == 1 { metadata } else { element });
    Some(AddedMemory::parse(element.attribute("added").unwrap_or_default()))
}
