//! Requests, decoded.

/// An optional feature that is probed, read or set (`VFIO_DEVICE_FEATURE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature<'a> {
    /// Which feature.
    pub index: u16,
    /// What is wanted of it.
    pub access: FeatureAccess,
    /// What came with the request: the value for a set, arguments for a get.
    pub data: &'a [u8],
}

/// What is wanted of a [`Feature`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureAccess {
    /// Its value.
    Get,
    /// That it takes a value.
    Set,
    /// Whether it is there, with these methods.
    Probe {
        /// Can it be read?
        get: bool,
        /// Can it be set?
        set: bool,
    },
}
