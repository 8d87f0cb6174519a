//! Error codes and messages.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Body of every error response.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorDetail,
}

/// Error code and message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorDetail {
    /// Machine-readable code.
    pub code: ErrorCode,
    /// Human-readable message: the problem and its remedy, in one line.
    pub message: String,
}

impl ErrorDetail {
    /// Creates an error. Line breaks in `message` become spaces.
    pub fn new(code: ErrorCode, message: impl fmt::Display) -> Self {
        // Messages of the operating system or of a library can have several lines.
        Self { code, message: message.to_string().replace('\n', " ") }
    }
}

impl fmt::Display for ErrorDetail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ErrorDetail {}

/// Machine-readable error code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ErrorCode {
    /// 400: malformed request or invalid value.
    Invalid,
    /// 403: this user lacks the permission.
    Forbidden,
    /// 404: no such vGPU, parent, type or path.
    NotFound,
    /// 405: the path does not support this method.
    MethodNotAllowed,
    /// 409: already exists.
    Exists,
    /// 409: not possible in the current state (already running, not running, not defined).
    Conflict,
    /// 409: a VM uses the vGPU.
    InUse,
    /// 409: the parent has no room for another vGPU.
    NoRoom,
    /// 409: a callout script refuses.
    Callout,
    /// 413: the request body is too long.
    TooLarge,
    /// 503: the GPU or the worker does not answer.
    Unavailable,
    /// 500: a bug in vgpud, or a failure of the host such as a full disk.
    Internal,
}

impl ErrorCode {
    /// Returns the HTTP status of this code.
    pub fn status(self) -> u16 {
        match self {
            Self::Invalid => 400,
            Self::Forbidden => 403,
            Self::NotFound => 404,
            Self::MethodNotAllowed => 405,
            Self::Exists | Self::Conflict | Self::InUse | Self::NoRoom | Self::Callout => 409,
            Self::TooLarge => 413,
            Self::Internal => 500,
            Self::Unavailable => 503,
        }
    }
}
