//! A vGPU as QEMU's `-device` takes it.

use std::path::{Path, PathBuf};

use serde::Serialize;

/// The slot on a q35 machine's root bus that libvirt's own devices leave free.
pub const DEFAULT_ADDRESS: (&str, &str) = ("pcie.0", "0x10");

/// A vGPU's socket, and where in the VM the device goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    socket: PathBuf,
    id: Option<String>,
    place: Option<(String, String)>,
}

/// The members are in the order in which people write them.
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
    /// The vGPU behind a socket, wherever QEMU puts it.
    pub fn new(socket: impl AsRef<Path>) -> Self {
        Self { socket: socket.as_ref().to_owned(), id: None, place: None }
    }

    /// With a name, by which it can be unplugged.
    #[must_use]
    pub fn with_id(self, id: impl Into<String>) -> Self {
        Self { id: Some(id.into()), ..self }
    }

    /// At a place of the VM: a bus, and a slot on it.
    #[must_use]
    pub fn at(self, bus: impl Into<String>, addr: impl Into<String>) -> Self {
        Self { place: Some((bus.into(), addr.into())), ..self }
    }

    /// The value of `-device`: one line of JSON, the only form in which QEMU takes a socket.
    pub fn json(&self) -> String {
        let path = self.socket.to_string_lossy().into_owned();
        let place = self.place.as_ref();
        let json = Json {
            driver: "vfio-user-pci",
            socket: Socket { path, kind: "unix" },
            id: self.id.as_deref(),
            bus: place.map(|(bus, _)| bus.as_str()),
            addr: place.map(|(_, addr)| addr.as_str()),
        };
        // Strings in objects: nothing in it can fail to be written.
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
    fn any_path_survives() {
        let json = Device::new("/a b/\"c\",d'\n\\é").json();
        assert!(!json.contains('\n'));
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        assert_eq!(value["socket"]["path"], "/a b/\"c\",d'\n\\é");
    }
}
