//! Checks that hold for every device behind a vfio-user socket. Each takes the socket's path,
//! connects any number of times, and leaves the server ready for the next client.

mod greeting;
mod interrupts;
mod memory;
mod migration;
mod queries;
mod regions;
mod stream;

use std::path::Path;

const CONFIG: u32 = 7;
const MSI: u32 = 1;
const FREE: u64 = 0x70_0000_0000;

/// Name and function of a check.
type Check = (&'static str, fn(&Path));

pub const ALL: &[Check] = &[
    ("version comes first, once, and is checked", greeting::version),
    ("a version reply fits the request and offers no more than was asked", greeting::version_reply),
    ("short payloads are refused", queries::short_payloads),
    ("argsz rules of device, region and interrupt info", queries::infos),
    ("region capabilities wait for room", queries::capabilities),
    ("region accesses stay within their region", regions::accesses),
    ("several writes in one message", regions::write_multi),
    ("DMA maps", memory::dma),
    ("interrupt commands", interrupts::interrupts),
    ("every kind of interrupt, in each data type and action", interrupts::each_kind),
    ("what does not exist is not supported", queries::unknown),
    ("device features", queries::features),
    ("migration states and data", migration::migration),
    ("logged writes and bitmaps", memory::logging),
    ("a second socket where it is asked for", greeting::twin),
    ("posted requests are not answered", stream::posted),
    ("replies and unknown message types do no harm", stream::replies),
    ("bytes may dribble in", stream::dribble),
    ("requests may be pipelined", stream::pipeline),
    ("impossible sizes end the connection, and no more", stream::framing),
    ("superfluous descriptors", stream::descriptors),
    ("a client may leave within any message", stream::leave),
    ("a client that does not read stalls itself alone", stream::flood),
    ("reset", memory::reset),
];
