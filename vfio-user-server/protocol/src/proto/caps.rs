//! Capabilities, the JSON data of VERSION messages.

use serde::{Deserialize, Serialize};

use crate::errno::Errno;
use crate::fds::MAX_FDS;
use crate::proto::header::MAX_DATA;

/// Limit of DMA mappings per session.
pub const MAX_DMA_MAPS: u32 = 65_535;

/// Capabilities of a client or server. Absent ones have the specification's default; unknown ones
/// are ignored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Limit of descriptors per message; default 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_msg_fds: Option<u64>,
    /// Limit of data bytes per message; default 1 MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_data_xfer_size: Option<u64>,
    /// Limit of DMA mappings; default 65535.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_dma_maps: Option<u64>,
    /// Bit mask of the page sizes of DMA mappings; default 4096.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pgsizes: Option<u64>,
    /// Support for REGION_WRITE_MULTI; default false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub write_multiple: Option<bool>,
    /// Support for a second socket, for the server's requests to the client.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub twin_socket: Option<TwinSocket>,
}

/// Twin socket capability: a second socket for the server's requests to the client.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TwinSocket {
    /// True if the sender supports a twin socket.
    #[serde(default)]
    pub supported: bool,
    /// In a reply: index of the client's socket among the message's descriptors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd_index: Option<u64>,
}

/// JSON document of VERSION messages.
#[derive(Default, Serialize, Deserialize)]
struct VersionData {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    capabilities: Option<Capabilities>,
}

impl Capabilities {
    /// Capabilities of this server, for all devices.
    pub const SERVER: Self = Self {
        max_msg_fds: Some(MAX_FDS as u64),
        max_data_xfer_size: Some(MAX_DATA as u64),
        max_dma_maps: Some(MAX_DMA_MAPS as u64),
        pgsizes: Some(4096),
        write_multiple: Some(true),
        twin_socket: None,
    };

    /// Decodes the data of a VERSION message: none, or JSON with a terminating NUL.
    pub fn decode(data: &[u8]) -> Result<Self, Errno> {
        let Some(end) = data.iter().position(|&byte| byte == 0) else {
            return if data.is_empty() { Ok(Self::default()) } else { Err(Errno::EINVAL) };
        };
        if end == 0 {
            return Ok(Self::default());
        }
        let data: VersionData = serde_json::from_slice(&data[..end]).map_err(|_| Errno::EINVAL)?;
        Ok(data.capabilities.unwrap_or_default())
    }

    /// Appends the data of a VERSION message to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        let data = VersionData { capabilities: Some(*self) };
        if serde_json::to_writer(&mut *out, &data).is_err() {
            out.truncate(start); // Unreachable: numbers and booleans always serialize.
        }
        out.push(0);
    }

    /// Returns those of these capabilities that the client has proposed: a reply must be a subset.
    #[must_use]
    pub fn intersection(self, proposed: Self) -> Self {
        Self {
            max_msg_fds: proposed.max_msg_fds.and(self.max_msg_fds),
            max_data_xfer_size: proposed.max_data_xfer_size.and(self.max_data_xfer_size),
            max_dma_maps: proposed.max_dma_maps.and(self.max_dma_maps),
            pgsizes: proposed.pgsizes.and(self.pgsizes),
            write_multiple: proposed.write_multiple.and(self.write_multiple),
            twin_socket: proposed.twin_socket.filter(|twin| twin.supported).and(self.twin_socket),
        }
    }

    /// Appends the capabilities to `out`, within `room` bytes. QEMU refuses replies longer than its
    /// request. Capabilities that equal the default, or matter least, are left out first. Returns
    /// true if the twin socket is included.
    pub fn encode_within(mut self, room: usize, out: &mut Vec<u8>) -> bool {
        let start = out.len();
        for step in 0..=6 {
            match step {
                0 => {}
                1 => self.pgsizes = None,
                2 => self.max_dma_maps = None,
                3 => self.max_data_xfer_size = None,
                4 => self.write_multiple = None,
                5 => self.twin_socket = None,
                _ => self.max_msg_fds = None,
            }
            self.encode(out);
            if out.len() - start <= room {
                return self.twin_socket.is_some();
            }
            out.truncate(start);
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// VERSION data of QEMU 11.1.
    const QEMU: &[u8] = b"{\"capabilities\": {\"max_msg_fds\": 16, \"max_data_xfer_size\": 1048576, \
        \"pgsizes\": 4096, \"max_dma_maps\": 65535, \"migration\": {\"max_bitmap_size\": 268435456, \
        \"pgsize\": 4096}, \"write_multiple\": true}}\0";

    fn encoded(room: usize, capabilities: Capabilities) -> String {
        let mut out = b"before".to_vec();
        capabilities.encode_within(room, &mut out);
        String::from_utf8(out.split_off(6)).unwrap()
    }

    #[test]
    fn replies_to_qemu_within_the_length_of_its_request() {
        let proposed = Capabilities::decode(QEMU).unwrap();
        assert_eq!(proposed, Capabilities::SERVER);
        let reply = encoded(QEMU.len(), Capabilities::SERVER.intersection(proposed));
        assert_eq!(
            reply,
            "{\"capabilities\":{\"max_msg_fds\":16,\"max_data_xfer_size\":1048576,\
             \"max_dma_maps\":65535,\"pgsizes\":4096,\"write_multiple\":true}}\0"
        );
    }

    #[test]
    fn replies_with_proposed_capabilities_that_fit() {
        let few = Capabilities { max_msg_fds: Some(1), ..Capabilities::default() };
        let common = Capabilities::SERVER.intersection(few);
        assert_eq!(encoded(64, common), "{\"capabilities\":{\"max_msg_fds\":16}}\0");
        assert_eq!(encoded(20, common), "{\"capabilities\":{}}\0");
        assert_eq!(encoded(19, common), "");
        for room in 0..200 {
            assert!(encoded(room, Capabilities::SERVER).len() <= room);
        }
    }

    #[test]
    fn absent_capabilities_are_defaults_and_garbage_is_refused() {
        for data in [&b""[..], b"\0", b"{}\0", b"{\"capabilities\":{}}\0", b"{\"other\":1}\0"] {
            assert_eq!(Capabilities::decode(data), Ok(Capabilities::default()));
        }
        for data in [&b"{}"[..], b"{\0", b"\xff\0", b"{\"capabilities\":7}\0", b"[]x\0"] {
            assert_eq!(Capabilities::decode(data), Err(Errno::EINVAL), "{data:?}");
        }
        let negative = b"{\"capabilities\":{\"max_msg_fds\":-1}}\0";
        assert_eq!(Capabilities::decode(negative), Err(Errno::EINVAL));
        let deep = [vec![b'['; 100_000], vec![0]].concat();
        assert_eq!(Capabilities::decode(&deep), Err(Errno::EINVAL));
    }
}
