//! Queries about the GPU that the driver answers for CUDA programs.
//!
//! Only commands whose row has [`ask`](nvidia_rm::table::Row::ask) reach the driver, with
//! parameters of exactly the length of the tested series. They change nothing, and their parameters
//! hold neither pointers nor handles.

use nvidia_rm::controls;
use nvidia_rm::numbers::status;
use nvidia_rm::table::find;

use super::device::Device;

/// Classes of the objects that commands are for, in their upper half.
const CLIENT: u32 = 0;
const DEVICE: u32 = 0x80;

/// Answers a query in `params`. Returns the driver's status, or `None` for other commands.
pub fn query(device: &Device, command: u32, params: &mut [u8]) -> Option<u32> {
    let form = find(controls::ROWS, command)?.asked()?;
    if params.len() != form.bytes {
        return None;
    }
    if form.route.is_some_and(|at| names_channel(&params[at..])) {
        return Some(status::INVALID_ARGUMENT);
    }
    let done = match command >> 16 {
        CLIENT => device.rm_client.control_root_bytes(command, params),
        DEVICE => device.device.control_bytes(command, params),
        _ => device.subdevice.control_bytes(command, params),
    };
    match done {
        Ok(()) => Some(0),
        Err(error) => {
            log::debug!("{error}");
            error.status()
        }
    }
}

/// Returns whether a route to the graphics engine names a channel, by a handle
/// (`NV2080_CTRL_GR_ROUTE_INFO_FLAGS_TYPE_CHANNEL`). A vGPU has one such engine.
fn names_channel(route: &[u8]) -> bool {
    const TYPE: u8 = 3;
    route.first().is_some_and(|flags| flags & TYPE > 1)
}
