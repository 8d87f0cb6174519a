//! The control API's paths, and the description of them.

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use utoipa::OpenApi;

use super::access::{self, Guard, Rules};
use super::request::{no_such_method, no_such_path};
use super::service::Api;
use super::{consoles, parents, schedulers, screens, statistics, vgpus};

/// Longest request body. A definition is a few hundred bytes.
const MAX_BODY: usize = 64 << 10;

/// The description of the API, as docs/openapi.json has it.
#[derive(Debug, OpenApi)]
#[openapi(
    info(
        title = "Tessera control API",
        description = "HTTP/1.1 with JSON on vgpud's UNIX socket, <run-dir>/control.sock.",
    ),
    paths(
        parents::version,
        parents::parents,
        parents::types,
        vgpus::list,
        vgpus::create,
        vgpus::show,
        vgpus::modify,
        vgpus::undefine,
        vgpus::start,
        vgpus::stop,
        vgpus::picture,
        screens::focus,
        screens::rotate,
        consoles::open,
        consoles::web,
        statistics::stats,
        schedulers::schedulers,
        schedulers::scheduler,
        schedulers::modify_scheduler,
        schedulers::scheduler_log,
        statistics::metrics_text
    )
)]
struct Description;

/// docs/openapi.json.
pub fn openapi() -> String {
    // It is made of strings, lists and maps with string keys: nothing in it can fail to be written.
    let mut text = Description::openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// The service that answers on the control socket, to those who may ask.
pub fn router(api: Api, rules: Rules) -> Router {
    Router::new()
        .route("/v1/version", get(parents::version))
        .route("/v1/parents", get(parents::parents))
        .route("/v1/parents/{parent}/rotation", post(screens::rotate))
        .route("/v1/types", get(parents::types))
        .route("/v1/vgpus", get(vgpus::list).post(vgpus::create))
        .route("/v1/vgpus/{uuid}", get(vgpus::show).patch(vgpus::modify).delete(vgpus::undefine))
        .route("/v1/vgpus/{uuid}/start", post(vgpus::start))
        .route("/v1/vgpus/{uuid}/stop", post(vgpus::stop))
        .route("/v1/vgpus/{uuid}/screenshot", get(vgpus::picture))
        .route("/v1/vgpus/{uuid}/focus", post(screens::focus))
        .route("/v1/vgpus/{uuid}/console", post(consoles::open))
        .route("/v1/web", post(consoles::web))
        .route("/v1/stats", get(statistics::stats))
        .route("/v1/schedulers", get(schedulers::schedulers))
        .route(
            "/v1/schedulers/{parent}",
            get(schedulers::scheduler).patch(schedulers::modify_scheduler),
        )
        .route("/v1/schedulers/{parent}/log", get(schedulers::scheduler_log))
        .route("/metrics", get(statistics::metrics_text))
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .layer(from_fn_with_state(Guard::new(rules), access::check))
        .with_state(api)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `UPDATE_GOLDEN=1 cargo test -p vfio-user-server openapi` writes it anew.
    #[test]
    fn openapi_file_is_current() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/openapi.json");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(path, openapi()).unwrap();
        }
        let file = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            file == openapi(),
            "docs/openapi.json is not current: UPDATE_GOLDEN=1 cargo test -p vfio-user-server openapi"
        );
    }
}
