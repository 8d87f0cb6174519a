//! Shapes of ioctl arguments, for the transport.

use cuda_socket::CallShape;
use cuda_socket::calls::NodeKind;

use super::uvm::lengths;
use crate::nvidia::sys::numbers::{escape, uvm};
use crate::nvidia::version::Layout;

/// Returns the shapes of all arguments with pointers or descriptors, and of nvidia-uvm's.
pub fn shapes(layout: &Layout) -> Vec<CallShape> {
    let rm = |number, block, fd| CallShape {
        node: NodeKind::Rm,
        number,
        argument_bytes: None,
        block,
        fd,
    };
    let mut shapes = vec![
        rm(escape::CONTROL, Some((16, 24)), None),
        rm(escape::ALLOC_MEMORY, None, Some(48)),
        rm(escape::MAP_MEMORY, None, Some(48)),
        rm(escape::REGISTER_FD, None, Some(0)),
        rm(escape::ALLOC_OS_EVENT, None, Some(8)),
        rm(escape::FREE_OS_EVENT, None, Some(8)),
    ];
    shapes.extend(lengths(layout).map(|(number, bytes)| CallShape {
        node: NodeKind::Uvm,
        number,
        argument_bytes: Some(bytes),
        block: None,
        fd: match number {
            uvm::REGISTER_GPU_VASPACE | uvm::REGISTER_CHANNEL => Some(16),
            uvm::REGISTER_GPU => Some(24),
            uvm::MAP_EXTERNAL => Some(bytes - 16),
            uvm::MM_INITIALIZE => Some(0),
            _ => None,
        },
    }));
    shapes
}
