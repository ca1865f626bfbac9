// SPDX-License-Identifier: Apache-2.0
//! The route by which network devices are added.

use super::{Answer, ApiState, Body, check_absolute};
use crate::control::{ControlError, DeviceReport, NetRequest};
use axum::{Json, extract::State, http::StatusCode};

/// Serve a vhost-user-net device.
#[utoipa::path(post, path = "/v1/devices/net", request_body = NetRequest, responses(
    (status = 201, body = DeviceReport),
    (status = 400, body = ControlError, description = "Makes no sense"),
    (status = 409, body = ControlError, description = "Socket or link is taken, or there is no such interface"),
    (status = 500, body = ControlError, description = "Failed"),
))]
pub(super) async fn add_net(
    State(state): State<ApiState>,
    Body(request): Body<NetRequest>,
) -> Result<(StatusCode, Json<DeviceReport>), super::Failure> {
    let report: Answer<DeviceReport> = state
        .run(move |control| {
            check_absolute("socket", &request.socket)?;
            control.add_net(request)
        })
        .await
        .map(Json);
    Ok((StatusCode::CREATED, report?))
}
