//! Handlers for schedulers.

use axum::Json;
use axum::extract::{Path, State};

use crate::http::{HttpResult, JsonBody};
use crate::service::Service;
use vgpud_api::{ModifyScheduler, Scheduler, SchedulerDecision};

pub async fn schedulers(State(service): State<Service>) -> HttpResult<Json<Vec<Scheduler>>> {
    Ok(Json(service.query(|manager| manager.schedulers()).await?))
}

pub async fn scheduler(
    State(service): State<Service>,
    Path(parent): Path<String>,
) -> HttpResult<Json<Scheduler>> {
    Ok(Json(service.call(move |manager| manager.scheduler(&parent)).await?))
}

pub async fn modify_scheduler(
    State(service): State<Service>,
    Path(parent): Path<String>,
    JsonBody(change): JsonBody<ModifyScheduler>,
) -> HttpResult<Json<Scheduler>> {
    Ok(Json(service.call(move |manager| manager.modify_scheduler(&parent, &change)).await?))
}

pub async fn scheduler_log(
    State(service): State<Service>,
    Path(parent): Path<String>,
) -> HttpResult<Json<Vec<SchedulerDecision>>> {
    Ok(Json(service.call(move |manager| manager.scheduler_log(&parent)).await?))
}
