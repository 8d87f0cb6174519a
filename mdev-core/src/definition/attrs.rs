//! Attributes of a vGPU: an ordered list of names and values, and the table of those that mean something.

use std::fmt;

use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::sched::{Core, CoreError};

/// Attributes in their order. In JSON, a list of objects with one member each: `[{"core": "80"}]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Attrs(Vec<Attr>);

/// One attribute as it is written.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Attr {
    name: String,
    value: String,
}

impl Attrs {
    /// The value of the first attribute of that name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|attr| (attr.name.as_str(), attr.value.as_str()))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True where there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds one at `index`, or at the end.
    pub fn insert(
        &mut self,
        index: Option<usize>,
        name: String,
        value: String,
    ) -> Result<(), AttrError> {
        let len = self.0.len();
        let index = index.unwrap_or(len);
        if index > len {
            return Err(AttrError::Index { index, len });
        }
        self.0.insert(index, Attr { name, value });
        Ok(())
    }

    /// Gives one its value, where it is already or at the end.
    pub fn set(&mut self, name: &str, value: &str) {
        let value = value.to_owned();
        match self.0.iter_mut().find(|attr| attr.name == name) {
            Some(attr) => attr.value = value,
            None => self.0.push(Attr { name: name.to_owned(), value }),
        }
    }

    /// Takes away the one at `index`, or the last.
    pub fn remove(&mut self, index: Option<usize>) -> Result<(), AttrError> {
        let len = self.0.len();
        let index = index.or(len.checked_sub(1)).ok_or(AttrError::Empty)?;
        if index >= len {
            return Err(AttrError::Index { index, len });
        }
        self.0.remove(index);
        Ok(())
    }

    /// What they say, with every name and value checked.
    pub fn settings(&self) -> Result<Settings, AttrError> {
        let mut settings = Settings::default();
        for (index, (name, value)) in self.iter().enumerate() {
            let attribute = Attribute::named(name)?;
            if self.iter().take(index).any(|(earlier, _)| earlier == name) {
                return Err(AttrError::Twice { name: name.to_owned(), index });
            }
            (attribute.apply)(&mut settings, value)?;
        }
        Ok(settings)
    }
}

impl FromIterator<(String, String)> for Attrs {
    fn from_iter<I: IntoIterator<Item = (String, String)>>(attrs: I) -> Self {
        Self(attrs.into_iter().map(|(name, value)| Attr { name, value }).collect())
    }
}

impl Serialize for Attr {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map([(&self.name, &self.value)])
    }
}

impl<'de> Deserialize<'de> for Attr {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OneMember;

        impl<'de> Visitor<'de> for OneMember {
            type Value = Attr;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with one member, whose value is a string")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Attr, A::Error> {
                let entry = map.next_entry()?;
                let (name, value) = entry.ok_or_else(|| A::Error::invalid_length(0, &self))?;
                if map.next_key::<IgnoredAny>()?.is_some() {
                    return Err(A::Error::invalid_length(2, &self));
                }
                Ok(Attr { name, value })
            }
        }

        deserializer.deserialize_map(OneMember)
    }
}

/// Attributes, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The share asked for.
    pub core: Option<Core>,
    /// Whether the guest maps the doorbell page (where the GPU allows it), or each ring is trapped.
    pub doorbell_mapped: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { core: None, doorbell_mapped: true }
    }
}

/// One attribute that means something.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// Its name.
    pub name: &'static str,
    /// What it may be, for people.
    pub values: &'static str,
    /// What it does, in one sentence.
    pub about: &'static str,
    /// True where it can change while the vGPU runs.
    pub live: bool,
    apply: fn(&mut Settings, &str) -> Result<(), AttrError>,
}

/// Every attribute there is.
pub const ATTRIBUTES: &[Attribute] = &[
    Attribute {
        name: "core",
        values: "1 to 100",
        about: "Hundredths of the GPU's time that the vGPU gets at least, while others contend.",
        live: true,
        apply: |settings, value| {
            settings.core = Some(value.parse()?);
            Ok(())
        },
    },
    Attribute {
        name: "doorbell",
        values: "mapped or trapped",
        about: "Whether the guest rings the GPU's doorbell itself, or each ring is trapped.",
        live: false,
        apply: |settings, value| {
            settings.doorbell_mapped = match value {
                "mapped" => true,
                "trapped" => false,
                _ => return Err(AttrError::Doorbell(value.to_owned())),
            };
            Ok(())
        },
    },
];

impl Attribute {
    /// The attribute of that name.
    pub fn named(name: &str) -> Result<&'static Self, AttrError> {
        let row = ATTRIBUTES.iter().find(|attribute| attribute.name == name);
        row.ok_or_else(|| AttrError::Unknown(name.to_owned()))
    }
}

/// Why attributes are refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttrError {
    /// No such attribute.
    #[error("There is no attribute {0:?}; there are {known}", known = known())]
    Unknown(String),
    /// One attribute more than once.
    #[error(
        "Attribute {name:?} is given twice; set it once (--attr {name}=VALUE), or remove one \
         (--delattr --index {index})"
    )]
    Twice {
        /// Its name.
        name: String,
        /// Where the second one is.
        index: usize,
    },
    /// Not a share.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// Not a way to ring.
    #[error("Attribute \"doorbell\" is mapped or trapped, not {0:?}")]
    Doorbell(String),
    /// None is there.
    #[error("There is no attribute at index {index}: there are {len}, counted from 0")]
    Index {
        /// Where it was looked for.
        index: usize,
        /// How many there are.
        len: usize,
    },
    /// None to remove.
    #[error("There is no attribute to remove")]
    Empty,
}

fn known() -> String {
    let names: Vec<_> = ATTRIBUTES.iter().map(|attribute| attribute.name).collect();
    names.join(" and ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn attrs(list: &[(&str, &str)]) -> Attrs {
        list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn known_attributes_are_parsed() {
        assert_eq!(attrs(&[]).settings(), Ok(Settings::default()));
        let settings = attrs(&[("core", "80"), ("doorbell", "trapped")]).settings().unwrap();
        assert_eq!(settings.core.map(Core::get), Some(80));
        assert!(!settings.doorbell_mapped);
    }

    #[test]
    fn everything_else_is_refused_in_one_line() {
        let error = |list: &[(&str, &str)]| attrs(list).settings().unwrap_err().to_string();
        for core in ["0", "101", "-1", "8O", "", " 80", "+80", "80%"] {
            let expected = format!("Attribute \"core\" is 1 to 100 hundredths, not {core:?}");
            assert_eq!(error(&[("core", core)]), expected);
        }
        assert_eq!(
            error(&[("doorbell", "yes")]),
            "Attribute \"doorbell\" is mapped or trapped, not \"yes\""
        );
        assert_eq!(
            error(&[("cores", "80")]),
            "There is no attribute \"cores\"; there are core and doorbell"
        );
        assert_eq!(
            error(&[("core", "80"), ("core", "20")]),
            "Attribute \"core\" is given twice; set it once (--attr core=VALUE), or remove one \
             (--delattr --index 1)"
        );
    }

    #[test]
    fn attributes_are_added_and_removed_by_their_place() {
        let mut list = attrs(&[("a", "1")]);
        list.insert(None, "c".into(), "3".into()).unwrap();
        list.insert(Some(1), "b".into(), "2".into()).unwrap();
        assert_eq!(list, attrs(&[("a", "1"), ("b", "2"), ("c", "3")]));
        assert!(list.insert(Some(4), "d".into(), "4".into()).is_err());
        list.set("c", "4");
        list.set("c", "3");
        list.remove(Some(0)).unwrap();
        list.remove(None).unwrap();
        assert_eq!(list, attrs(&[("b", "2")]));
        assert_eq!(list.remove(Some(1)), Err(AttrError::Index { index: 1, len: 1 }));
        list.remove(None).unwrap();
        assert_eq!(list.remove(None), Err(AttrError::Empty));
    }
}
