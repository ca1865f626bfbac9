// SPDX-License-Identifier: Apache-2.0
//! Routes of the host's budget, and of a VM's share of it.

use super::message::{Body, VmName};
use super::{Answer, ApiState};
use crate::budget::{BudgetBody, HostReport, ShareChange};
use crate::control::{ControlError, VmReport};
use axum::Json;
use axum::extract::State;

/// The host's memory, its budget and how that is divided.
#[utoipa::path(get, path = "/v1/host", responses(
    (status = 200, body = HostReport),
    (status = 409, body = ControlError, description = "This process has no VMs"),
))]
pub(super) async fn show_host(State(state): State<ApiState>) -> Answer<HostReport> {
    Ok(Json(state.run(|control| control.host()).await?))
}

/// Set the host's budget, or change parts of what is set. It is kept over restarts of the daemon.
#[utoipa::path(put, path = "/v1/host/budget", request_body = BudgetBody, responses(
    (status = 200, body = HostReport),
    (status = 400, body = ControlError, description = "Contradicts itself, the host or the floors of VMs; nothing has changed"),
    (status = 409, body = ControlError, description = "Another daemon of this host has a budget, or there is none to change"),
    (status = 500, body = ControlError, description = "Could not be written down; nothing has changed"),
))]
pub(super) async fn set_budget(
    State(state): State<ApiState>,
    Body(body): Body<BudgetBody>,
) -> Answer<HostReport> {
    let report = state.run(move |control| control.set_budget(&body)).await?;
    Ok(Json(report))
}

/// Lift the budget: each VM is kept to its own limit only.
#[utoipa::path(delete, path = "/v1/host/budget", responses(
    (status = 200, body = HostReport),
    (status = 500, body = ControlError, description = "Could not be written down; nothing has changed"),
))]
pub(super) async fn lift_budget(State(state): State<ApiState>) -> Answer<HostReport> {
    Ok(Json(state.run(|control| control.lift_budget()).await?))
}

/// Change weight, floor and ceiling of a VM. They are kept over restarts of the daemon.
#[utoipa::path(
    put, path = "/v1/vms/{name}/share", params(("name" = String, Path)), request_body = ShareChange,
    responses(
        (status = 200, body = VmReport),
        (status = 400, body = ControlError, description = "Contradicts itself, the VM's RAM or the budget; nothing has changed"),
        (status = 404, body = ControlError),
        (status = 409, body = ControlError),
        (status = 500, body = ControlError, description = "Could not be written down; nothing has changed"),
    )
)]
pub(super) async fn set_share(
    State(state): State<ApiState>,
    VmName(name): VmName,
    Body(body): Body<ShareChange>,
) -> Answer<VmReport> {
    let report = state
        .run(move |control| control.set_share(&name, &body))
        .await?;
    Ok(Json(report))
}
