//! The address of a PCI function.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;

use crate::pci::HostError;

/// Address of a PCI function: domain, bus, device, function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl FromStr for PciAddress {
    type Err = HostError;

    /// Parses `0000:3b:00.0`. The domain may be omitted.
    fn from_str(text: &str) -> Result<Self, HostError> {
        let bad = || HostError::Address(text.to_owned());
        let (location, function) = text.split_once('.').ok_or_else(bad)?;
        let parts: Vec<_> = location.split(':').collect();
        let (domain, bus, device) = match parts[..] {
            [domain, bus, device] => (domain, bus, device),
            [bus, device] => ("0", bus, device),
            _ => return Err(bad()),
        };
        let number = |text: &str, digits: usize, most: u32| {
            let hex = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let value = u32::from_str_radix(text, 16).ok().filter(|value| *value <= most);
            value.filter(|_| hex && text.len() <= digits).ok_or_else(bad)
        };
        Ok(Self {
            domain: number(domain, 8, u32::MAX)?,
            bus: number(bus, 2, 0xff)? as u8,
            device: number(device, 2, 0x1f)? as u8,
            function: number(function, 1, 7)? as u8,
        })
    }
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

impl Serialize for PciAddress {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn parses_with_and_without_a_domain() {
        for (text, address) in [
            ("0000:00:02.0", "0000:00:02.0"),
            ("3b:00.0", "0000:3b:00.0"),
            ("10000:01:1f.7", "10000:01:1f.7"),
        ] {
            assert_eq!(text.parse::<PciAddress>().unwrap().to_string(), address);
        }
        for text in ["", "3b", "3b:00", "0000:3b:20.0", "0000:3b:00.8", "0:+1:00.0", "a:b:c:d.0"] {
            assert!(text.parse::<PciAddress>().is_err(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in ".{0,20}") {
            if let Ok(address) = text.parse::<PciAddress>() {
                prop_assert_eq!(address.to_string().parse::<PciAddress>().unwrap(), address);
            }
        }
    }
}
