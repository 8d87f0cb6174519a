//! Interface between Tessera and a GPU backend.
//!
//! The manager holds a [`Gpu`]: it admits vGPUs and sets their time slices. A worker holds one
//! [`Client`]: one vGPU's partition, address spaces and channels, opened with the manager's
//! [`Admission`]. Dropping either releases all of its resources in every state.

mod budget;
mod capabilities;
mod channel;
mod client;
mod error;
mod exception;
mod facets;
mod handle;
mod parent;
mod saved;
mod screen;
mod usage;
mod waits;

pub use budget::Budget;
pub use capabilities::{GpuCapabilities, GpuDescription};
pub use channel::{
    ChannelHandle, ChannelRequest, ChannelSpec, ChannelSpecError, ChannelStatus, EngineKind,
    Placement, Preamble,
};
pub use client::{
    AnchoredDescriptor, Aperture, Apertures, Backing, CREATED_VA_END, Client, DoorbellWatch,
    GuestRam, MapRequest, Pending, StagedCopy, WrittenPages,
};
pub use error::GpuError;
pub use exception::{ErrorStates, Exception};
pub use facets::{Adoption, Programs, Saving};
pub use handle::{ClientHandle, SharedClient};
pub use parent::{Admission, ClientSpec, Contexts, Gpu};
pub use saved::{SavedChannel, SavedClient};
pub use screen::{PhysicalScreen, Scanout, ScreenStatus};
pub use usage::{Quotas, Usage, UsageReport};
pub use waits::Waits;
