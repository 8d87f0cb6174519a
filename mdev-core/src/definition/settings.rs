//! What attributes mean: the table of those that there are, with their bounds.

use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::attrs::AttrError;
use super::owner::Owner;
use crate::gpu::{self, GpuCapabilities};
use crate::sched::Share;
use crate::sched::policy::{MAX_SLICE, MIN_SLICE};
use crate::units::{GIB, MIB};

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quotas {
    /// Channels that may exist at once.
    pub max_channels: Option<u32>,
    /// Bytes of guest memory that may be pinned for the GPU at once, in whole pages.
    pub max_pinned: Option<u64>,
    /// GPFIFO entries that are taken in a second.
    pub submissions: Option<NonZeroU32>,
    /// Pictures of the screen that are read out in a second.
    pub refresh: NonZeroU32,
    /// Engine time of one kernel or transfer, after which it has hung.
    pub hang_timeout: Patience,
    /// Time that a channel may wait for a semaphore, after which it has hung.
    pub acquire_timeout: Option<Duration>,
}

/// How long is too long.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Patience {
    /// What the GPU has by itself.
    #[default]
    Own,
    /// Longer than this, or nothing is.
    Limit(Option<Duration>),
}

impl Patience {
    /// What it comes down to on a GPU whose own is `own`.
    pub fn or(self, own: Option<Duration>) -> Option<Duration> {
        match self {
            Self::Own => own,
            Self::Limit(limit) => limit,
        }
    }
}

impl Quotas {
    /// Pictures in a second, where nothing else was said: as many as a screen shows.
    pub const DEFAULT_REFRESH: NonZeroU32 = NonZeroU32::new(60).unwrap();

    /// Those that the silicon keeps, which has a hang timeout of its own.
    pub fn of_silicon(&self, own_hang_timeout: Option<Duration>) -> gpu::Quotas {
        gpu::Quotas {
            submissions_per_second: self.submissions,
            max_channels: self.max_channels,
            max_import_bytes: self.max_pinned,
            hang_timeout: self.hang_timeout.or(own_hang_timeout),
            acquire_timeout: self.acquire_timeout,
        }
    }
}

impl Default for Quotas {
    fn default() -> Self {
        let silicon = gpu::Quotas::default();
        Self {
            max_channels: silicon.max_channels,
            max_pinned: silicon.max_import_bytes,
            submissions: silicon.submissions_per_second,
            refresh: Self::DEFAULT_REFRESH,
            hang_timeout: Patience::Own,
            acquire_timeout: silicon.acquire_timeout,
        }
    }
}

/// One attribute that means something.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// Its name.
    pub name: &'static str,
    /// What it may be, for people.
    pub values: &'static str,
    /// What it is where it is not given, for people.
    pub default: &'static str,
    /// What it does, in one sentence.
    pub about: &'static str,
    /// True where it can change while the vGPU runs.
    pub live: bool,
    /// What a GPU must be able to do for it.
    pub needs: GpuCapabilities,
    pub(super) apply: fn(&mut Settings, &str) -> Result<(), AttrError>,
}

const NOTHING: GpuCapabilities = GpuCapabilities::empty();
const QUOTAS: GpuCapabilities = GpuCapabilities::QUOTAS;

/// Every attribute there is.
pub const ATTRIBUTES: &[Attribute] = &[
    Attribute {
        name: "core",
        values: "1 to 100",
        default: "a part of what nobody asked for",
        about: "Hundredths of the GPU's time that the vGPU gets at least, while others contend.",
        live: true,
        needs: NOTHING,
        apply: |settings, value| {
            settings.share.core = Some(value.parse()?);
            Ok(())
        },
    },
    Attribute {
        name: "mode",
        values: "soft or hard",
        default: "soft",
        about: "Whether the vGPU gets more than core where others idle (soft), or never (hard).",
        live: true,
        needs: NOTHING,
        apply: |settings, value| {
            settings.share.mode = value.parse()?;
            Ok(())
        },
    },
    Attribute {
        name: "priority",
        values: "low, normal or high",
        default: "normal",
        about: "Who gets the time that nobody was promised: each class four times the one below.",
        live: true,
        needs: NOTHING,
        apply: |settings, value| {
            settings.share.priority = value.parse()?;
            Ok(())
        },
    },
    Attribute {
        name: "timeslice",
        values: "0.1 to 30 ms",
        default: "as its share has it",
        about: "The longest that the vGPU runs without a break while others wait; shares hold.",
        live: true,
        needs: NOTHING,
        apply: |settings, value| {
            settings.share.timeslice =
                Some(time("timeslice", "0.1 to 30 ms", value, 1e-3, MIN_SLICE..=MAX_SLICE)?);
            Ok(())
        },
    },
    Attribute {
        name: "max_channels",
        values: "1 to 65536",
        default: "its type's",
        about: "Channels that the vGPU may have at once, where that is less than its type has.",
        live: true,
        needs: NOTHING,
        apply: |settings, value| {
            let limit = number("max_channels", "1 to 65536", value, 1..=65_536)?;
            settings.quotas.max_channels = Some(limit as u32);
            Ok(())
        },
    },
    Attribute {
        name: "max_pinned",
        values: "1M to 1024G",
        default: "its type's",
        about: "Guest memory that may be pinned for the GPU at once, in whole MiB or GiB.",
        live: true,
        needs: NOTHING,
        apply: |settings, value| {
            settings.quotas.max_pinned = Some(size("max_pinned", value)?);
            Ok(())
        },
    },
    Attribute {
        name: "submissions",
        values: "1 to 10000000 a second",
        default: "any number",
        about: "GPFIFO entries that are taken in a second, with bursts of a twentieth of that.",
        live: true,
        needs: QUOTAS,
        apply: |settings, value| {
            let limit = number("submissions", "1 to 10000000 a second", value, 1..=10_000_000)?;
            settings.quotas.submissions = NonZeroU32::new(limit as u32);
            Ok(())
        },
    },
    Attribute {
        name: "refresh",
        values: "1 to 240 a second",
        default: "60",
        about: "Pictures of the screen that are read out in a second, at most.",
        live: true,
        needs: NOTHING,
        apply: |settings, value| {
            let limit = number("refresh", "1 to 240 a second", value, 1..=240)?;
            settings.quotas.refresh = NonZeroU32::new(limit as u32).unwrap_or(NonZeroU32::MIN);
            Ok(())
        },
    },
    Attribute {
        name: "hang_timeout",
        values: "0.01 to 86400 seconds, or off",
        default: "60, or off where each ends by itself",
        about: "Engine time of one kernel or transfer, after which its channel is reset as hung.",
        live: true,
        needs: QUOTAS,
        apply: |settings, value| {
            settings.quotas.hang_timeout = Patience::Limit(patience("hang_timeout", value)?);
            Ok(())
        },
    },
    Attribute {
        name: "acquire_timeout",
        values: "0.01 to 86400 seconds, or off",
        default: "off",
        about: "Time that a channel may wait for a semaphore before it is reset as hung.",
        live: true,
        needs: QUOTAS,
        apply: |settings, value| {
            settings.quotas.acquire_timeout = patience("acquire_timeout", value)?;
            Ok(())
        },
    },
    Attribute {
        name: "doorbell",
        values: "mapped or trapped",
        default: "mapped",
        about: "Whether the guest rings the GPU's doorbell itself, or each ring is trapped.",
        live: false,
        needs: NOTHING,
        apply: |settings, value| {
            settings.doorbell_mapped = match value {
                "mapped" => true,
                "trapped" => false,
                _ => return Err(bad("doorbell", "mapped or trapped", value)),
            };
            Ok(())
        },
    },
    Attribute {
        name: "owner",
        values: Owner::VALUES,
        default: "vgpud's --owner",
        about: "Whom its socket belongs to: the user that its VM runs as. Nobody else can attach.",
        live: false,
        needs: NOTHING,
        // Who that is, is the host's to say: the manager looks it up when the vGPU starts.
        apply: |_, value| match value.parse::<Owner>() {
            Ok(_) => Ok(()),
            Err(_) => Err(bad("owner", Owner::VALUES, value)),
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

/// A decimal number of `unit` seconds.
fn time(
    name: &'static str,
    values: &'static str,
    text: &str,
    unit: f64,
    range: RangeInclusive<Duration>,
) -> Result<Duration, AttrError> {
    let wrong = || bad(name, values, text);
    let plain = text.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let parsed = text.parse::<f64>().ok().filter(|_| plain).ok_or_else(wrong)?;
    let time = Duration::try_from_secs_f64(parsed * unit).map_err(|_| wrong())?;
    if range.contains(&time) { Ok(time) } else { Err(wrong()) }
}

fn patience(name: &'static str, text: &str) -> Result<Option<Duration>, AttrError> {
    let values = "0.01 to 86400 seconds, or off";
    let range = gpu::Quotas::SHORTEST_TIMEOUT..=gpu::Quotas::LONGEST_TIMEOUT;
    if text == "off" { Ok(None) } else { time(name, values, text, 1.0, range).map(Some) }
}

impl Attribute {
    /// The attribute of that name.
    pub fn named(name: &str) -> Result<&'static Self, AttrError> {
        let row = ATTRIBUTES.iter().find(|attribute| attribute.name == name);
        row.ok_or_else(|| AttrError::Unknown(name.to_owned()))
    }
}
