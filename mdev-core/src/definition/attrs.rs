//! Attributes of a vGPU: an ordered list of names and values. [`super::settings`] has their
//! meaning.

use std::fmt;

use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use super::name::{self, VgpuName};
use super::settings::{ATTRIBUTES, Attribute, Settings};
use crate::sched::{CoreError, KeywordError, Mode};

/// List of attributes. In JSON, a list of objects with one member each: `[{"core": "80"}]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Attrs(Vec<Attr>);

/// Attribute with its unparsed value.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Attr {
    name: String,
    value: String,
}

impl Attrs {
    /// Returns the value of the first attribute with this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    /// Returns the attributes in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|attr| (attr.name.as_str(), attr.value.as_str()))
    }

    /// Returns the number of attributes.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns true if there are no attributes.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Inserts an attribute at `index`, or at the end.
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

    /// Sets the value of an attribute, or appends the attribute.
    pub fn set(&mut self, name: &str, value: &str) {
        let value = value.to_owned();
        match self.0.iter_mut().find(|attr| attr.name == name) {
            Some(attr) => attr.value = value,
            None => self.0.push(Attr { name: name.to_owned(), value }),
        }
    }

    /// Returns the vGPU's name, if it is valid.
    pub fn name(&self) -> Option<VgpuName> {
        self.get(name::ATTRIBUTE)?.parse().ok()
    }

    /// Sets or removes the vGPU's name.
    pub fn set_name(&mut self, name: Option<&VgpuName>) {
        match name {
            Some(name) => self.set(name::ATTRIBUTE, name.as_str()),
            None => self.0.retain(|attr| attr.name != name::ATTRIBUTE),
        }
    }

    /// Removes the attribute at `index`, or the last attribute, if any.
    pub fn remove(&mut self, index: Option<usize>) -> Result<(), AttrError> {
        let len = self.0.len();
        let Some(index) = index.or(len.checked_sub(1)) else { return Ok(()) };
        if index >= len {
            return Err(AttrError::Index { index, len });
        }
        self.0.remove(index);
        Ok(())
    }

    /// Parses and checks all attributes.
    pub fn settings(&self) -> Result<Settings, AttrError> {
        let mut settings = Settings::default();
        for (index, (name, value)) in self.iter().enumerate() {
            let attribute = Attribute::named(name)?;
            if self.iter().take(index).any(|(earlier, _)| earlier == name) {
                return Err(AttrError::Twice { name: name.to_owned(), index });
            }
            (attribute.apply)(&mut settings, value)?;
        }
        if settings.share.mode == Mode::Hard && settings.share.core.is_none() {
            return Err(AttrError::HardWithoutCore);
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

/// Error of an attribute.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AttrError {
    /// The attribute does not exist.
    #[error("There is no attribute {0:?}; there are {known}", known = known())]
    Unknown(String),
    /// The attribute occurs more than once.
    #[error(
        "Attribute {name:?} is given twice; set it once (--attr {name}=VALUE), or remove one \
         (--delattr --index {index})"
    )]
    Twice {
        /// Name of the attribute.
        name: String,
        /// Index of the second occurrence.
        index: usize,
    },
    /// Invalid share.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// Invalid keyword.
    #[error(transparent)]
    Keyword(#[from] KeywordError),
    /// Invalid value.
    #[error("Attribute {name:?} is {values}, not {value:?}")]
    Value {
        /// Name of the attribute.
        name: &'static str,
        /// Valid values.
        values: &'static str,
        /// Invalid value.
        value: String,
    },
    /// A hard cap without a share.
    #[error("Attribute \"mode\" is hard without a share to enforce; add core (1 to 100)")]
    HardWithoutCore,
    /// Index out of range.
    #[error("There is no attribute at index {index}: there are {len}, counted from 0")]
    Index {
        /// Invalid index.
        index: usize,
        /// Number of attributes.
        len: usize,
    },
}

fn known() -> String {
    let names: Vec<_> = ATTRIBUTES.iter().map(|attribute| attribute.name).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;
    use std::time::Duration;

    use super::*;
    use crate::definition::{HangTimeout, Quotas};
    use crate::gpu::{self, GpuCapabilities};
    use crate::sched::{Core, Priority};
    use crate::units::MIB;

    fn attrs(list: &[(&str, &str)]) -> Attrs {
        list.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn known_attributes_are_parsed() {
        assert_eq!(attrs(&[]).settings(), Ok(Settings::default()));
        let settings = attrs(&[("core", "80"), ("doorbell", "trapped")]).settings().unwrap();
        assert_eq!(settings.share.core.map(Core::get), Some(80));
        assert!(!settings.doorbell_mapped);
    }

    #[test]
    fn invalid_attributes_are_refused_in_one_line() {
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
            "There is no attribute \"cores\"; there are name, core, mode, priority, timeslice, \
             max_channels, max_pinned, submissions, refresh, hang_timeout, acquire_timeout, doorbell, owner"
        );
        assert_eq!(
            error(&[("core", "80"), ("core", "20")]),
            "Attribute \"core\" is given twice; set it once (--attr core=VALUE), or remove one \
             (--delattr --index 1)"
        );
    }

    #[test]
    fn shares_and_quotas_are_parsed_and_bounded() {
        let settings = attrs(&[
            ("core", "25"),
            ("mode", "hard"),
            ("priority", "high"),
            ("timeslice", "0.5"),
            ("max_channels", "4"),
            ("max_pinned", "512M"),
            ("submissions", "1000"),
            ("refresh", "30"),
            ("hang_timeout", "2.5"),
            ("acquire_timeout", "0.01"),
        ]);
        let settings = settings.settings().unwrap();
        assert_eq!((settings.share.mode, settings.share.priority), (Mode::Hard, Priority::High));
        assert_eq!(settings.share.timeslice, Some(Duration::from_micros(500)));
        let quotas = Quotas {
            max_channels: Some(4),
            max_pinned: Some(512 * MIB),
            submissions: NonZeroU32::new(1000),
            refresh: NonZeroU32::new(30).unwrap(),
            hang_timeout: HangTimeout::Limit(Some(Duration::from_millis(2500))),
            acquire_timeout: Some(Duration::from_millis(10)),
        };
        assert_eq!(settings.quotas, quotas);

        let error = |name, value| attrs(&[(name, value)]).settings().unwrap_err().to_string();
        for (name, value, is) in [
            ("mode", "firm", "soft or hard"),
            ("priority", "urgent", "low, normal or high"),
            ("timeslice", "0.01", "0.1 to 30 ms"),
            ("timeslice", "31", "0.1 to 30 ms"),
            ("timeslice", "1e0", "0.1 to 30 ms"),
            ("timeslice", "inf", "0.1 to 30 ms"),
            ("max_channels", "0", "1 to 65536"),
            ("max_pinned", "512", "1M to 1024G, in whole MiB or GiB"),
            ("max_pinned", "1025G", "1M to 1024G, in whole MiB or GiB"),
            ("max_pinned", "99999999999999999999G", "1M to 1024G, in whole MiB or GiB"),
            ("submissions", "+1", "1 to 10000000 a second"),
            ("refresh", "", "1 to 240 a second"),
            ("refresh", "0", "1 to 240 a second"),
            ("hang_timeout", "0", "0.01 to 86400 seconds, or off"),
            ("hang_timeout", "86401", "0.01 to 86400 seconds, or off"),
            ("hang_timeout", "never", "0.01 to 86400 seconds, or off"),
            ("acquire_timeout", "1e3", "0.01 to 86400 seconds, or off"),
            ("acquire_timeout", "", "0.01 to 86400 seconds, or off"),
        ] {
            assert_eq!(error(name, value), format!("Attribute {name:?} is {is}, not {value:?}"));
        }
        assert_eq!(
            error("mode", "hard"),
            "Attribute \"mode\" is hard without a share to enforce; add core (1 to 100)"
        );
    }

    #[test]
    fn defaults_are_those_of_the_gpu() {
        let defaults = attrs(&[]).settings().unwrap().quotas;
        let default = gpu::Quotas::DEFAULT_HANG_TIMEOUT;
        assert_eq!(defaults.for_gpu(Some(default)), gpu::Quotas::default());
        assert_eq!(defaults.for_gpu(None).hang_timeout, None);
        assert_eq!(defaults.refresh.get(), 60);
        let off = attrs(&[("hang_timeout", "off"), ("acquire_timeout", "off")]).settings().unwrap();
        let off = off.quotas.for_gpu(Some(default));
        assert_eq!((off.hang_timeout, off.acquire_timeout), (None, None));
    }

    #[test]
    fn a_name_is_an_attribute() {
        let mut named = attrs(&[("core", "20"), ("name", "web1")]);
        assert_eq!(named.name(), "web1".parse().ok());
        named.settings().unwrap();
        named.set_name("web2".parse().ok().as_ref());
        assert_eq!(named, attrs(&[("core", "20"), ("name", "web2")]));
        named.set_name(None);
        assert_eq!((named.name(), named.len()), (None, 1));
        let invalid = attrs(&[("name", "a/b")]);
        assert_eq!(invalid.name(), None);
        let said = invalid.settings().unwrap_err().to_string();
        assert!(said.starts_with("Attribute \"name\" is 1 to 63 of a-z"), "{said}");
        assert!(said.ends_with(", not \"a/b\""), "{said}");
    }

    #[test]
    fn every_attribute_is_described() {
        for attribute in ATTRIBUTES {
            assert!(attribute.about.ends_with('.'), "{}", attribute.name);
            assert!(!attribute.values.is_empty() && !attribute.default.is_empty());
            let limits_submissions = attribute.needs.contains(GpuCapabilities::QUOTAS);
            assert!(attribute.live || !limits_submissions, "quotas can change while it runs");
        }
    }

    #[test]
    fn attributes_are_inserted_and_removed_by_index() {
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
        assert_eq!(list.remove(None), Ok(()), "as in mdevctl");
    }
}
