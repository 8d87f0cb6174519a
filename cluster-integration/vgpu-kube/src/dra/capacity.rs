//! Shares and sizes of claims.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use mdev_core::profile::MIN_VRAM;

use super::DRIVER;
use crate::quantity::{self, QuantityError};

/// Capacity for the share of the GPU's time, in percent.
pub const CORE: &str = "core";
/// Capacity for video memory, in bytes.
pub const VRAM: &str = "vram";

/// Part of a physical GPU that a claim consumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capacity {
    /// Share of the GPU's time in percent: 1 to 100.
    pub core: u8,
    /// Video memory in bytes, a multiple of [`MIN_VRAM`].
    pub vram_bytes: u64,
}

/// Error of a claim's consumed capacity.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CapacityError {
    /// The scheduler has allocated the whole device.
    #[error(
        "The allocation of {device} has no consumed {name}: the cluster shares no devices; enable the \
         feature DRAConsumableCapacity (on by default from Kubernetes 1.36), or use device plugins"
    )]
    Missing {
        /// Device.
        device: String,
        /// Missing capacity.
        name: &'static str,
    },
    /// Not a quantity.
    #[error("The allocation's {0}: {1}")]
    Quantity(&'static str, QuantityError),
    /// Out of range.
    #[error("The allocation's core is {0}; a share is 1 to 100")]
    Core(u64),
    /// Out of range.
    #[error("The allocation's vram is {0}; a vGPU has at least 256Mi")]
    Vram(u64),
}

impl Capacity {
    /// Parses the consumed capacity of an allocation result.
    pub fn parse(
        device: &str,
        consumed: Option<&BTreeMap<String, Quantity>>,
    ) -> Result<Self, CapacityError> {
        let find = |name: &'static str| {
            let map = consumed.into_iter().flatten();
            let qualified = format!("{DRIVER}/{name}");
            let found = map.into_iter().find(|(key, _)| **key == name || **key == qualified);
            let missing = || CapacityError::Missing { device: device.to_owned(), name };
            let (_, value) = found.ok_or_else(missing)?;
            quantity::ceil(&value.0).map_err(|error| CapacityError::Quantity(name, error))
        };
        let (core, vram) = (find(CORE)?, find(VRAM)?);
        let in_range = u8::try_from(core).ok().filter(|core| (1..=100).contains(core));
        let core = in_range.ok_or(CapacityError::Core(core))?;
        let rounded = vram.checked_next_multiple_of(MIN_VRAM).filter(|bytes| *bytes > 0);
        Ok(Self { core, vram_bytes: rounded.ok_or(CapacityError::Vram(vram))? })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(pairs: &[(&str, &str)]) -> Result<Capacity, CapacityError> {
        let map = pairs.iter().map(|(name, value)| ((*name).to_owned(), Quantity((*value).into())));
        Capacity::parse("soft0", Some(&map.collect()))
    }

    #[test]
    fn consumed_capacities_are_parsed() {
        let gib = |core, vram_bytes| Ok(Capacity { core, vram_bytes });
        assert_eq!(parse(&[("core", "30"), ("vram", "1Gi")]), gib(30, 1 << 30));
        assert_eq!(parse(&[("core", "30"), ("vram", "1000Mi")]), gib(30, 1 << 30));
        assert_eq!(
            parse(&[("gpu.tessera.dev/core", "1"), ("gpu.tessera.dev/vram", "1"), ("x", "y")]),
            gib(1, MIN_VRAM)
        );
    }

    #[test]
    fn errors_name_what_is_wrong_in_one_line() {
        let error = |pairs: &[(&str, &str)]| parse(pairs).unwrap_err().to_string();
        let said = error(&[("core", "30")]);
        assert!(said.starts_with("The allocation of soft0 has no consumed vram"), "{said}");
        assert_eq!(
            Capacity::parse("soft0", None).unwrap_err().to_string(),
            said.replace("vram", "core")
        );
        for core in ["0", "101", "1k"] {
            let said = error(&[("core", core), ("vram", "1Gi")]);
            assert!(said.ends_with("; a share is 1 to 100"), "{said}");
        }
        let said = error(&[("core", "1"), ("vram", "0")]);
        assert_eq!(said, "The allocation's vram is 0; a vGPU has at least 256Mi");
        let said = error(&[("core", "x"), ("vram", "0")]);
        assert!(said.starts_with("The allocation's core: \"x\" is not a quantity"), "{said}");
        assert!(
            error(&[("core", "1"), ("vram", "18446744073709551615")]).contains("at least 256Mi")
        );
    }

    proptest! {
        #[test]
        fn a_claim_gets_at_least_what_it_consumes_and_less_than_a_step_more(
            core in 1_u8..=100,
            bytes in 1_u64..1 << 45,
        ) {
            let found = parse(&[("core", &core.to_string()), ("vram", &bytes.to_string())]).unwrap();
            prop_assert_eq!(found.core, core);
            prop_assert!(found.vram_bytes.is_multiple_of(MIN_VRAM));
            prop_assert!((bytes..bytes + MIN_VRAM).contains(&found.vram_bytes));
        }
    }
}
