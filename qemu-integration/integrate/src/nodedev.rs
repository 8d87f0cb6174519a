//! Parents and vGPUs in the words of libvirt's node devices, for tools that read those.
//!
//! A parent has the capability `mdev_types` within its `pci` capability, and a vGPU that was started the capability
//! `mdev`, both as libvirt documents them, and valid by its schema. That has no place for words of others, so two things
//! are said in its own: `vfio-pci` is the API of a device that is a PCI function to its VM, as a vGPU is (the driver's name
//! says that it is not the kernel's), and a software GPU, which is no PCI function, has numbers that no host's has. A vGPU
//! is in no IOMMU group.

use mdev_core::ids::VgpuId;
use quick_xml::escape::escape;

/// The PCI domain of what is on no PCI bus: no host has so many.
const NOWHERE: u32 = u32::MAX;
/// The number of no vendor, and of no device.
const NO_ID: &str = "0x0000";

/// A physical GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parent {
    /// A PCI address such as `0000:3b:00.0`, or a software GPU's name.
    pub name: String,
    /// For people.
    pub description: String,
    /// Its vendor's and its own number, as `0x10de`, where the host's PCI bus has it.
    pub ids: Option<[String; 2]>,
    /// Which of the host's parents it is: tells software GPUs apart.
    pub index: u32,
    /// What it offers.
    pub types: Vec<Type>,
}

/// A type of vGPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Type {
    /// Its name.
    pub name: String,
    /// How many more can be started.
    pub available: u32,
}

/// A vGPU that was started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mdev {
    /// Its name.
    pub uuid: VgpuId,
    /// The physical GPU it is on.
    pub parent: String,
    /// Its type.
    pub mdev_type: String,
    /// Its attributes, in order.
    pub attributes: Vec<(String, String)>,
    /// Where it is in the file system.
    pub path: String,
}

impl Parent {
    /// The name of its node device, as libvirt makes it.
    pub fn device_name(&self) -> String {
        parent_name(&self.name)
    }

    /// Its node device.
    pub fn xml(&self) -> String {
        let mut lines = Lines::default();
        lines.open("<device>");
        lines.element("name", &self.device_name());
        lines.element("parent", "computer");
        lines.driver();
        lines.open("<capability type='pci'>");
        let numbers = pci_address(&self.name).unwrap_or([NOWHERE, 0, self.index, 0]);
        for (name, number) in ["domain", "bus", "slot", "function"].into_iter().zip(numbers) {
            lines.element(name, &number.to_string());
        }
        let none = [NO_ID.to_owned(), NO_ID.to_owned()];
        let [vendor, device] = self.ids.as_ref().unwrap_or(&none);
        let (vendor, device) = (escape(vendor.as_str()), escape(device.as_str()));
        let description = escape(self.description.as_str());
        lines.add(&format!("<product id='{device}'>{description}</product>"));
        lines.add(&format!("<vendor id='{vendor}'/>"));
        // One that is lost offers nothing, and an empty list is not valid.
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
    /// The name of its node device, as libvirt makes it.
    pub fn device_name(&self) -> String {
        let name = |text: &str| text.replace([':', '.', '-'], "_");
        format!("mdev_{}_{}", name(&self.uuid.to_string()), name(&self.parent))
    }

    /// Its node device.
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

/// `pci_0000_3b_00_0`; a software GPU's name has no such form, and says whose it is.
fn parent_name(name: &str) -> String {
    let kind = if pci_address(name).is_some() { "pci" } else { "vgpud" };
    format!("{kind}_{}", name.replace([':', '.', '-'], "_"))
}

/// Domain, bus, slot and function of `0000:3b:00.0`.
fn pci_address(name: &str) -> Option<[u32; 4]> {
    let (rest, function) = name.split_once('.')?;
    let mut parts = rest.split(':');
    let mut next = || u32::from_str_radix(parts.next()?, 16).ok();
    let numbers = [next()?, next()?, next()?, function.parse().ok()?];
    parts.next().is_none().then_some(numbers)
}

/// XML, line by line.
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
        let nowhere = "<domain>4294967295</domain>\n    <bus>0</bus>\n    <slot>1</slot>";
        assert!(soft.contains("<name>vgpud_soft0</name>") && soft.contains(nowhere), "{soft}");
        Element::parse(&soft).unwrap();
        let lost = Parent { types: Vec::new(), ..parent("soft0") }.xml();
        assert!(!lost.contains("mdev_types"), "{lost}");
    }

    #[test]
    fn a_vgpu_is_an_mdev() {
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
