//! The HTTP service on the control socket: the routes behind the access check.

use axum::Router;
use axum::extract::Request;
use axum::handler::Handler;
use axum::middleware::from_fn_with_state;

use super::Api;
use super::access::{self, Guard, Rules};
use super::routes::routes;
use crate::http::HttpError;
use vgpud_api::{ErrorCode, ErrorDetail};

/// Returns the service, which checks each request against `rules` before its handler runs.
pub fn router(api: Api, rules: Rules) -> Router {
    let guard = Guard::new(rules);
    let mut router = Router::new();
    for route in routes() {
        let check = from_fn_with_state(guard.for_route(route.level), access::check);
        router = router.route(route.path, route.handler.route_layer(check));
    }
    let check = from_fn_with_state(guard.for_other_requests(), access::check);
    router
        .fallback(no_such_path.layer(check.clone()))
        .method_not_allowed_fallback(no_such_method.layer(check))
        .with_state(api)
}

async fn no_such_path(request: Request) -> HttpError {
    let path = request.uri().path();
    HttpError(ErrorDetail::new(
        ErrorCode::NotFound,
        format!("There is no {path:?} in this API; see docs/openapi.json"),
    ))
}

async fn no_such_method(request: Request) -> HttpError {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("{path:?} does not support {method}; see docs/openapi.json");
    HttpError(ErrorDetail::new(ErrorCode::MethodNotAllowed, message))
}
