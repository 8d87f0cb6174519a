//! Known attributes: their meaning, bounds and defaults.

use std::num::NonZeroU32;
use std::ops::RangeInclusive;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::attrs::AttrError;
use super::name::{self, VgpuName};
use super::owner::Owner;
use crate::gpu::{self, GpuCapabilities};
use crate::sched::ShareRequest;
use crate::sched::policy::{MAX_SLICE, MIN_SLICE};
use crate::units::{GIB, MIB};

/// Parsed attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Requested share of the GPU's time.
    pub share: ShareRequest,
    /// Limits besides time.
    pub quotas: Quotas,
    /// True if the guest maps the doorbell page where the GPU allows it, false if each doorbell is
    /// trapped.
    pub doorbell_mapped: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self { share: ShareRequest::default(), quotas: Quotas::default(), doorbell_mapped: true }
    }
}

/// Limits besides time; `None` is the limit of the type and the GPU. The type determines video
/// memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quotas {
    /// Number of channels.
    pub max_channels: Option<u32>,
    /// Size of the guest memory that is pinned for the GPU, in bytes, whole pages.
    pub max_pinned: Option<u64>,
    /// GPFIFO entries per second.
    pub submissions: Option<NonZeroU32>,
    /// Readouts of the screen per second.
    pub refresh: NonZeroU32,
    /// Hang limit.
    pub hang_timeout: HangTimeout,
    /// Wait for a semaphore after which the channel is reset as hung.
    pub acquire_timeout: Option<Duration>,
}

/// Hang limit: engine time of one kernel or transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum HangTimeout {
    /// The GPU's default.
    #[default]
    #[serde(rename = "Own")]
    GpuDefault,
    /// This limit, or none.
    Limit(Option<Duration>),
}

impl HangTimeout {
    /// Returns the limit on a GPU with the default `default`.
    pub fn or(self, default: Option<Duration>) -> Option<Duration> {
        match self {
            Self::GpuDefault => default,
            Self::Limit(limit) => limit,
        }
    }
}

impl Quotas {
    /// Default readouts per second: the refresh rate of a screen.
    pub const DEFAULT_REFRESH: NonZeroU32 = NonZeroU32::new(60).unwrap();

    /// Returns the quotas for a GPU with this default hang limit.
    pub fn for_gpu(&self, default_hang_timeout: Option<Duration>) -> gpu::Quotas {
        gpu::Quotas {
            submissions_per_second: self.submissions,
            max_channels: self.max_channels,
            max_import_bytes: self.max_pinned,
            hang_timeout: self.hang_timeout.or(default_hang_timeout),
            acquire_timeout: self.acquire_timeout,
        }
    }
}

impl Default for Quotas {
    fn default() -> Self {
        let defaults = gpu::Quotas::default();
        Self {
            max_channels: defaults.max_channels,
            max_pinned: defaults.max_import_bytes,
            submissions: defaults.submissions_per_second,
            refresh: Self::DEFAULT_REFRESH,
            hang_timeout: HangTimeout::GpuDefault,
            acquire_timeout: defaults.acquire_timeout,
        }
    }
}

/// Known attribute.
#[derive(Clone, Copy, Debug)]
pub struct Attribute {
    /// Name.
    pub name: &'static str,
    /// Valid values, for help texts.
    pub values: &'static str,
    /// Default, for help texts.
    pub default: &'static str,
    /// Description in one sentence.
    pub about: &'static str,
    /// True if it can change while the vGPU runs.
    pub live: bool,
    /// Capabilities that the GPU needs for it.
    pub needs: GpuCapabilities,
    pub(super) apply: fn(&mut Settings, &str) -> Result<(), AttrError>,
}

const NO_CAPABILITIES: GpuCapabilities = GpuCapabilities::empty();
const QUOTAS: GpuCapabilities = GpuCapabilities::QUOTAS;

/// All known attributes.
pub const ATTRIBUTES: &[Attribute] = &[
    Attribute {
        name: name::ATTRIBUTE,
        values: VgpuName::VALUES,
        default: "none",
        about: "Name of the vGPU, unique on this host, which can be given in place of the uuid.",
        live: true,
        needs: NO_CAPABILITIES,
        // The manager keeps names unique, and reads the name from the attributes.
        apply: |_, value| {
            let name = value.parse::<VgpuName>();
            name.map(drop).map_err(|_| bad(name::ATTRIBUTE, VgpuName::VALUES, value))
        },
    },
    Attribute {
        name: "core",
        values: "1 to 100",
        default: "a part of the unreserved time",
        about: "Percentage of the GPU's time that the vGPU gets at least while other vGPUs contend.",
        live: true,
        needs: NO_CAPABILITIES,
        apply: |settings, value| {
            settings.share.core = Some(value.parse()?);
            Ok(())
        },
    },
    Attribute {
        name: "mode",
        values: "soft or hard",
        default: "soft",
        about: "Whether the vGPU gets more than core while other vGPUs idle (soft), or never (hard).",
        live: true,
        needs: NO_CAPABILITIES,
        apply: |settings, value| {
            settings.share.mode = value.parse()?;
            Ok(())
        },
    },
    Attribute {
        name: "priority",
        values: "low, normal or high",
        default: "normal",
        about: "Weight for unreserved time: each class gets four times that of the class below.",
        live: true,
        needs: NO_CAPABILITIES,
        apply: |settings, value| {
            settings.share.priority = value.parse()?;
            Ok(())
        },
    },
    Attribute {
        name: "timeslice",
        values: "0.1 to 30 ms",
        default: "derived from its share",
        about: "Maximum time that the vGPU runs without a break while others wait; shares hold.",
        live: true,
        needs: NO_CAPABILITIES,
        apply: |settings, value| {
            settings.share.timeslice =
                Some(time("timeslice", "0.1 to 30 ms", value, 1e-3, MIN_SLICE..=MAX_SLICE)?);
            Ok(())
        },
    },
    Attribute {
        name: "max_channels",
        values: "1 to 65536",
        default: "the type's limit",
        about: "Maximum number of channels, if less than the type's limit.",
        live: true,
        needs: NO_CAPABILITIES,
        apply: |settings, value| {
            let limit = number("max_channels", "1 to 65536", value, 1..=65_536)?;
            settings.quotas.max_channels = Some(limit as u32);
            Ok(())
        },
    },
    Attribute {
        name: "max_pinned",
        values: "1M to 1024G",
        default: "the type's limit",
        about: "Maximum size of guest memory pinned for the GPU, in whole MiB or GiB.",
        live: true,
        needs: NO_CAPABILITIES,
        apply: |settings, value| {
            settings.quotas.max_pinned = Some(size("max_pinned", value)?);
            Ok(())
        },
    },
    Attribute {
        name: "submissions",
        values: "1 to 10000000 a second",
        default: "no limit",
        about: "Maximum number of GPFIFO entries per second, with bursts of a twentieth of that.",
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
        about: "Maximum number of readouts of the screen per second.",
        live: true,
        needs: NO_CAPABILITIES,
        apply: |settings, value| {
            let limit = number("refresh", "1 to 240 a second", value, 1..=240)?;
            settings.quotas.refresh = NonZeroU32::new(limit as u32).unwrap_or(NonZeroU32::MIN);
            Ok(())
        },
    },
    Attribute {
        name: "hang_timeout",
        values: "0.01 to 86400 seconds, or off",
        default: "60, or off if the GPU's work always ends",
        about: "Engine time of one kernel or transfer after which its channel is reset as hung.",
        live: true,
        needs: QUOTAS,
        apply: |settings, value| {
            settings.quotas.hang_timeout = HangTimeout::Limit(timeout("hang_timeout", value)?);
            Ok(())
        },
    },
    Attribute {
        name: "acquire_timeout",
        values: "0.01 to 86400 seconds, or off",
        default: "off",
        about: "Time of a wait for a semaphore after which the channel is reset as hung.",
        live: true,
        needs: QUOTAS,
        apply: |settings, value| {
            settings.quotas.acquire_timeout = timeout("acquire_timeout", value)?;
            Ok(())
        },
    },
    Attribute {
        name: "doorbell",
        values: "mapped or trapped",
        default: "mapped",
        about: "Whether the guest writes the GPU's doorbell directly, or each write is trapped.",
        live: false,
        needs: NO_CAPABILITIES,
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
        about: "User that the vGPU's socket belongs to and its VM runs as. No other user can attach.",
        live: false,
        needs: NO_CAPABILITIES,
        // The manager resolves the names on the host when the vGPU starts.
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

/// Parses a decimal number of `unit` seconds.
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

fn timeout(name: &'static str, text: &str) -> Result<Option<Duration>, AttrError> {
    let values = "0.01 to 86400 seconds, or off";
    let range = gpu::Quotas::SHORTEST_TIMEOUT..=gpu::Quotas::LONGEST_TIMEOUT;
    if text == "off" { Ok(None) } else { time(name, values, text, 1.0, range).map(Some) }
}

impl Attribute {
    /// Returns the attribute with this name.
    pub fn named(name: &str) -> Result<&'static Self, AttrError> {
        let row = ATTRIBUTES.iter().find(|attribute| attribute.name == name);
        row.ok_or_else(|| AttrError::Unknown(name.to_owned()))
    }
}
