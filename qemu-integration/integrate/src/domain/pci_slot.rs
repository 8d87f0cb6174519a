//! Free PCI slots in a VM. libvirt does not know the devices and does not assign addresses to them.

use std::collections::BTreeSet;

use super::DomainError;
use crate::xml::Element;

/// Candidate slots. libvirt assigns low slots first; the chipset uses the last ones.
const SLOTS: std::ops::RangeInclusive<u8> = 0x10..=0x1c;

/// Free slot of a domain's first PCI bus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Free {
    /// QEMU's name of the bus.
    pub bus: &'static str,
    /// First free slot.
    pub first: u8,
}

impl Free {
    /// Finds a free slot. `devices` are the values of `-device` that the domain already passes
    /// through.
    pub(super) fn find(domain: &Element, devices: &[&str]) -> Result<Self, DomainError> {
        let elements = domain.child("devices").map(Element::subtree).unwrap_or_default();
        let root = elements.iter().find_map(|element| match element.attribute("model") {
            Some("pcie-root") => Some("pcie.0"),
            Some("pci-root") if element.attribute("index") == Some("0") => Some("pci.0"),
            _ => None,
        });
        let bus = root.or_else(|| bus_of_machine(domain)).ok_or(DomainError::NoBus)?;
        let mut taken = BTreeSet::new();
        for element in &elements {
            let is_pci = element.name == "address" && element.attribute("type") == Some("pci");
            let number = |name| element.attribute(name).and_then(number);
            if is_pci && number("domain").unwrap_or(0) == 0 && number("bus").unwrap_or(0) == 0 {
                taken.extend(number("slot"));
            }
        }
        taken.extend(devices.iter().filter_map(|device| slot_of(device)));
        let mut free = SLOTS.filter(|slot| !taken.contains(slot));
        let first = free.next().ok_or(DomainError::NoSlot)?;
        Ok(Self { bus, first })
    }
}

/// Returns the bus of a machine type. XML that libvirt has not completed has no controllers.
fn bus_of_machine(domain: &Element) -> Option<&'static str> {
    let machine = domain.child("os")?.child("type")?.attribute("machine")?;
    match machine {
        _ if machine.contains("q35") || machine.starts_with("virt") => Some("pcie.0"),
        _ if machine == "pc" || machine.contains("i440fx") => Some("pci.0"),
        _ => None,
    }
}

/// Returns the slot in a value of `-device`: `"addr":"0x10"`, `addr=0x10` or `addr=10.0` with a
/// function.
fn slot_of(device: &str) -> Option<u8> {
    let address = if device.starts_with('{') {
        let value: serde_json::Value = serde_json::from_str(device).ok()?;
        value["addr"].as_str()?.to_owned()
    } else {
        device.split(',').find_map(|part| part.strip_prefix("addr="))?.to_owned()
    };
    let slot = address.split('.').next()?;
    // QEMU reads slots as hexadecimal numbers, with or without 0x.
    u8::from_str_radix(slot.trim_start_matches("0x"), 16).ok()
}

/// Parses a number in decimal, or in hexadecimal with `0x`.
fn number(text: &str) -> Option<u8> {
    match text.strip_prefix("0x") {
        Some(digits) => u8::from_str_radix(digits.trim_start_matches('0'), 16)
            .ok()
            .or_else(|| digits.bytes().all(|digit| digit == b'0').then_some(0)),
        None => text.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_parsed_in_all_forms() {
        for (text, value) in
            [("0x0000", Some(0)), ("0x1f", Some(31)), ("16", Some(16)), ("x", None)]
        {
            assert_eq!(number(text), value, "{text}");
        }
        for (device, slot) in [
            (r#"{"driver":"x","addr":"0x10"}"#, Some(16)),
            ("e1000,bus=pcie.0,addr=11.0", Some(17)),
            ("e1000", None),
        ] {
            assert_eq!(slot_of(device), slot, "{device}");
        }
    }
}
