//! Persistent definitions of vGPUs in mdevctl's format.
//!
//! ```json
//! { "mdev_type": "SOFT-1Q", "start": "auto", "attrs": [ { "core": "80" } ] }
//! ```
//!
//! * [`attrs`]: attributes as a list of names and values, and their errors
//! * [`settings`]: the known attributes and their meaning
//! * [`owner`]: users and groups by name or number
//! * [`name`]: names of vGPUs
//! * [`store`]: the tree of definition files

use serde::{Deserialize, Serialize};

pub mod attrs;
pub mod name;
pub mod owner;
pub mod settings;
pub mod store;

pub use attrs::{AttrError, Attrs};
pub use name::{VgpuName, VgpuRef};
pub use owner::{Owner, OwnerError};
pub use settings::{ATTRIBUTES, Attribute, HangTimeout, Quotas, Settings};
pub use store::{Store, StoreError};

/// Start policy of a defined vGPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Start {
    /// The manager starts the vGPU when it starts.
    Auto,
    /// The vGPU is started on request.
    #[default]
    Manual,
}

/// Definition of a vGPU. Its file's path contains its UUID and its parent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    /// Name of the type. Whether the parent offers the type is checked at start.
    pub mdev_type: String,
    /// Start policy.
    #[serde(default)]
    pub start: Start,
    /// Attributes, in order.
    #[serde(default)]
    pub attrs: Attrs,
}

impl Definition {
    /// Maximum size of a definition file in bytes.
    pub const MAX_BYTES: usize = 64 << 10;

    /// Parses mdevctl's JSON. Attributes are not checked: see [`Attrs::settings`].
    pub fn from_json(text: &[u8]) -> Result<Self, DefinitionError> {
        if text.len() > Self::MAX_BYTES {
            return Err(DefinitionError::TooLong(text.len()));
        }
        let definition: Self = serde_json::from_slice(text)?;
        if definition.mdev_type.is_empty() {
            return Err(DefinitionError::NoType);
        }
        Ok(definition)
    }

    /// Returns mdevctl's JSON, byte for byte: indented, without a newline at the end.
    pub fn to_json(&self) -> String {
        // Strings, lists and maps with string keys always serialize.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

/// Error of a definition.
#[derive(Debug, thiserror::Error)]
pub enum DefinitionError {
    /// Invalid JSON, or JSON of another structure.
    #[error("Not a vGPU definition in mdevctl's JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// The type is empty.
    #[error("Not a vGPU definition: \"mdev_type\" is empty; name a type")]
    NoType,
    /// The file is too long.
    #[error("Not a vGPU definition: {0} bytes long; at most {max} are allowed", max = Definition::MAX_BYTES)]
    TooLong(usize),
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    pub(super) fn any_definition() -> impl Strategy<Value = Definition> {
        let attrs = prop::collection::vec((".*", ".*"), 0..5);
        ("[^\0]+", any::<bool>(), attrs).prop_map(|(mdev_type, auto, attrs)| Definition {
            mdev_type,
            start: if auto { Start::Auto } else { Start::Manual },
            attrs: attrs.into_iter().collect(),
        })
    }

    #[test]
    fn mdevctl_files_are_read_and_written() {
        let text = r#"{
  "mdev_type": "SOFT-1Q",
  "start": "auto",
  "attrs": [
    {
      "core": "80"
    },
    {
      "doorbell": "trapped"
    }
  ]
}
"#;
        let definition = Definition::from_json(text.as_bytes()).unwrap();
        assert_eq!(definition.start, Start::Auto);
        assert_eq!(definition.attrs.get("core"), Some("80"));
        assert_eq!(definition.to_json(), text.trim_end());
    }

    #[test]
    fn defaults_apply_and_unknown_members_are_ignored() {
        let definition = Definition::from_json(br#"{"mdev_type":"SOFT-1C","note":1}"#).unwrap();
        assert_eq!(definition.start, Start::Manual);
        assert!(definition.attrs.is_empty());
    }

    #[test]
    fn errors_are_one_line() {
        for (text, part) in [
            (&b""[..], "EOF"),
            (b"{}", "mdev_type"),
            (br#"{"mdev_type":""}"#, "name a type"),
            (br#"{"mdev_type":"a","start":"later"}"#, "later"),
            (br#"{"mdev_type":"a","attrs":[{"a":"1","b":"2"}]}"#, "one member"),
            (br#"{"mdev_type":"a","attrs":[{"core":80}]}"#, "string"),
        ] {
            let message = Definition::from_json(text).unwrap_err().to_string();
            assert!(message.contains(part), "{message}");
            assert!(!message.contains('\n'));
        }
        let long = vec![b' '; Definition::MAX_BYTES + 1];
        assert!(Definition::from_json(&long).unwrap_err().to_string().contains("at most"));
    }

    proptest! {
        #[test]
        fn a_written_definition_is_read_back(definition in any_definition()) {
            let text = definition.to_json();
            prop_assert_eq!(Definition::from_json(text.as_bytes()).unwrap(), definition);
        }

        #[test]
        fn no_bytes_cause_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Definition::from_json(&bytes);
        }
    }
}
