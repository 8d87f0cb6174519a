//! Names of vGPUs in messages. Messages name a vGPU by its UUID; the name follows in parentheses
//! where this process knows it.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use mdev_core::definition::VgpuName;
use mdev_core::ids::VgpuId;

/// Words before the UUID of a vGPU in a message.
const BEFORE: &str = "vGPU ";

/// Length of a UUID as text.
const UUID_LEN: usize = 36;

static NAMES: RwLock<BTreeMap<VgpuId, VgpuName>> = RwLock::new(BTreeMap::new());

/// Records the name of a vGPU, or that it has none.
pub fn set(id: VgpuId, name: Option<VgpuName>) {
    let mut names = NAMES.write().unwrap_or_else(PoisonError::into_inner);
    match name {
        Some(name) => drop(names.insert(id, name)),
        None => drop(names.remove(&id)),
    }
}

/// Returns a message with the known names after the UUIDs of their vGPUs.
pub fn annotated(message: &str) -> String {
    let names = NAMES.read().unwrap_or_else(PoisonError::into_inner);
    let mut text = String::with_capacity(message.len());
    let mut rest = message;
    while let Some(at) = rest.find(BEFORE) {
        let start = at + BEFORE.len();
        let uuid = rest.get(start..start + UUID_LEN);
        let name = uuid.and_then(|uuid| names.get(&uuid.parse().ok()?));
        let end = if name.is_some() { start + UUID_LEN } else { start };
        text.push_str(&rest[..end]);
        if let Some(name) = name {
            text.extend([" (", name.as_str(), ")"]);
        }
        rest = &rest[end..];
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_names_follow_their_uuids() {
        let (named, other) = (VgpuId::random(), VgpuId::random());
        set(named, "web1".parse().ok());
        let text =
            format!("vGPU {named} replaces vGPU {other}; not vGPU {named}: start -u {named}");
        assert_eq!(
            annotated(&text),
            format!(
                "vGPU {named} (web1) replaces vGPU {other}; not vGPU {named} (web1): start -u {named}"
            )
        );
        for text in ["", "vGPU ", "vGPU é", "a vGPU of any name", "vGPU vGPU "] {
            assert_eq!(annotated(text), text);
        }
        set(named, None);
        assert_eq!(annotated(&text), text);
    }
}
