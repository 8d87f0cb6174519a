//! A claim's own settings: opaque parameters for the driver.
//!
//! ```yaml
//! apiVersion: gpu.tessera.dev/v1alpha1
//! kind: VgpuConfig
//! mode: hard
//! limits: {maxChannels: 32, submissions: 10000}
//! ```
//!
//! Users who may create claims choose them. They can restrict the vGPU and give it a display, and
//! nothing else: share and memory are capacities, which the scheduler counts; the owner is the
//! pod's.

use mdev_core::definition::{AttrError, Attrs};
use mdev_core::units::MIB;
use serde::Deserialize;
use serde_json::Value;

use super::DRIVER;
use crate::quantity::{self, QuantityError};

/// Version of the parameters.
const VERSION: &str = "v1alpha1";
const KIND: &str = "VgpuConfig";
/// Longest hang limit in seconds, and most readouts per second: the defaults of a vGPU.
const MAX_HANG_TIMEOUT: f64 = 60.0;
const MAX_REFRESH: u32 = 60;

/// Settings of a vGPU. Absent members are the defaults.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct VgpuConfig {
    #[serde(rename = "apiVersion")]
    api_version: String,
    kind: String,
    /// Whether the share is also the most that the vGPU gets.
    mode: Option<Mode>,
    #[serde(default)]
    limits: Limits,
    /// Whether the vGPU has a display head, for a VM.
    display: Option<bool>,
}

/// Policy for unused time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Mode {
    Soft,
    Hard,
}

/// Limits besides share and memory.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Limits {
    max_channels: Option<u32>,
    max_pinned: Option<String>,
    submissions: Option<u32>,
    refresh: Option<u32>,
    hang_timeout_seconds: Option<f64>,
    acquire_timeout_seconds: Option<f64>,
}

/// Error of a claim's settings.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The parameters have another shape.
    #[error(
        "The claim's parameters for gpu.tessera.dev are no VgpuConfig: {0}; they can set mode, limits and display"
    )]
    Shape(#[from] serde_json::Error),
    /// Another kind or version.
    #[error(
        "The claim's parameters are {0:?} {1:?}; give apiVersion gpu.tessera.dev/v1alpha1, kind VgpuConfig"
    )]
    Kind(String, String),
    /// Not a size.
    #[error("The claim's maxPinned: {0}")]
    Quantity(#[from] QuantityError),
    /// A limit above the default.
    #[error("The claim's {name} is {value}; it can be at most {most}")]
    TooMuch {
        /// Name of the limit.
        name: &'static str,
        /// Given value.
        value: f64,
        /// Largest value.
        most: f64,
    },
    /// A value that vgpud refuses.
    #[error("The claim's parameters: {0}")]
    Attribute(#[from] AttrError),
}

impl VgpuConfig {
    /// Parses and checks opaque parameters.
    pub fn parse(parameters: &Value) -> Result<Self, ConfigError> {
        let config = Self::deserialize(parameters)?;
        if config.api_version != format!("{DRIVER}/{VERSION}") || config.kind != KIND {
            return Err(ConfigError::Kind(config.api_version, config.kind));
        }
        let most = |name, value: Option<f64>, most| match value {
            Some(value) if value > most => Err(ConfigError::TooMuch { name, value, most }),
            _ => Ok(()),
        };
        most("hangTimeoutSeconds", config.limits.hang_timeout_seconds, MAX_HANG_TIMEOUT)?;
        most("refresh", config.limits.refresh.map(f64::from), MAX_REFRESH.into())?;
        // A share is always given.
        let core = [("core".to_owned(), "1".to_owned())];
        let own = config.attributes()?.into_iter().map(|(name, value)| (name.to_owned(), value));
        core.into_iter().chain(own).collect::<Attrs>().settings()?;
        Ok(config)
    }

    /// Returns the settings with those of a later entry, which take precedence.
    #[must_use]
    pub fn overlaid(self, later: Self) -> Self {
        let (own, limits) = (self.limits, later.limits);
        Self {
            api_version: later.api_version,
            kind: later.kind,
            mode: later.mode.or(self.mode),
            display: later.display.or(self.display),
            limits: Limits {
                max_channels: limits.max_channels.or(own.max_channels),
                max_pinned: limits.max_pinned.or(own.max_pinned),
                submissions: limits.submissions.or(own.submissions),
                refresh: limits.refresh.or(own.refresh),
                hang_timeout_seconds: limits.hang_timeout_seconds.or(own.hang_timeout_seconds),
                acquire_timeout_seconds: limits
                    .acquire_timeout_seconds
                    .or(own.acquire_timeout_seconds),
            },
        }
    }

    /// Returns whether the vGPU has a display head.
    pub fn display(&self) -> bool {
        self.display.unwrap_or_default()
    }

    /// Returns the settings as attributes of a vGPU.
    pub fn attributes(&self) -> Result<Vec<(&'static str, String)>, ConfigError> {
        let limits = &self.limits;
        let pinned = limits.max_pinned.as_deref().map(quantity::ceil).transpose()?;
        let mode = self.mode.map(|mode| match mode {
            Mode::Soft => "soft".to_owned(),
            Mode::Hard => "hard".to_owned(),
        });
        let number = |value: Option<u32>| value.map(|value| value.to_string());
        let seconds = |value: Option<f64>| value.map(|value| value.to_string());
        let all = [
            ("mode", mode),
            ("max_channels", number(limits.max_channels)),
            ("max_pinned", pinned.map(|bytes| format!("{}M", bytes / MIB))),
            ("submissions", number(limits.submissions)),
            ("refresh", number(limits.refresh)),
            ("hang_timeout", seconds(limits.hang_timeout_seconds)),
            ("acquire_timeout", seconds(limits.acquire_timeout_seconds)),
        ];
        Ok(all.into_iter().filter_map(|(name, value)| Some((name, value?))).collect())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn config(mut own: Value) -> Value {
        own["apiVersion"] = json!("gpu.tessera.dev/v1alpha1");
        own["kind"] = json!("VgpuConfig");
        own
    }

    fn error(own: Value) -> String {
        VgpuConfig::parse(&config(own)).unwrap_err().to_string()
    }

    #[test]
    fn mode_limits_and_display_can_be_set() {
        let parsed = VgpuConfig::parse(&config(json!({
            "mode": "hard", "display": true,
            "limits": {"maxChannels": 8, "maxPinned": "1Gi", "submissions": 1000, "refresh": 30,
                       "hangTimeoutSeconds": 2.5, "acquireTimeoutSeconds": 600},
        })))
        .unwrap();
        assert!(parsed.display());
        let expected = [
            ("mode", "hard"),
            ("max_channels", "8"),
            ("max_pinned", "1024M"),
            ("submissions", "1000"),
            ("refresh", "30"),
            ("hang_timeout", "2.5"),
            ("acquire_timeout", "600"),
        ];
        let found = parsed.attributes().unwrap();
        assert_eq!(found, expected.map(|(name, value)| (name, value.to_owned())));
        let empty = VgpuConfig::parse(&config(json!({}))).unwrap();
        assert_eq!((empty.attributes().unwrap(), empty.display()), (vec![], false));
    }

    #[test]
    fn anything_else_is_refused() {
        for forged in [
            json!({"owner": "0"}),
            json!({"core": 100}),
            json!({"vram": "80Gi"}),
            json!({"parent": "soft1"}),
            json!({"priority": "high"}),
            json!({"timeslice": 30}),
            json!({"limits": {"owner": 0}}),
            json!({"mode": "none"}),
            json!({"limits": {"maxChannels": -1}}),
        ] {
            let said = error(forged.clone());
            assert!(said.contains("they can set mode, limits and display"), "{forged}: {said}");
        }
        let said = error(json!({"limits": {"maxPinned": "lots"}}));
        assert!(said.starts_with("The claim's maxPinned: \"lots\" is not a quantity"), "{said}");
        let said = error(json!({"limits": {"hangTimeoutSeconds": 61}}));
        assert_eq!(said, "The claim's hangTimeoutSeconds is 61; it can be at most 60");
        let said = error(json!({"limits": {"maxPinned": "1"}}));
        assert!(said.starts_with("The claim's parameters: Attribute \"max_pinned\""), "{said}");
        let other = json!({"apiVersion": "gpu.tessera.dev/v2", "kind": "VgpuConfig"});
        let said = VgpuConfig::parse(&other).unwrap_err().to_string();
        assert!(
            said.ends_with("give apiVersion gpu.tessera.dev/v1alpha1, kind VgpuConfig"),
            "{said}"
        );
    }

    #[test]
    fn later_settings_take_precedence() {
        let parse = |own| VgpuConfig::parse(&config(own)).unwrap();
        let class = parse(json!({"mode": "hard", "display": true, "limits": {"submissions": 10}}));
        let claim = parse(json!({"mode": "soft", "limits": {"maxChannels": 4}}));
        let both = class.overlaid(claim);
        assert!(both.display());
        let expected = [("mode", "soft"), ("max_channels", "4"), ("submissions", "10")];
        assert_eq!(both.attributes().unwrap(), expected.map(|(n, v)| (n, v.to_owned())));
    }

    proptest! {
        #[test]
        fn accepted_parameters_are_attributes_that_restrict(
            channels in prop::option::of(any::<u32>()),
            pinned in prop::option::of("[0-9]{1,6}(Mi|Gi|M|k)?"),
            submissions in prop::option::of(any::<u32>()),
            hang in prop::option::of(-1.0..200.0_f64),
            extra in prop::option::of("[a-z]{1,12}"),
        ) {
            let mut own = config(json!({"limits": {
                "maxChannels": channels, "maxPinned": pinned, "submissions": submissions,
                "hangTimeoutSeconds": hang,
            }}));
            if let Some(extra) = &extra {
                own[extra.as_str()] = json!("x");
            }
            if let Ok(config) = VgpuConfig::parse(&own) {
                prop_assert!(extra.is_none());
                for (name, value) in config.attributes().unwrap() {
                    prop_assert!(["max_channels", "max_pinned", "submissions", "hang_timeout"].contains(&name));
                    prop_assert!(!value.is_empty() && value != "off");
                }
                prop_assert!(hang.is_none_or(|hang| (0.01..=60.0).contains(&hang)));
            }
        }
    }
}
