//! Guest memory that another process can map: a vGPU works on the VM's own pages.

use super::DomainError;
use crate::xml::{Edits, Element};

const BACKING: &str = "memoryBacking";
const SOURCE: &str = "<source type=\"memfd\"/>";
const ACCESS: &str = "<access mode=\"shared\"/>";

/// What of a domain's memory backing was added for its vGPUs, so that it can be taken away again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Changes {
    /// The whole element.
    backing: bool,
    /// Where memory comes from.
    source: bool,
    /// That it is shared.
    access: bool,
}

impl Changes {
    const NAMES: [&str; 3] = [BACKING, "source", "access"];

    /// The elements that were added.
    pub fn names(self) -> Vec<&'static str> {
        let added = [self.backing, self.source, self.access];
        Self::NAMES
            .into_iter()
            .zip(added)
            .filter_map(|(name, added)| added.then_some(name))
            .collect()
    }

    /// The same, read.
    pub fn parse(names: &str) -> Self {
        let [backing, source, access] =
            Self::NAMES.map(|name| names.split_whitespace().any(|word| word == name));
        Self { backing, source, access }
    }
}

/// Makes a domain's memory shared. Huge pages, NUMA nodes and all else that is said of it stay.
pub(super) fn share(domain: &Element, edits: &mut Edits<'_>) -> Result<Changes, DomainError> {
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
        return Ok(Changes { backing: true, ..Changes::default() });
    };
    // Huge pages are files already, which can be shared.
    let source = backing.child("source").is_none() && backing.child("hugepages").is_none();
    let access = backing.child("access").is_none();
    let missing = [(source, SOURCE), (access, ACCESS)].into_iter().filter(|(missing, _)| *missing);
    let lines: Vec<_> = missing.map(|(_, line)| line.to_owned()).collect();
    if !lines.is_empty() {
        edits.add_last(backing, &lines);
    }
    Ok(Changes { backing: false, source, access })
}

/// Takes away what [`share`] has added, where nobody has changed it since.
pub(super) fn unshare(domain: &Element, changes: Changes, edits: &mut Edits<'_>) {
    let Some(backing) = domain.child(BACKING) else { return };
    let with = |name: &str, key: &str, value: &str| {
        backing.child(name).filter(|child| child.attribute(key) == Some(value))
    };
    let source = with("source", "type", "memfd").filter(|_| changes.source || changes.backing);
    let access = with("access", "mode", "shared").filter(|_| changes.access || changes.backing);
    let ours: Vec<_> = source.into_iter().chain(access).collect();
    if changes.backing && ours.len() == backing.children.len() {
        return edits.remove(backing);
    }
    for child in ours {
        edits.remove(child);
    }
}

/// What an owner says in so many words is not overruled.
fn refuse_private(domain: &Element) -> Result<(), DomainError> {
    let private = |what| Err(DomainError::PrivateMemory(what));
    if let Some(backing) = domain.child(BACKING) {
        let says = |name: &str, key: &str, value: &str| {
            backing.child(name).is_some_and(|child| child.attribute(key) == Some(value))
        };
        if says("access", "mode", "private") {
            return private("<access mode='private'/> in <memoryBacking>");
        }
        if says("source", "type", "anonymous") {
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
