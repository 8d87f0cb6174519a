//! The web console: all vGPUs on a page, served on a loopback address.
//!
//! The web console has its own HTTP server, separate from the control API's, because every user of
//! the host and every page in an operator's browser can connect to it. All data needs a session. A
//! session begins with a ticket, which `vgpuctl web` gets on the control socket. In reading order:
//!
//! * [`sessions`]: tickets and sessions
//! * [`request_guard`]: check of the headers `Host` and `Origin`; security headers of responses
//! * [`history`]: measurements and events of the last minutes
//! * [`live_screen`]: a vGPU's screen on a WebSocket
//! * [`server`]: the routes; the page itself is in `page/`

pub mod history;
pub mod live_screen;
pub mod request_guard;
pub mod server;
pub mod sessions;
