//! Request extractors and error responses, shared by the control API and the web console.

use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use mdev_core::ids::VgpuId;
use serde::de::DeserializeOwned;

use vgpud_api::{ErrorBody, ErrorCode, ErrorDetail};

/// Limit of the time in which the body of a request arrives.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Result of a handler. The error becomes an [`ErrorBody`].
pub type HttpResult<T> = Result<T, HttpError>;

/// Error as an HTTP response.
#[derive(Debug)]
pub struct HttpError(pub ErrorDetail);

impl From<ErrorDetail> for HttpError {
    fn from(error: ErrorDetail) -> Self {
        Self(error)
    }
}

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.code.status());
        let status = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        (status, Json(ErrorBody { error: self.0 })).into_response()
    }
}

/// JSON body. An empty body is the type's default.
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, state: &S) -> HttpResult<Self> {
        let body = tokio::time::timeout(BODY_TIMEOUT, Bytes::from_request(request, state)).await;
        let body = body.map_err(|_| {
            let message = "Cannot read the request: its body does not arrive";
            ErrorDetail::new(ErrorCode::Invalid, message)
        })?;
        let bytes = body.map_err(|error| {
            let code = match error.status() {
                StatusCode::PAYLOAD_TOO_LARGE => ErrorCode::TooLarge,
                _ => ErrorCode::Invalid,
            };
            ErrorDetail::new(code, format!("Cannot read the request: {}", error.body_text()))
        })?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        let value = serde_json::from_slice(&bytes).map_err(|error| {
            ErrorDetail::new(ErrorCode::Invalid, format!("Cannot parse the request: {error}"))
        })?;
        Ok(Self(value))
    }
}

/// Path parameter that is the UUID of a vGPU.
#[derive(Debug)]
pub struct VgpuPath(pub VgpuId);

impl<S: Send + Sync> FromRequestParts<S> for VgpuPath {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> HttpResult<Self> {
        let invalid = |message: String| ErrorDetail::new(ErrorCode::Invalid, message);
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|error| invalid(error.body_text()))?;
        Ok(text.parse().map(Self).map_err(|_| invalid(format!("{text:?} is not a UUID")))?)
    }
}
