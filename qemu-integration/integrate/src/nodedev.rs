//! Parents and vGPUs as libvirt node devices.
//!
//! A parent has the capability `mdev_types` within its `pci` capability. A started vGPU has the
//! capability `mdev`. Both are valid by libvirt's schema, which has no extension points. Therefore:
//!
//! * `deviceAPI` is `vfio-pci`, because a vGPU is a PCI function to its VM. The driver's name,
//!   `vgpud`, tells it from the kernel's mediated devices.
//! * A software GPU, which is not a PCI function, has a PCI domain that no host has.
//! * A vGPU has no IOMMU group.

use mdev_core::ids::VgpuId;
use quick_xml::escape::escape;

/// PCI domain of software GPUs. No host has a domain with this number.
const SOFT_DOMAIN: u32 = u32::MAX;
/// Vendor and device ID of software GPUs; unassigned.
const NO_ID: &str = "0x0000";

/// Parent as a node device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// PCI address such as `0000:3b:00.0`, or the name of a software GPU.
    pub name: String,
    /// Description for people.
    pub description: String,
    /// PCI vendor and device ID such as `0x10de`; `None` for a software GPU.
    pub ids: Option<[String; 2]>,
    /// Index among the host's parents, which makes the address of a software GPU unique.
    pub index: u32,
    /// Offered vGPU types.
    pub types: Vec<Type>,
}

/// vGPU type of a parent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Type {
    /// Name of the type.
    pub name: String,
    /// Number of vGPUs of this type that can still be started.
    pub available: u32,
}

/// Started vGPU as a node device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mdev {
    /// Uuid of the vGPU.
    pub uuid: VgpuId,
    /// Name of the parent.
    pub parent: String,
    /// Name of the vGPU type.
    pub mdev_type: String,
    /// Attributes, in order.
    pub attributes: Vec<(String, String)>,
    /// Run directory of the vGPU.
    pub path: String,
}

impl Parent {
    /// Returns the name of the node device, formed as libvirt does.
    pub fn device_name(&self) -> String {
        parent_name(&self.name)
    }

    /// Returns the XML of the node device.
    pub fn xml(&self) -> String {
        let mut lines = Lines::default();
        lines.open("<device>");
        lines.element("name", &self.device_name());
        lines.element("parent", "computer");
        lines.driver();
        lines.open("<capability type='pci'>");
        let numbers = pci_address(&self.name).unwrap_or([SOFT_DOMAIN, 0, self.index, 0]);
        for (name, number) in ["domain", "bus", "slot", "function"].into_iter().zip(numbers) {
            lines.element(name, &number.to_string());
        }
        let none = [NO_ID.to_owned(), NO_ID.to_owned()];
        let [vendor, device] = self.ids.as_ref().unwrap_or(&none);
        let (vendor, device) = (escape(vendor.as_str()), escape(device.as_str()));
        let description = escape(self.description.as_str());
        lines.add(&format!("<product id='{device}'>{description}</product>"));
        lines.add(&format!("<vendor id='{vendor}'/>"));
        // A lost parent offers no types, and the schema forbids an empty list.
        if !self.types.is_empty() {
            lines.open("<capability type='mdev_types'>");
            for Type { name, available } in &self.types {
                lines.open(&format!("<type id='{}'>", escape(name.as_str())));
                lines.element("name", name);
                lines.element("deviceAPI", "vfio-pci");
                lines.element("availableInstances", &available.to_string());
                lines.close("</type>");
            }
            lines.close("</capability>");
        }
        lines.close("</capability>");
        lines.close("</device>");
        lines.text
    }
}

impl Mdev {
    /// Returns the name of the node device, formed as libvirt does.
    pub fn device_name(&self) -> String {
        let name = |text: &str| text.replace([':', '.', '-'], "_");
        format!("mdev_{}_{}", name(&self.uuid.to_string()), name(&self.parent))
    }

    /// Returns the XML of the node device.
    pub fn xml(&self) -> String {
        let mut lines = Lines::default();
        lines.open("<device>");
        lines.element("name", &self.device_name());
        lines.element("path", &self.path);
        lines.element("parent", &parent_name(&self.parent));
        lines.driver();
        lines.open("<capability type='mdev'>");
        lines.add(&format!("<type id='{}'/>", escape(self.mdev_type.as_str())));
        lines.element("uuid", &self.uuid.to_string());
        lines.element("parent_addr", &self.parent);
        for (name, value) in &self.attributes {
            let (name, value) = (escape(name.as_str()), escape(value.as_str()));
            lines.add(&format!("<attr name='{name}' value='{value}'/>"));
        }
        lines.close("</capability>");
        lines.close("</device>");
        lines.text
    }
}

/// Returns the name of a parent's node device: `pci_0000_3b_00_0`, or `vgpud_NAME` for a software
/// GPU.
fn parent_name(name: &str) -> String {
    let kind = if pci_address(name).is_some() { "pci" } else { "vgpud" };
    format!("{kind}_{}", name.replace([':', '.', '-'], "_"))
}

/// Parses domain, bus, slot and function of an address such as `0000:3b:00.0`.
fn pci_address(name: &str) -> Option<[u32; 4]> {
    let (rest, function) = name.split_once('.')?;
    let mut parts = rest.split(':');
    let mut next = || u32::from_str_radix(parts.next()?, 16).ok();
    let numbers = [next()?, next()?, next()?, function.parse().ok()?];
    parts.next().is_none().then_some(numbers)
}

/// Writer of indented XML lines.
#[derive(Debug, Default)]
struct Lines {
    text: String,
    depth: usize,
}

impl Lines {
    fn add(&mut self, line: &str) {
        self.text.push_str(&"  ".repeat(self.depth));
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn element(&mut self, name: &str, text: &str) {
        self.add(&format!("<{name}>{}</{name}>", escape(text)));
    }

    fn driver(&mut self) {
        self.open("<driver>");
        self.element("name", "vgpud");
        self.close("</driver>");
    }

    fn open(&mut self, tag: &str) {
        self.add(tag);
        self.depth += 1;
    }

    fn close(&mut self, tag: &str) {
        self.depth -= 1;
        self.add(tag);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::xml::Element;

    fn parent(name: &str) -> Parent {
        Parent {
            name: name.to_owned(),
            description: "A <GPU>".to_owned(),
            ids: name.contains(':').then(|| ["0x10de".to_owned(), "0x2330".to_owned()]),
            index: 1,
            types: vec![Type { name: "SOFT-1Q".to_owned(), available: 3 }],
        }
    }

    #[test]
    fn a_parent_is_a_pci_device_with_mdev_types() {
        let expected = "<device>
  <name>pci_0000_3b_00_1</name>
  <parent>computer</parent>
  <driver>
    <name>vgpud</name>
  </driver>
  <capability type='pci'>
    <domain>0</domain>
    <bus>59</bus>
    <slot>0</slot>
    <function>1</function>
    <product id='0x2330'>A &lt;GPU&gt;</product>
    <vendor id='0x10de'/>
    <capability type='mdev_types'>
      <type id='SOFT-1Q'>
        <name>SOFT-1Q</name>
        <deviceAPI>vfio-pci</deviceAPI>
        <availableInstances>3</availableInstances>
      </type>
    </capability>
  </capability>
</device>
";
        assert_eq!(parent("0000:3b:00.1").xml(), expected);
        let soft = parent("soft0").xml();
        let soft_address = "<domain>4294967295</domain>\n    <bus>0</bus>\n    <slot>1</slot>";
        assert!(soft.contains("<name>vgpud_soft0</name>") && soft.contains(soft_address), "{soft}");
        Element::parse(&soft).unwrap();
        let lost = Parent { types: Vec::new(), ..parent("soft0") }.xml();
        assert!(!lost.contains("mdev_types"), "{lost}");
    }

    #[test]
    fn a_vgpu_is_an_mdev_device() {
        let mdev = Mdev {
            uuid: "0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a".parse().unwrap(),
            parent: "0000:3b:00.0".to_owned(),
            mdev_type: "SOFT-1Q".to_owned(),
            attributes: vec![("core".to_owned(), "80".to_owned())],
            path: "/run/vgpud/vgpus/0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a".to_owned(),
        };
        let expected = "<device>
  <name>mdev_0e6c2a3c_2d3b_4c44_a8f4_1d80f3a5d00a_0000_3b_00_0</name>
  <path>/run/vgpud/vgpus/0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a</path>
  <parent>pci_0000_3b_00_0</parent>
  <driver>
    <name>vgpud</name>
  </driver>
  <capability type='mdev'>
    <type id='SOFT-1Q'/>
    <uuid>0e6c2a3c-2d3b-4c44-a8f4-1d80f3a5d00a</uuid>
    <parent_addr>0000:3b:00.0</parent_addr>
    <attr name='core' value='80'/>
  </capability>
</device>
";
        assert_eq!(mdev.xml(), expected);
        Element::parse(&mdev.xml()).unwrap();
    }
}
