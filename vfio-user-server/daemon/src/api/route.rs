//! One route of the control API.

use axum::handler::Handler;
use axum::http::Method;
use axum::routing::{self, MethodRouter};

use super::Api;
use super::access::Level;

/// Method, path, level and handler.
///
/// The level is the permission that a client needs. A route with a level:
///
/// ```
/// use vgpud::api::access::Level;
/// use vgpud::api::route::Route;
///
/// async fn handler() {}
///
/// let route = Route::get("/v1/example", Level::Admin, handler);
/// assert_eq!(route.level, Level::Admin);
/// ```
///
/// A route without a level does not compile:
///
/// ```compile_fail,E0061
/// use vgpud::api::route::Route;
///
/// async fn handler() {}
///
/// let route = Route::get("/v1/example", handler);
/// ```
#[derive(Debug)]
pub struct Route {
    /// HTTP method. A `GET` route also serves `HEAD`.
    pub method: Method,
    /// Path with parameters in braces, as in OpenAPI.
    pub path: &'static str,
    /// Permission that the route needs.
    pub level: Level,
    /// Handler of this method.
    pub handler: MethodRouter<Api>,
}

impl Route {
    /// Creates a `GET` route.
    pub fn get<T: 'static>(
        path: &'static str,
        level: Level,
        handler: impl Handler<T, Api>,
    ) -> Self {
        Self { method: Method::GET, path, level, handler: routing::get(handler) }
    }

    /// Creates a `POST` route.
    pub fn post<T: 'static>(
        path: &'static str,
        level: Level,
        handler: impl Handler<T, Api>,
    ) -> Self {
        Self { method: Method::POST, path, level, handler: routing::post(handler) }
    }

    /// Creates a `PATCH` route.
    pub fn patch<T: 'static>(
        path: &'static str,
        level: Level,
        handler: impl Handler<T, Api>,
    ) -> Self {
        Self { method: Method::PATCH, path, level, handler: routing::patch(handler) }
    }

    /// Creates a `DELETE` route.
    pub fn delete<T: 'static>(
        path: &'static str,
        level: Level,
        handler: impl Handler<T, Api>,
    ) -> Self {
        Self { method: Method::DELETE, path, level, handler: routing::delete(handler) }
    }
}
