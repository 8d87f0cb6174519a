//! Names of vGPUs: an alternative to UUIDs, chosen by the operator.
//!
//! A name is safe as a part of a path, a URL, a unit name, a log line and a label of a metric, and
//! is never mistaken for an option, a UUID or the beginning of one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::ids::VgpuId;

/// Attribute that holds the name.
pub const ATTRIBUTE: &str = "name";

/// Name of a vGPU, unique on a host.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct VgpuName(String);

impl VgpuName {
    /// Valid names, for help texts and errors.
    pub const VALUES: &str =
        "1 to 63 of a-z A-Z 0-9 . _ - (first a letter or digit), unlike a uuid";

    /// Maximum length in bytes.
    const MAX_LEN: usize = 63;

    /// Minimum length of a text of hexadecimal digits and dashes that is like a UUID: that of a
    /// UUID's first group, by which tools abbreviate it.
    const UUID_LIKE: usize = 8;

    /// Returns the name.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn is_valid(text: &str) -> bool {
        let bytes = text.as_bytes();
        let valid = |byte: &u8| byte.is_ascii_alphanumeric() || b"._-".contains(byte);
        let like_uuid = |byte: &u8| byte.is_ascii_hexdigit() || *byte == b'-';
        (1..=Self::MAX_LEN).contains(&bytes.len())
            && bytes[0].is_ascii_alphanumeric()
            && bytes.iter().all(valid)
            && (bytes.len() < Self::UUID_LIKE || !bytes.iter().all(like_uuid))
    }
}

impl fmt::Display for VgpuName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for VgpuName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        if Self::is_valid(text) { Ok(Self(text.to_owned())) } else { Err(NameError) }
    }
}

impl TryFrom<String> for VgpuName {
    type Error = NameError;

    fn try_from(text: String) -> Result<Self, NameError> {
        if Self::is_valid(&text) { Ok(Self(text)) } else { Err(NameError) }
    }
}

impl From<VgpuName> for String {
    fn from(name: VgpuName) -> Self {
        name.0
    }
}

/// Error of a text that is not a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a name is {}", VgpuName::VALUES)]
pub struct NameError;

/// Reference to a vGPU: its UUID or its name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum VgpuRef {
    /// UUID.
    Id(VgpuId),
    /// Name.
    Name(VgpuName),
}

impl fmt::Display for VgpuRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Id(id) => id.fmt(f),
            Self::Name(name) => name.fmt(f),
        }
    }
}

impl From<VgpuId> for VgpuRef {
    fn from(id: VgpuId) -> Self {
        Self::Id(id)
    }
}

impl FromStr for VgpuRef {
    type Err = VgpuRefError;

    fn from_str(text: &str) -> Result<Self, VgpuRefError> {
        let id = text.parse().map(Self::Id);
        id.or_else(|_| text.parse().map(Self::Name)).map_err(|_| VgpuRefError)
    }
}

/// Error of a text that is neither a UUID nor a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "give a vGPU's name, or its uuid: 32 hexadecimal digits, as in \
     83c32df7-d52e-4ec1-9668-1f3c7e4df107"
)]
pub struct VgpuRefError;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_are_bounded_and_unlike_uuids() {
        for name in ["web1", "1", "db", "cafe", "a.b_c-D", "2026-11-23-vm", "deadbeef.1"] {
            assert_eq!(name.parse::<VgpuName>().map(String::from).as_deref(), Ok(name));
        }
        assert!("x".repeat(63).parse::<VgpuName>().is_ok());
        for text in [
            "",
            ".",
            "..",
            ".git",
            "-u",
            "_x",
            "a b",
            "a/b",
            "a\n",
            "a%i",
            "é",
            "a\"",
            "deadbeef",
            "83C32DF7",
            "20261123",
            "83c32df7-d52e",
            "83c32df7-d52e-4ec1-9668-1f3c7e4df107",
            "83c32df7d52e4ec196681f3c7e4df107",
        ] {
            assert_eq!(text.parse::<VgpuName>(), Err(NameError), "{text:?}");
        }
        assert!("x".repeat(64).parse::<VgpuName>().is_err());
    }

    #[test]
    fn a_reference_is_a_uuid_or_a_name() {
        let uuid = "83c32df7-d52e-4ec1-9668-1f3c7e4df107";
        assert_eq!(uuid.parse(), Ok(VgpuRef::Id(uuid.parse().unwrap())));
        assert_eq!("web1".parse(), Ok(VgpuRef::Name("web1".parse().unwrap())));
        assert_eq!("83c32df7".parse::<VgpuRef>(), Err(VgpuRefError));
    }

    proptest! {
        #[test]
        fn no_name_is_read_as_a_uuid(text in "[-._0-9a-fA-Fx]{0,70}") {
            if let Ok(name) = text.parse::<VgpuName>() {
                prop_assert!(text.parse::<VgpuId>().is_err());
                prop_assert_eq!(text.parse(), Ok(VgpuRef::Name(name)));
            }
        }
    }
}
