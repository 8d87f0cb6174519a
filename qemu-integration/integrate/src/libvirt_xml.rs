//! Fragment of a libvirt domain that attaches a vGPU.
//!
//! libvirt has no vfio-user device. The fragment passes `-device` through to QEMU and makes guest
//! memory shared.

use std::io;

use quick_xml::Writer;
use quick_xml::events::{BytesStart, Event};

use crate::Device;

/// Namespace of `<qemu:commandline>`. libvirt silently drops the element if `<domain>` does not
/// declare the namespace.
pub const NAMESPACE: &str = "http://libvirt.org/schemas/domain/qemu/1.0";

/// Returns a `<domain>` that contains only the elements for the vGPU.
pub fn domain(device: &Device) -> io::Result<String> {
    let mut writer = Writer::new_with_indent(Vec::new(), b' ', 2);
    writer
        .create_element("domain")
        .with_attributes([("type", "kvm"), ("xmlns:qemu", NAMESPACE)])
        .write_inner_content(|writer| {
        memory_backing(writer)?;
        commandline(writer, device)
    })?;
    let mut text = String::from_utf8(writer.into_inner()).map_err(io::Error::other)?;
    text.push('\n');
    Ok(text)
}

/// Writes the memory backing that lets the GPU access guest memory.
fn memory_backing(writer: &mut Writer<Vec<u8>>) -> io::Result<()> {
    writer.create_element("memoryBacking").write_inner_content(|writer| {
        writer.create_element("source").with_attribute(("type", "memfd")).write_empty()?;
        writer.create_element("access").with_attribute(("mode", "shared")).write_empty()?;
        Ok(())
    })?;
    Ok(())
}

fn commandline(writer: &mut Writer<Vec<u8>>, device: &Device) -> io::Result<()> {
    writer.create_element("qemu:commandline").write_inner_content(|writer| {
        for arg in ["-device", &device.json()] {
            let mut element = BytesStart::new("qemu:arg");
            element.push_attribute(("value", arg));
            writer.write_event(Event::Empty(element))?;
        }
        Ok(())
    })?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use quick_xml::Reader;

    use super::*;

    #[test]
    fn the_domain_has_shared_memory_and_the_device() {
        let device = Device::new("/run/vgpud/vgpus/a/vfio.sock").at("pcie.0", "0x10");
        let expected = r#"<domain type="kvm" xmlns:qemu="http://libvirt.org/schemas/domain/qemu/1.0">
  <memoryBacking>
    <source type="memfd"/>
    <access mode="shared"/>
  </memoryBacking>
  <qemu:commandline>
    <qemu:arg value="-device"/>
    <qemu:arg value="{&quot;driver&quot;:&quot;vfio-user-pci&quot;,&quot;socket&quot;:{&quot;path&quot;:&quot;/run/vgpud/vgpus/a/vfio.sock&quot;,&quot;type&quot;:&quot;unix&quot;},&quot;bus&quot;:&quot;pcie.0&quot;,&quot;addr&quot;:&quot;0x10&quot;}"/>
  </qemu:commandline>
</domain>
"#;
        assert_eq!(domain(&device).unwrap(), expected);
    }

    #[test]
    fn special_characters_in_paths_are_escaped() {
        let device = Device::new("/a&b<c>\"d'e");
        let text = domain(&device).unwrap();
        let mut reader = Reader::from_str(&text);
        let mut values = Vec::new();
        loop {
            match reader.read_event().unwrap() {
                Event::Empty(element) if element.name().as_ref() == "qemu:arg" => {
                    let value = element.try_get_attribute("value").unwrap().unwrap();
                    values.push(
                        value
                            .normalized_value(quick_xml::XmlVersion::Implicit1_0)
                            .unwrap()
                            .into_owned(),
                    );
                }
                Event::Eof => break,
                _ => {}
            }
        }
        assert_eq!(values, ["-device".to_owned(), device.json()]);
    }
}
