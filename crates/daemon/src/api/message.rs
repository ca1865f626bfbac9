// SPDX-License-Identifier: Apache-2.0
//! Messages of the HTTP API beside the reports, and how they are read and sent.
//!
//! Whatever a client sends, the answer is JSON: a report, or `{kind, message}`
//! with a status that follows from the kind. A body is read whole up to
//! [`BODY_BYTES_MAX`], must be UTF-8 JSON, and may hold no unknown field.

use axum::body::Bytes;
use axum::extract::{FromRequest, FromRequestParts, Request};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

use crate::control::{ControlError, DeviceReport, ErrorKind, VmReport};
use crate::name::check_name;
use crate::protection::ProtectorChoice;

/// Largest request body: the longest sensible one has two paths of 4 KiB.
pub const BODY_BYTES_MAX: usize = 64 << 10;

/// Take over a VM.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachBody {
    /// Process id of the VMM.
    pub pid: u32,
    /// Name for the VM; without one the VMM's `-name`, else `vm-PID`.
    #[serde(default)]
    pub name: Option<String>,
    /// Limit on resident RAM: its ceiling under a budget.
    #[serde(default)]
    pub limit_bytes: Option<u64>,
    /// Its share of the host's budget beside the weights of other VMs, 1 to 10000.
    #[serde(default)]
    pub weight: Option<u32>,
    /// It may always have this much of the host's budget resident.
    #[serde(default)]
    pub floor_bytes: Option<u64>,
}

/// Set or lift a limit.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitBody {
    /// Limit on resident RAM; null lifts it. Must be there: an empty object lifts nothing.
    #[serde(deserialize_with = "present")]
    #[schema(required)]
    pub limit_bytes: Option<u64>,
}

/// Without this serde reads a field that is not there as null.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    Option::deserialize(deserializer)
}

/// Protect what devices are about to touch by another policy.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ProtectorBody {
    /// The policy: none, lru or adp, with parameters such as `adp:promote-after=120s`.
    #[schema(value_type = String)]
    pub policy: ProtectorChoice,
}

/// Evict now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReclaimBody {
    /// Bytes to evict; without them all that can go.
    #[serde(default)]
    pub bytes: Option<u64>,
}

/// Change the cap of the pools.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CapBody {
    /// Most memory that all pools may take; null lifts the cap. Must be there.
    #[serde(deserialize_with = "present")]
    #[schema(required)]
    pub cap_bytes: Option<u64>,
}

/// Every VM.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct VmList {
    /// By name.
    pub vms: Vec<VmReport>,
}

/// Every device.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct DeviceList {
    /// By socket.
    pub devices: Vec<DeviceReport>,
}

/// Change a device's share of the engines.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WeightBody {
    /// From 1 to 1000; among devices that have work, each gets what its weight is of the sum.
    pub weight: u32,
}

/// The device a request is about.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct DeviceSocket {
    /// Socket of the device, absolute.
    pub socket: String,
}

/// The device a request is about, by its socket or its serial number.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct DeviceNamed {
    /// Socket of the device, absolute, or its serial number if no other has that.
    pub device: String,
}

/// The device a request is about, by its socket or its serial number; all without one.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct DeviceOrAll {
    /// Socket of the device, absolute, or its serial number if no other has that.
    #[serde(default)]
    pub device: Option<String>,
}

/// The daemon lives.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// Version of the daemon.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Time since its start.
    pub uptime_seconds: u64,
    /// VMs it has.
    pub vms: usize,
    /// Devices it has.
    pub devices: usize,
}

/// A [`ControlError`] on its way out; keeps the status of HTTP's own errors.
pub struct Failure {
    status: StatusCode,
    error: ControlError,
}

impl Failure {
    /// With a status that HTTP has a word for.
    pub fn new(status: StatusCode, error: ControlError) -> Self {
        Self { status, error }
    }
}

impl From<ControlError> for Failure {
    fn from(error: ControlError) -> Self {
        let status = match error.kind {
            ErrorKind::WrongUse => StatusCode::BAD_REQUEST,
            ErrorKind::NotFound => StatusCode::NOT_FOUND,
            ErrorKind::Refused => StatusCode::CONFLICT,
            ErrorKind::Failed => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self { status, error }
    }
}

impl IntoResponse for Failure {
    fn into_response(self) -> Response {
        (self.status, axum::Json(self.error)).into_response()
    }
}

/// A JSON body, whatever content type it claims to have.
pub struct Body<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequest<S> for Body<T> {
    type Rejection = Failure;

    async fn from_request(request: Request, state: &S) -> Result<Self, Failure> {
        let bytes = Bytes::from_request(request, state).await.map_err(|why| {
            let error = ControlError::wrong_use(format!(
                "the body cannot be read: {}; at most {BODY_BYTES_MAX} bytes are taken",
                why.body_text()
            ));
            Failure::new(why.status(), error)
        })?;
        serde_json::from_slice(&bytes).map(Self).map_err(|why| {
            ControlError::wrong_use(format!(
                "the body is not the JSON this route takes: {why}; see /openapi.json"
            ))
            .into()
        })
    }
}

/// The query of a URL.
pub struct Query<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for Query<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match axum::extract::Query::<T>::from_request_parts(parts, state).await {
            Ok(axum::extract::Query(query)) => Ok(Self(query)),
            Err(why) => Err(ControlError::wrong_use(format!(
                "the query is not the one this route takes: {}; see /openapi.json",
                why.body_text()
            ))
            .into()),
        }
    }
}

/// The VM that the path names.
pub struct VmName(pub String);

impl<S: Send + Sync> FromRequestParts<S> for VmName {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        match axum::extract::Path::<String>::from_request_parts(parts, state).await {
            Ok(axum::extract::Path(name)) => {
                check_name(&name)?;
                Ok(Self(name))
            }
            Err(why) => Err(ControlError::wrong_use(format!(
                "the path names no VM: {}",
                why.body_text()
            ))
            .into()),
        }
    }
}
