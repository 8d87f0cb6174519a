//! The web console: all vGPUs on a page, on this host alone.
//!
//! A server of its own on loopback, beside the control API's, because whoever can reach it need not be allowed anything:
//! every user of the host can, and so can every page in an operator's browser. What it shows takes a session, which
//! begins with a ticket that `vgpuctl web` gets on the control socket. In reading order:
//!
//! * [`access`]: tickets, sessions, and which requests are looked at at all
//! * [`history`]: what was measured over the last minutes, and what happened
//! * [`screen`]: thumbnails, and a screen on a WebSocket
//! * [`server`]: the paths; the page itself is in `page/`

pub mod access;
pub mod history;
pub mod screen;
pub mod server;
