//! How physical GPUs' time is divided.

use axum::Json;
use axum::extract::{Path, State};

use super::model::{ModifyScheduler, Scheduler, SchedulerDecision};
use super::request::{Body, Refusal};
use super::service::Api;
use crate::manager::Result;

/// How the time of every physical GPU is divided.
#[utoipa::path(get, path = "/v1/schedulers", responses(
    (status = 200, body = Vec<Scheduler>, description = "All of them"),
    Refusal,
))]
pub async fn schedulers(State(api): State<Api>) -> Result<Json<Vec<Scheduler>>> {
    Ok(Json(api.read(|manager| manager.schedulers()).await?))
}

/// How a physical GPU's time is divided.
#[utoipa::path(get, path = "/v1/schedulers/{parent}", params(("parent" = String, Path)), responses(
    (status = 200, body = Scheduler, description = "The scheduler as it is now"),
    Refusal,
))]
pub async fn scheduler(
    State(api): State<Api>,
    Path(parent): Path<String>,
) -> Result<Json<Scheduler>> {
    Ok(Json(api.ask(move |manager| manager.scheduler(&parent)).await?))
}

/// Changes how a physical GPU's time is divided, at once and for later managers.
#[utoipa::path(
    patch,
    path = "/v1/schedulers/{parent}",
    params(("parent" = String, Path)),
    request_body = ModifyScheduler,
    responses(
        (status = 200, body = Scheduler, description = "The scheduler as it is now"),
        Refusal,
    )
)]
pub async fn modify_scheduler(
    State(api): State<Api>,
    Path(parent): Path<String>,
    Body(change): Body<ModifyScheduler>,
) -> Result<Json<Scheduler>> {
    Ok(Json(api.ask(move |manager| manager.modify_scheduler(&parent, &change)).await?))
}

/// The last decisions of a scheduler, oldest first.
#[utoipa::path(get, path = "/v1/schedulers/{parent}/log", params(("parent" = String, Path)), responses(
    (status = 200, body = Vec<SchedulerDecision>, description = "All that are kept"),
    Refusal,
))]
pub async fn scheduler_log(
    State(api): State<Api>,
    Path(parent): Path<String>,
) -> Result<Json<Vec<SchedulerDecision>>> {
    Ok(Json(api.ask(move |manager| manager.scheduler_log(&parent)).await?))
}
