//! Where ioctl arguments have pointers and file descriptors.
//!
//! The worker sends these shapes with [`Welcome`](crate::Welcome). They spare a round trip: with
//! them, the transport sends what an argument points to at once. [`Fetch`](crate::Fetch) covers the
//! rest.

use serde::{Deserialize, Serialize};

use crate::messages::{Node, Range};

/// Kind of device node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum NodeKind {
    /// `/dev/nvidiactl` and `/dev/nvidiaN`, with the same ioctls.
    Rm,
    /// `/dev/nvidia-uvm`.
    Uvm,
}

impl Node {
    /// Returns the kind of the node.
    pub const fn kind(self) -> NodeKind {
        match self {
            Self::Control | Self::Gpu(_) => NodeKind::Rm,
            Self::Uvm => NodeKind::Uvm,
        }
    }
}

/// Shape of the argument of one ioctl.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CallShape {
    /// Nodes with this ioctl.
    pub node: NodeKind,
    /// Number: the low byte of the request on RM's nodes, all of it on nvidia-uvm.
    pub number: u32,
    /// Length of the argument in bytes. Requests of nvidia-uvm do not encode it. On RM's nodes, the
    /// shape is that of requests with this length, or of requests with any if absent.
    pub argument_bytes: Option<u32>,
    /// Offsets of a 64-bit pointer and of the 32-bit length, in bytes, of what it points to.
    pub block: Option<(u32, u32)>,
    /// Offset of a 32-bit file descriptor.
    pub fd: Option<u32>,
}

impl CallShape {
    /// Returns the number of `request`, as [`CallShape::number`] has it.
    pub const fn number_of(node: NodeKind, request: u32) -> u32 {
        match node {
            NodeKind::Rm => request & 0xff,
            NodeKind::Uvm => request,
        }
    }

    /// Returns whether this is the shape of `request`.
    pub const fn is_of(&self, node: NodeKind, request: u32) -> bool {
        match (self.node, node) {
            (NodeKind::Rm, NodeKind::Rm) => {
                let same_len = match self.argument_bytes {
                    Some(bytes) => bytes == encoded_len(request),
                    None => true,
                };
                self.number == Self::number_of(node, request) && same_len
            }
            (NodeKind::Uvm, NodeKind::Uvm) => self.number == request,
            _ => false,
        }
    }

    /// Returns the length of the argument of `request`: from this shape, or as `_IOC_SIZE` encodes
    /// it.
    pub const fn argument_len(&self, request: u32) -> u32 {
        match self.argument_bytes {
            Some(bytes) => bytes,
            None => encoded_len(request),
        }
    }

    /// Returns the range that the argument points to, if there is one.
    pub fn range_in(&self, argument: &[u8]) -> Option<Range> {
        let (pointer, len) = self.block?;
        let address = u64::from_le_bytes(*field(argument, pointer)?);
        let len = u64::from(u32::from_le_bytes(*field(argument, len)?));
        (address != 0 && len != 0).then_some(Range { address, len })
    }

    /// Returns the descriptor in the argument, if there is one.
    pub fn fd_in(&self, argument: &[u8]) -> Option<i32> {
        let fd = i32::from_le_bytes(*field(argument, self.fd?)?);
        (fd >= 0).then_some(fd)
    }
}

/// Returns the length that a request encodes.
pub const fn encoded_len(request: u32) -> u32 {
    (request >> 16) & 0x3fff
}

fn field<const N: usize>(argument: &[u8], at: u32) -> Option<&[u8; N]> {
    argument.get(at as usize..)?.first_chunk()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_are_those_of_their_requests() {
        let any = CallShape {
            node: NodeKind::Rm,
            number: 0x2b,
            argument_bytes: None,
            block: None,
            fd: None,
        };
        let long = CallShape { argument_bytes: Some(48), ..any };
        let uvm = CallShape { node: NodeKind::Uvm, number: 33, argument_bytes: Some(9264), ..any };
        let (of_48, of_32) = (0xc030_462b, 0xc020_462b);
        assert!(any.is_of(NodeKind::Rm, of_48) && any.is_of(NodeKind::Rm, of_32));
        assert!(long.is_of(NodeKind::Rm, of_48) && !long.is_of(NodeKind::Rm, of_32));
        assert!(!any.is_of(NodeKind::Rm, 0xc030_462a) && !any.is_of(NodeKind::Uvm, 0x2b));
        assert!(uvm.is_of(NodeKind::Uvm, 33) && !uvm.is_of(NodeKind::Rm, 33));
        assert_eq!((any.argument_len(of_48), uvm.argument_len(33)), (48, 9264));
    }
}
