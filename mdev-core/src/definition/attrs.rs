//! Attributes of a vGPU: an ordered list of names and values, and the table of those that mean something.

use std::fmt;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use serde::ser::Serializer;
use serde::{Deserialize, Serialize};

use crate::sched::policy::{MAX_SLICE, MIN_SLICE};
use crate::sched::{CoreError, Mode, Share, WordError};
use crate::units::{GIB, MIB};

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

/// Attributes, parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// What is asked for of the GPU's time.
    pub share: Share,
    /// What is limited besides time.
    pub quotas: Quotas,
    /// Whether the guest maps the doorbell page (where the GPU allows it), or each ring is trapped.
    pub doorbell_mapped: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { share: Share::default(), quotas: Quotas::default(), doorbell_mapped: true }
    }
}

/// Limits besides time; `None` leaves what the type and the GPU have. Video memory is the type's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quotas {
    /// Channels that may exist at once.
    pub max_channels: Option<u32>,
    /// Bytes of guest memory that may be pinned for the GPU at once, in whole pages.
    pub max_pinned: Option<u64>,
    /// GPFIFO entries that are taken in a second.
    pub submissions: Option<u32>,
    /// Pictures of the screen in a second.
    pub refresh: Option<u32>,
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
            settings.share.core = Some(value.parse()?);
            Ok(())
        },
    },
    Attribute {
        name: "mode",
        values: "soft or hard",
        about: "Whether the vGPU gets more than core where others idle (soft), or never (hard).",
        live: true,
        apply: |settings, value| {
            settings.share.mode = value.parse()?;
            Ok(())
        },
    },
    Attribute {
        name: "priority",
        values: "low, normal or high",
        about: "Who gets the time that nobody was promised: each class four times the one below.",
        live: true,
        apply: |settings, value| {
            settings.share.priority = value.parse()?;
            Ok(())
        },
    },
    Attribute {
        name: "timeslice",
        values: "0.1 to 30 ms",
        about: "The longest that the vGPU runs without a break while others wait; shares hold.",
        live: true,
        apply: |settings, value| {
            settings.share.timeslice = Some(milliseconds(value)?);
            Ok(())
        },
    },
    Attribute {
        name: "max_channels",
        values: "1 to 65536",
        about: "Channels that the vGPU may have at once, where that is less than its type has.",
        live: false,
        apply: |settings, value| {
            let limit = number("max_channels", "1 to 65536", value, 1..=65_536)?;
            settings.quotas.max_channels = Some(limit as u32);
            Ok(())
        },
    },
    Attribute {
        name: "max_pinned",
        values: "1M to 1024G",
        about: "Guest memory that may be pinned for the GPU at once, in whole MiB or GiB.",
        live: false,
        apply: |settings, value| {
            settings.quotas.max_pinned = Some(size("max_pinned", value)?);
            Ok(())
        },
    },
    Attribute {
        name: "submissions",
        values: "1 to 10000000",
        about: "GPFIFO entries that are taken in a second, with bursts of a tenth of a second.",
        live: true,
        apply: |settings, value| {
            let limit = number("submissions", "1 to 10000000 a second", value, 1..=10_000_000)?;
            settings.quotas.submissions = Some(limit as u32);
            Ok(())
        },
    },
    Attribute {
        name: "refresh",
        values: "1 to 240",
        about: "Pictures of the screen in a second, at most.",
        live: true,
        apply: |settings, value| {
            let limit = number("refresh", "1 to 240 a second", value, 1..=240)?;
            settings.quotas.refresh = Some(limit as u32);
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
                _ => return Err(bad("doorbell", "mapped or trapped", value)),
            };
            Ok(())
        },
    },
];

fn bad(name: &'static str, values: &'static str, value: &str) -> AttrError {
    AttrError::Value { name, values, value: value.to_owned() }
}

fn number(
    name: &'static str,
    values: &'static str,
    text: &str,
    range: RangeInclusive<u64>,
) -> Result<u64, AttrError> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    let parsed = text.parse().ok().filter(|number| digits && range.contains(number));
    parsed.ok_or_else(|| bad(name, values, text))
}

fn size(name: &'static str, text: &str) -> Result<u64, AttrError> {
    let values = "1M to 1024G, in whole MiB or GiB";
    let (digits, unit) = match (text.strip_suffix('M'), text.strip_suffix('G')) {
        (Some(digits), _) => (digits, MIB),
        (_, Some(digits)) => (digits, GIB),
        _ => return Err(bad(name, values, text)),
    };
    let number = number(name, values, digits, 1..=1 << 20).map_err(|_| bad(name, values, text))?;
    let bytes = number.saturating_mul(unit);
    if bytes <= 1024 * GIB { Ok(bytes) } else { Err(bad(name, values, text)) }
}

fn milliseconds(text: &str) -> Result<Duration, AttrError> {
    let wrong = || bad("timeslice", "0.1 to 30 ms", text);
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let parsed = text.parse::<f64>().ok().filter(|_| plain).ok_or_else(wrong)?;
    let slice = Duration::try_from_secs_f64(parsed / 1e3).map_err(|_| wrong())?;
    if (MIN_SLICE..=MAX_SLICE).contains(&slice) { Ok(slice) } else { Err(wrong()) }
}

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
    /// Not one of the words it may be.
    #[error(transparent)]
    Word(#[from] WordError),
    /// Not a value that it may have.
    #[error("Attribute {name:?} is {values}, not {value:?}")]
    Value {
        /// Its name.
        name: &'static str,
        /// What it may be.
        values: &'static str,
        /// What it was.
        value: String,
    },
    /// A cap without a height.
    #[error("Attribute \"mode\" is hard, but there is no share to hold to; add core (1 to 100)")]
    HardWithoutCore,
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
    names.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::{Core, Priority};

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
            "There is no attribute \"cores\"; there are core, mode, priority, timeslice, max_channels, \
             max_pinned, submissions, refresh, doorbell"
        );
        assert_eq!(
            error(&[("core", "80"), ("core", "20")]),
            "Attribute \"core\" is given twice; set it once (--attr core=VALUE), or remove one \
             (--delattr --index 1)"
        );
    }

    #[test]
    fn shares_and_quotas_are_read_and_held_to_their_bounds() {
        let settings = attrs(&[
            ("core", "25"),
            ("mode", "hard"),
            ("priority", "high"),
            ("timeslice", "0.5"),
            ("max_channels", "4"),
            ("max_pinned", "512M"),
            ("submissions", "1000"),
            ("refresh", "30"),
        ]);
        let settings = settings.settings().unwrap();
        assert_eq!((settings.share.mode, settings.share.priority), (Mode::Hard, Priority::High));
        assert_eq!(settings.share.timeslice, Some(Duration::from_micros(500)));
        let quotas = Quotas {
            max_channels: Some(4),
            max_pinned: Some(512 * MIB),
            submissions: Some(1000),
            refresh: Some(30),
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
        ] {
            assert_eq!(error(name, value), format!("Attribute {name:?} is {is}, not {value:?}"));
        }
        assert_eq!(
            error("mode", "hard"),
            "Attribute \"mode\" is hard, but there is no share to hold to; add core (1 to 100)"
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
