//! Blocking work on the I/O runtime's blocking threads.

use vgpud_api::{ErrorCode, ErrorDetail};

/// Runs `body` on a thread that may block, and returns its result. A panic of `body` becomes an
/// internal error.
pub async fn run<T: Send + 'static>(
    body: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ErrorDetail> {
    tokio::task::spawn_blocking(body)
        .await
        .map_err(|error| ErrorDetail::new(ErrorCode::Internal, error))
}
