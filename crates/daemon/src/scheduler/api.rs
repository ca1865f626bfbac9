// SPDX-License-Identifier: Apache-2.0
//! Routes of the scheduler.

use super::{ScheduleChange, SchedulerReport};
use crate::api::{Answer, ApiState, Body};
use crate::control::ControlError;
use axum::{Json, extract::State};
use utoipa_axum::{router::OpenApiRouter, routes};

/// Path of the scheduler in the API.
pub const PATH: &str = "/v1/host/scheduler";

/// Its routes.
pub(crate) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(show_scheduler, change_scheduler, reset_scheduler))
}

/// The scheduler of background work: its settings, and what each class has got.
#[utoipa::path(get, path = "/v1/host/scheduler", responses(
    (status = 200, body = SchedulerReport),
    (status = 409, body = ControlError, description = "This process has none"),
))]
async fn show_scheduler(State(state): State<ApiState>) -> Answer<SchedulerReport> {
    Ok(Json(state.run(|control| control.scheduler()).await?))
}

/// Change the scheduler from its next cycle on; what is not given stays. It is kept over restarts.
#[utoipa::path(patch, path = "/v1/host/scheduler", request_body = ScheduleChange, responses(
    (status = 200, body = SchedulerReport),
    (status = 400, body = ControlError, description = "Makes no sense; nothing has changed"),
    (status = 409, body = ControlError, description = "This process has none"),
    (status = 500, body = ControlError, description = "Cannot be kept; nothing has changed"),
))]
async fn change_scheduler(
    State(state): State<ApiState>,
    Body(change): Body<ScheduleChange>,
) -> Answer<SchedulerReport> {
    let report = state
        .run(move |control| control.change_scheduler(&change))
        .await?;
    Ok(Json(report))
}

/// Return to the settings that the daemon was started with.
#[utoipa::path(delete, path = "/v1/host/scheduler", responses(
    (status = 200, body = SchedulerReport),
    (status = 409, body = ControlError, description = "This process has none"),
    (status = 500, body = ControlError, description = "Failed; nothing has changed"),
))]
async fn reset_scheduler(State(state): State<ApiState>) -> Answer<SchedulerReport> {
    Ok(Json(state.run(|control| control.reset_scheduler()).await?))
}
