// SPDX-License-Identifier: Apache-2.0
//! Routes of live upgrades.
//!
//! A program that becomes the daemon can do everything that root can, so only root may name one: the group that
//! may use the API otherwise may not. The kernel says whose the connection is.

use super::{UpgradeReport, Upgrades};
use crate::{
    api::{Answer, ApiState, Body, Failure, Peer},
    control::ControlError,
};
use axum::{Extension, Json, extract::State, http::StatusCode};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use utoipa::ToSchema;
use utoipa_axum::{router::OpenApiRouter, routes};

/// Path of upgrades in the API.
pub(crate) const PATH: &str = "/v1/upgrade";

/// Replace the daemon by another program.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeBody {
    /// The program, absolute and without symbolic links.
    #[schema(value_type = String)]
    pub program: PathBuf,
}

/// Its routes.
pub(crate) fn routes() -> OpenApiRouter<ApiState> {
    OpenApiRouter::new().routes(routes!(show_upgrade, upgrade))
}

fn upgrades_of(state: &ApiState) -> Result<&Upgrades, ControlError> {
    state.upgrades().ok_or_else(|| {
        ControlError::refused(
            "this process is not upgraded while it runs: name the socket of a `pagetide run` with --api",
        )
    })
}

/// How the last upgrade came out.
#[utoipa::path(get, path = "/v1/upgrade", responses(
    (status = 200, body = UpgradeReport),
    (status = 409, body = ControlError, description = "This process is not upgraded while it runs"),
))]
async fn show_upgrade(State(state): State<ApiState>) -> Answer<UpgradeReport> {
    Ok(Json(upgrades_of(&state)?.report()))
}

/// Replace the daemon by another program while its VMs and disks run. Only root may ask.
#[utoipa::path(post, path = "/v1/upgrade", request_body = UpgradeBody, responses(
    (status = 202, body = UpgradeReport, description = "The program is ready and takes over: ask for the outcome"),
    (status = 409, body = ControlError, description = "Refused, with the reason; nothing has happened"),
    (status = 500, body = ControlError, description = "The program has failed; nothing has happened"),
))]
async fn upgrade(
    State(state): State<ApiState>,
    peer: Option<Extension<Peer>>,
    Body(body): Body<UpgradeBody>,
) -> Result<(StatusCode, Json<UpgradeReport>), Failure> {
    let upgrades = upgrades_of(&state)?;
    check_is_root(peer.map(|Extension(peer)| peer))?;
    let report = upgrades.order(body.program).await?;
    Ok((StatusCode::ACCEPTED, Json(report)))
}

fn check_is_root(peer: Option<Peer>) -> Result<(), ControlError> {
    match peer.and_then(|peer| peer.uid) {
        Some(0) => Ok(()),
        Some(uid) => Err(ControlError::refused(format!(
            "only root may name a program that becomes the daemon, and this request comes from user {uid}"
        ))),
        None => Err(ControlError::refused(
            "only root may name a program that becomes the daemon, and whose this request is cannot be told",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_root_may_ask() {
        assert_eq!(check_is_root(Some(Peer { uid: Some(0) })), Ok(()));
        let other = check_is_root(Some(Peer { uid: Some(1000) })).unwrap_err();
        assert!(other.message.contains("user 1000"), "{other}");
        assert!(check_is_root(Some(Peer { uid: None })).is_err());
        assert!(check_is_root(None).is_err());
    }
}
