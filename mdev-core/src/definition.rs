//! A vGPU that survives a reboot, as mdevctl writes it.
//!
//! ```json
//! { "mdev_type": "SOFT-1Q", "start": "auto", "attrs": [ { "core": "80" } ] }
//! ```
//!
//! * [`attrs`]: attributes as they are written, and what can be wrong with them
//! * [`settings`]: the attributes there are, and what they mean
//! * [`owner`]: users and groups as people name them
//! * [`store`]: the tree of files that holds definitions

use serde::{Deserialize, Serialize};

pub mod attrs;
pub mod owner;
pub mod settings;
pub mod store;

pub use attrs::{AttrError, Attrs};
pub use owner::{Owner, OwnerError};
pub use settings::{ATTRIBUTES, Attribute, Patience, Quotas, Settings};
pub use store::{Store, StoreError};

/// When a defined vGPU is started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Start {
    /// With the manager.
    Auto,
    /// On request.
    #[default]
    Manual,
}

/// What is kept of a vGPU while it does not run. Its name and parent are where it is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Definition {
    /// Its type's name. Whether the parent offers that type is only known when it is started.
    pub mdev_type: String,
    /// When it is started.
    #[serde(default)]
    pub start: Start,
    /// Its attributes, in order.
    #[serde(default)]
    pub attrs: Attrs,
}

impl Definition {
    /// Longest file that is read as a definition, in bytes.
    pub const MAX_BYTES: usize = 64 << 10;

    /// Reads mdevctl's JSON. Attributes are not looked at: see [`Attrs::settings`].
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

    /// Writes mdevctl's JSON, byte for byte: indented, without a newline at the end.
    pub fn to_json(&self) -> String {
        // Strings, lists and maps with string keys: nothing in it can fail to be written.
        serde_json::to_string_pretty(self).unwrap_or_default()
    }
}

/// Why something is not a definition.
#[derive(Debug, thiserror::Error)]
pub enum DefinitionError {
    /// Not the JSON that it should be.
    #[error("Not a vGPU definition in mdevctl's JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// No type is named.
    #[error("Not a vGPU definition: \"mdev_type\" is empty; name a type")]
    NoType,
    /// Longer than any definition.
    #[error("Not a vGPU definition: {0} bytes long, at most {max} are read", max = Definition::MAX_BYTES)]
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
    fn start_and_attributes_may_be_absent_and_unknown_members_are_left_alone() {
        let definition = Definition::from_json(br#"{"mdev_type":"SOFT-1C","note":1}"#).unwrap();
        assert_eq!(definition.start, Start::Manual);
        assert!(definition.attrs.is_empty());
    }

    #[test]
    fn what_is_wrong_is_said_in_one_line() {
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
        fn what_is_written_is_read_back(definition in any_definition()) {
            let text = definition.to_json();
            prop_assert_eq!(Definition::from_json(text.as_bytes()).unwrap(), definition);
        }

        #[test]
        fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Definition::from_json(&bytes);
        }
    }
}
