//! Request extractors and error responses, shared by the control API and the web console.

use std::time::Duration;

use axum::Json;
use axum::body::{Body, Bytes};
use axum::extract::{FromRef, FromRequest, FromRequestParts, Path, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use mdev_core::definition::VgpuRef;
use mdev_core::ids::VgpuId;
use serde::de::DeserializeOwned;

use crate::service::Service;
use crate::vgpu_names;
use vgpud_api::{ErrorBody, ErrorCode, ErrorDetail};

/// Limit of the time in which the body of a request arrives.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest request body, in bytes. A definition has a few hundred.
const MAX_BODY: usize = 64 << 10;
/// Part of a longer body that is read, in bytes. A client that is still sending when the connection
/// closes gets a reset instead of the answer.
const MAX_DISCARDED: usize = 1 << 20;

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
        let error = ErrorDetail::new(self.0.code, vgpu_names::annotated(&self.0.message));
        (status, Json(ErrorBody { error })).into_response()
    }
}

/// JSON body. An empty body is the type's default.
#[derive(Debug)]
pub struct JsonBody<T>(pub T);

impl<T: DeserializeOwned + Default, S: Send + Sync> FromRequest<S> for JsonBody<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, _: &S) -> HttpResult<Self> {
        let read = tokio::time::timeout(BODY_TIMEOUT, read_body(request.into_body()));
        let bytes = read.await.map_err(|_| {
            let message = "Cannot read the request: its body does not arrive";
            ErrorDetail::new(ErrorCode::Invalid, message)
        })??;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        let value = serde_json::from_slice(&bytes).map_err(|error| {
            ErrorDetail::new(ErrorCode::Invalid, format!("Cannot parse the request: {error}"))
        })?;
        Ok(Self(value))
    }
}

async fn read_body(mut body: Body) -> Result<Bytes, ErrorDetail> {
    let error = match Limited::new(&mut body, MAX_BODY).collect().await {
        Ok(collected) => return Ok(collected.to_bytes()),
        Err(error) => error,
    };
    if !error.is::<LengthLimitError>() {
        let message = format!("Cannot read the request: {error}");
        return Err(ErrorDetail::new(ErrorCode::Invalid, message));
    }
    let mut rest = Limited::new(body, MAX_DISCARDED);
    while let Some(Ok(_)) = rest.frame().await {}
    let message =
        format!("Cannot read the request: its body is over the limit of {MAX_BODY} bytes");
    Err(ErrorDetail::new(ErrorCode::TooLarge, message))
}

/// Path parameter that is the UUID or the name of a vGPU, resolved to the UUID.
#[derive(Debug)]
pub struct VgpuPath(pub VgpuId);

impl<S: Send + Sync> FromRequestParts<S> for VgpuPath
where
    Service: FromRef<S>,
{
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> HttpResult<Self> {
        let invalid = |message: String| ErrorDetail::new(ErrorCode::Invalid, message);
        let Path(text) = Path::<String>::from_request_parts(parts, state)
            .await
            .map_err(|error| invalid(error.body_text()))?;
        match text.parse() {
            Ok(VgpuRef::Id(id)) => Ok(Self(id)),
            Ok(VgpuRef::Name(name)) => {
                let service = Service::from_ref(state);
                Ok(Self(service.call(move |manager| manager.named(&name)).await?))
            }
            Err(_) => Err(invalid(format!("{text:?} is neither a UUID nor a name")).into()),
        }
    }
}
