//! Access to device features (`VFIO_DEVICE_FEATURE`).

/// Access to a device feature (`VFIO_DEVICE_FEATURE_*`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Feature<'a> {
    /// Feature index.
    pub index: u16,
    /// Kind of access.
    pub access: FeatureAccess,
    /// Data of the request: the value for a set, arguments for a get.
    pub data: &'a [u8],
}

/// Kind of access to a [`Feature`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FeatureAccess {
    /// Get the value.
    Get,
    /// Set the value.
    Set,
    /// Check that the feature exists and has these methods.
    Probe {
        /// True to check for get.
        get: bool,
        /// True to check for set.
        set: bool,
    },
}
