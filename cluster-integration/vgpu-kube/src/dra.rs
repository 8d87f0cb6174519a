//! Dynamic resource allocation: the driver `gpu.tessera.dev`.
//!
//! * [`capacity`]: shares and sizes of claims
//! * [`config`]: a claim's own settings
//! * [`claim`]: what the scheduler has allocated to a claim
//! * [`owner`]: the user of a pod
//! * [`driver`]: prepares and unprepares claims; [`records`] and [`cdi`] are what it keeps
//! * [`reconcile`]: makes vGPUs and files match the live claims
//! * [`service`]: the calls of kubelet, and the registration
//! * [`inventory`]: watches vgpud; [`slices`]: the node's GPUs as a ResourceSlice; [`publisher`]
//!   writes it
//! * [`conditions`]: a claim's status: what is wrong with its devices
//! * [`cluster`]: requests to the apiserver, and events

pub mod capacity;
pub mod cdi;
pub mod claim;
pub mod cluster;
pub mod conditions;
pub mod config;
pub mod driver;
pub mod inventory;
pub mod owner;
pub mod publisher;
pub mod reconcile;
pub mod records;
pub mod service;
pub mod slices;

/// Name of the driver, and domain of its attributes.
pub const DRIVER: &str = "gpu.tessera.dev";
