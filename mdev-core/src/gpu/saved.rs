//! Saved state of a client: address spaces and channels, without the contents of memory.

use serde::{Deserialize, Serialize};

use super::{ChannelSpec, MapRequest};
#[cfg(doc)]
use crate::gpu::Saving;
use crate::ids::{ChannelId, SpaceId};

/// State of a paused client ([`Saving::save`]).
///
/// The memory ids in mappings and channels are those of the client that was saved. Memory has to be
/// imported again before a restore, under other ids.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedClient {
    /// Created address spaces.
    pub spaces: Vec<SpaceId>,
    /// Mappings of all address spaces.
    pub mappings: Vec<MapRequest>,
    /// Channels.
    pub channels: Vec<SavedChannel>,
}

/// State of a channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedChannel {
    /// Id, which is also the token of its doorbell.
    pub id: ChannelId,
    /// Specification.
    pub spec: ChannelSpec,
    /// Progress in the ring, in a form of the GPU's own.
    pub state: Vec<u8>,
}
