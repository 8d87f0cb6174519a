//! Shared guest memory, which the GPU process can map.

use super::DomainError;
use crate::xml::{Edits, Element};

const BACKING: &str = "memoryBacking";
const SOURCE: &str = "<source type=\"memfd\"/>";
const ACCESS: &str = "<access mode=\"shared\"/>";

/// Memory elements that attaching a vGPU added to a domain. Detaching removes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AddedMemory {
    /// The whole `<memoryBacking>`.
    backing: bool,
    /// `<source>` in an existing `<memoryBacking>`.
    source: bool,
    /// `<access>` in an existing `<memoryBacking>`.
    access: bool,
}

impl AddedMemory {
    const NAMES: [&str; 3] = [BACKING, "source", "access"];

    /// Returns the names of the added elements.
    pub fn names(self) -> Vec<&'static str> {
        let added = [self.backing, self.source, self.access];
        Self::NAMES
            .into_iter()
            .zip(added)
            .filter_map(|(name, added)| added.then_some(name))
            .collect()
    }

    /// Parses the names of added elements.
    pub fn parse(names: &str) -> Self {
        let [backing, source, access] =
            Self::NAMES.map(|name| names.split_whitespace().any(|word| word == name));
        Self { backing, source, access }
    }
}

/// Makes a domain's memory shared. Keeps huge pages, NUMA nodes and all other memory settings.
pub(super) fn share(domain: &Element, edits: &mut Edits<'_>) -> Result<AddedMemory, DomainError> {
    refuse_private(domain)?;
    let Some(backing) = domain.child(BACKING) else {
        let lines = [
            format!("<{BACKING}>"),
            format!("  {SOURCE}"),
            format!("  {ACCESS}"),
            format!("</{BACKING}>"),
        ];
        let siblings = ["currentMemory", "memory", "uuid", "name"];
        match siblings.iter().find_map(|name| domain.child(name)) {
            Some(sibling) => edits.add_after(sibling, &lines),
            None => edits.add_last(domain, &lines),
        }
        return Ok(AddedMemory { backing: true, ..AddedMemory::default() });
    };
    // Huge pages are files, which can be shared without a <source>.
    let source = backing.child("source").is_none() && backing.child("hugepages").is_none();
    let access = backing.child("access").is_none();
    let missing = [(source, SOURCE), (access, ACCESS)].into_iter().filter(|(missing, _)| *missing);
    let lines: Vec<_> = missing.map(|(_, line)| line.to_owned()).collect();
    if !lines.is_empty() {
        edits.add_last(backing, &lines);
    }
    Ok(AddedMemory { backing: false, source, access })
}

/// Removes the elements that [`share`] added, unless they were changed since.
pub(super) fn unshare(domain: &Element, added: AddedMemory, edits: &mut Edits<'_>) {
    let Some(backing) = domain.child(BACKING) else { return };
    let with = |name: &str, key: &str, value: &str| {
        backing.child(name).filter(|child| child.attribute(key) == Some(value))
    };
    let source = with("source", "type", "memfd").filter(|_| added.source || added.backing);
    let access = with("access", "mode", "shared").filter(|_| added.access || added.backing);
    let ours: Vec<_> = source.into_iter().chain(access).collect();
    if added.backing && ours.len() == backing.children.len() {
        return edits.remove(backing);
    }
    for child in ours {
        edits.remove(child);
    }
}

/// Refuses domains that explicitly request private memory.
fn refuse_private(domain: &Element) -> Result<(), DomainError> {
    let private = |setting| Err(DomainError::PrivateMemory(setting));
    if let Some(backing) = domain.child(BACKING) {
        let has = |name: &str, key: &str, value: &str| {
            backing.child(name).is_some_and(|child| child.attribute(key) == Some(value))
        };
        if has("access", "mode", "private") {
            return private("<access mode='private'/> in <memoryBacking>");
        }
        if has("source", "type", "anonymous") {
            return private("<source type='anonymous'/> in <memoryBacking>");
        }
    }
    let cells = domain.child("cpu").and_then(|cpu| cpu.child("numa"));
    let mut cells = cells.into_iter().flat_map(|numa| numa.children_in("", "cell"));
    if cells.any(|cell| cell.attribute("memAccess") == Some("private")) {
        return private("memAccess='private' of a NUMA cell");
    }
    let devices = domain.child("devices");
    let mut modules = devices.into_iter().flat_map(|devices| devices.children_in("", "memory"));
    if modules.any(|module| module.attribute("access") == Some("private")) {
        return private("access='private' of a memory device");
    }
    Ok(())
}
