//! Value of QEMU's `-device` for a vGPU.

use std::path::{Path, PathBuf};

use serde::Serialize;

/// Bus and slot on a q35 machine's root bus that libvirt's own devices leave free.
pub const DEFAULT_ADDRESS: (&str, &str) = ("pcie.0", "0x10");

/// vGPU's socket, with an optional device ID and an optional PCI slot in the VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    socket: PathBuf,
    id: Option<String>,
    slot: Option<(String, String)>,
}

/// JSON form of the device. The members are in the order in which people write them.
#[derive(Serialize)]
struct Json<'a> {
    driver: &'static str,
    socket: Socket<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bus: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    addr: Option<&'a str>,
}

#[derive(Serialize)]
struct Socket<'a> {
    path: String,
    #[serde(rename = "type")]
    kind: &'a str,
}

impl Device {
    /// Creates a device for the vGPU at a socket. QEMU chooses the PCI slot.
    pub fn new(socket: impl AsRef<Path>) -> Self {
        Self { socket: socket.as_ref().to_owned(), id: None, slot: None }
    }

    /// Sets the device ID, which `device_del` needs.
    #[must_use]
    pub fn with_id(self, id: impl Into<String>) -> Self {
        Self { id: Some(id.into()), ..self }
    }

    /// Sets the bus and the slot.
    #[must_use]
    pub fn at(self, bus: impl Into<String>, addr: impl Into<String>) -> Self {
        Self { slot: Some((bus.into(), addr.into())), ..self }
    }

    /// Returns the value of `-device` as one line of JSON, the only form in which QEMU accepts a
    /// socket.
    pub fn json(&self) -> String {
        let path = self.socket.to_string_lossy().into_owned();
        let slot = self.slot.as_ref();
        let json = Json {
            driver: "vfio-user-pci",
            socket: Socket { path, kind: "unix" },
            id: self.id.as_deref(),
            bus: slot.map(|(bus, _)| bus.as_str()),
            addr: slot.map(|(_, addr)| addr.as_str()),
        };
        // Serializing objects of strings does not fail.
        serde_json::to_string(&json).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_device_is_one_line_of_json() {
        let device = Device::new("/run/vgpud/vgpus/a/vfio.sock");
        assert_eq!(
            device.json(),
            r#"{"driver":"vfio-user-pci","socket":{"path":"/run/vgpud/vgpus/a/vfio.sock","type":"unix"}}"#
        );
        assert_eq!(
            device.with_id("vgpu0").at("pcie.0", "0x10").json(),
            r#"{"driver":"vfio-user-pci","socket":{"path":"/run/vgpud/vgpus/a/vfio.sock","type":"unix"},"id":"vgpu0","bus":"pcie.0","addr":"0x10"}"#
        );
    }

    #[test]
    fn special_characters_in_paths_are_escaped() {
        let json = Device::new("/a b/\"c\",d'\n\\é").json();
        assert!(!json.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["socket"]["path"], "/a b/\"c\",d'\n\\é");
    }
}
