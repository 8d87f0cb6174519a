//! What is written down in a domain about its vGPUs: libvirt keeps it with the domain and hands it to the hook.
//!
//! ```xml
//! <tessera:vgpus xmlns:tessera="urn:tessera:domain:1" added="memoryBacking">
//!   <tessera:vgpu uuid="..." type="SOFT-1Q" core="50"/>
//! </tessera:vgpus>
//! ```

use std::fmt::Write as _;

use mdev_core::ids::VgpuId;
use quick_xml::escape::escape;

use super::memory::Changes;
use crate::xml::{Edits, Element};

/// The namespace of our element. A domain has one element of it at most: libvirt's rule.
pub const NAMESPACE: &str = "urn:tessera:domain:1";

/// One vGPU of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vgpu {
    /// Its name.
    pub uuid: VgpuId,
    /// Its type, for one that is the domain's own and made anew for each start. One that is defined has its own type.
    pub mdev_type: Option<String>,
    /// The physical GPU that it is to be on; the first that has room where there is none.
    pub parent: Option<String>,
    /// Hundredths of the GPU, for one that is the domain's own.
    pub core: Option<u8>,
}

impl Vgpu {
    /// As an element.
    fn line(&self) -> String {
        let mut line = format!("<tessera:vgpu uuid=\"{}\"", self.uuid);
        let core = self.core.map(|core| core.to_string());
        for (name, value) in [("type", &self.mdev_type), ("parent", &self.parent), ("core", &core)]
        {
            if let Some(value) = value {
                // A String takes whatever is written to it.
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
        })
    }
}

/// Our element in a domain.
pub fn find(domain: &Element) -> Option<&Element> {
    domain.child("metadata")?.child_in(NAMESPACE, "vgpus")
}

/// What it says.
pub fn vgpus(element: &Element) -> Vec<Vgpu> {
    element.children_in(NAMESPACE, "vgpu").filter_map(Vgpu::parse).collect()
}

/// Writes a vGPU down, and with the first one what else of the domain was changed.
pub(super) fn add(domain: &Element, vgpu: &Vgpu, changes: Changes, edits: &mut Edits<'_>) {
    if let Some(element) = find(domain) {
        return edits.add_last(element, &[vgpu.line()]);
    }
    let added = changes.names().join(" ");
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

/// Strikes a vGPU out. With the last one, what else of the domain was changed for them.
pub(super) fn remove(domain: &Element, uuid: VgpuId, edits: &mut Edits<'_>) -> Option<Changes> {
    let metadata = domain.child("metadata")?;
    let element = metadata.child_in(NAMESPACE, "vgpus")?;
    let of = |child: &&Element| Vgpu::parse(child).is_some_and(|vgpu| vgpu.uuid == uuid);
    if vgpus(element).iter().any(|vgpu| vgpu.uuid != uuid) {
        let ours = element.children_in(NAMESPACE, "vgpu").filter(of);
        ours.for_each(|child| edits.remove(child));
        return None;
    }
    edits.remove(if metadata.children.len() == 1 { metadata } else { element });
    Some(Changes::parse(element.attribute("added").unwrap_or_default()))
}
