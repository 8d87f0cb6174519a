//! The control API: HTTP/1.1 with JSON on a UNIX socket.
//!
//! * [`routes`]: the table of routes, and the descriptions of them in docs/openapi.json
//! * [`route`]: one route: method, path, level, handler and documentation
//! * [`router`]: the routes as an HTTP service, behind the access check
//! * [`listener`]: connections of the control socket; `file_receiver`: files that come with
//!   requests
//! * [`access`]: permissions by the user of a connection
//! * [`openapi`]: the OpenAPI document
//! * `parents`, `schedulers`, `statistics`, `vgpus`, `saving`, `screens`, `consoles`:
//!   handlers
//! * [`metrics`]: the statistics in Prometheus' text format

use std::sync::Arc;

use axum::extract::FromRef;

use crate::service::Service;
use crate::web_console::sessions::Sessions;

pub mod access;
mod consoles;
mod file_receiver;
pub mod listener;
pub mod metrics;
pub mod openapi;
mod parents;

pub mod route;
pub mod router;
mod routes;
mod saving;
mod schedulers;
mod screens;
mod statistics;
mod vgpus;

pub use routes::routes;

/// State of the control API's handlers.
#[derive(Clone, Debug)]
pub struct Api {
    /// Operations on vGPUs.
    pub service: Service,
    /// Sessions of the web console, if the manager serves one.
    pub web_sessions: Option<Arc<Sessions>>,
}

impl FromRef<Api> for Service {
    fn from_ref(api: &Api) -> Self {
        api.service.clone()
    }
}
