// SPDX-License-Identifier: Apache-2.0
//! The HTTP API: routes over [`Control`], and their OpenAPI document.
//!
//! A route is declared once, at its function: `utoipa_axum` takes path and
//! method for the router and for the document from the same attribute, so
//! neither can have one that the other has not.
//!
//! [`Control`] blocks, so each call runs on a thread of the runtime's blocking
//! pool. A panic there ends in an answer of kind `failed`, not in a lost
//! connection.
//!
//! What any route may answer besides its own (a body that does not come, or is too long; a
//! panic) is added to the document for all of them at once, in `document`.

mod budget;
mod calls;
mod document;
mod message;
mod net;
mod server;
mod socket;

pub(crate) use calls::Calls;
pub use message::{
    AttachBody, BODY_BYTES_MAX, CapBody, DeviceList, DeviceNamed, DeviceOrAll, DeviceSocket,
    Health, LimitBody, ProtectorBody, ReclaimBody, VmList, WeightBody,
};
pub(crate) use server::Peer;
pub use server::{BODY_WAIT, CONNECTIONS_MAX, HEAD_WAIT, serve};
pub use socket::{ApiSocket, SocketError};

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::control::{
    AttachRequest, BlkRequest, Control, ControlError, DetachReport, DeviceReport, ReclaimReport,
    VmReport,
};
use crate::injection::{InjectionReport, InjectionRequest};
use crate::metrics;
use crate::name::{check_name, default_name};
use crate::pool::{NO_POOLS, NewCap, PoolReport};
use crate::protection::recording::{RecordingReport, RecordingRequest};
use crate::scheduler;
use crate::slo::SloList;
use crate::upgrade::{self, Upgrades};
pub(crate) use message::{Body, Failure};
use message::{Query, VmName};

/// What a route's function gets to work with.
#[derive(Clone)]
pub(crate) struct ApiState {
    control: Arc<dyn Control>,
    upgrades: Option<Upgrades>,
    calls: Calls,
    started: Instant,
}

impl ApiState {
    /// Live upgrades, where this process can be upgraded.
    pub(crate) fn upgrades(&self) -> Option<&Upgrades> {
        self.upgrades.as_ref()
    }

    /// Runs `work` where it may block.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&dyn Control) -> Result<T, ControlError> + Send + 'static,
    ) -> Result<T, Failure> {
        let control = Arc::clone(&self.control);
        match self.calls.run(move || work(control.as_ref())).await {
            Ok(outcome) => outcome.map_err(Failure::from),
            Err(gone) => Err(ControlError::failed(format!(
                "the daemon has a bug: the request died ({gone}); see its log and report it"
            ))
            .into()),
        }
    }
}

/// A route's answer.
pub(crate) type Answer<T> = Result<Json<T>, Failure>;

#[derive(OpenApi)]
#[openapi(
    info(
        title = "Pagetide",
        description = "Control of a Pagetide daemon, over HTTP on its Unix socket. An error is always a \
                       ControlError: also 404 for a path that is no route, and 405 for a method that a route does not \
                       take. Only what is not HTTP, or a head that is too long, is answered without a body.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    ),
    components(schemas(ControlError))
)]
struct Document;

/// Router of the API over `control`, of a process that is not upgraded in place.
pub fn router(control: Arc<dyn Control>) -> Router {
    router_with(control, None, Calls::default())
}

/// Router of the API over `control`, whose work counts in `calls`.
pub(crate) fn router_with(
    control: Arc<dyn Control>,
    upgrades: Option<Upgrades>,
    calls: Calls,
) -> Router {
    let state = ApiState {
        control,
        upgrades,
        calls,
        started: Instant::now(),
    };
    routes_and_document()
        .0
        .layer(axum::middleware::from_fn(server::take_body))
        .with_state(state)
}

/// The OpenAPI document as text.
#[must_use]
pub fn openapi() -> String {
    let mut text = match routes_and_document().1.to_pretty_json() {
        Ok(text) => text,
        Err(error) => unreachable!("a document made from types is JSON: {error}"),
    };
    text.push('\n');
    text
}

fn routes_and_document() -> (Router<ApiState>, utoipa::openapi::OpenApi) {
    let (router, mut document) = OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(list_vms, attach))
        .routes(routes!(show_vm, set_limit, detach))
        .routes(routes!(stop_detach))
        .routes(routes!(reclaim))
        .routes(routes!(budget::set_share))
        .routes(routes!(budget::show_host))
        .routes(routes!(budget::set_budget, budget::lift_budget))
        .routes(routes!(set_protector))
        .routes(routes!(show_pool, set_pool_cap, reset_pool_cap))
        .routes(routes!(list_devices, add_device, set_weight, remove_device))
        .routes(routes!(net::add_net))
        .routes(routes!(slo))
        .routes(routes!(inject, show_injection, stop_injection))
        .routes(routes!(start_recording, show_recording, stop_recording))
        .merge(scheduler::api::routes())
        .merge(upgrade::api::routes())
        .routes(routes!(health))
        .routes(routes!(metrics_page))
        .routes(routes!(document_page))
        .split_for_parts();
    document::add_common_answers(&mut document);
    let router = router
        .fallback(no_route)
        .method_not_allowed_fallback(no_method);
    (router, document)
}

async fn no_route(uri: axum::http::Uri) -> Failure {
    ControlError::not_found(format!(
        "there is no route {}; see /openapi.json",
        uri.path()
    ))
    .into()
}

async fn no_method(method: axum::http::Method, uri: axum::http::Uri) -> Failure {
    Failure::new(
        StatusCode::METHOD_NOT_ALLOWED,
        ControlError::wrong_use(format!(
            "{} does not take {method}; see /openapi.json",
            uri.path()
        )),
    )
}

/// Every VM.
#[utoipa::path(get, path = "/v1/vms", responses((status = 200, body = VmList)))]
async fn list_vms(State(state): State<ApiState>) -> Answer<VmList> {
    let vms = state.run(|control| Ok(control.vms())).await?;
    Ok(Json(VmList { vms }))
}

/// Take over the RAM of a running VMM.
#[utoipa::path(post, path = "/v1/vms", request_body = AttachBody, responses(
    (status = 201, body = VmReport),
    (status = 400, body = ControlError, description = "Makes no sense"),
    (status = 409, body = ControlError, description = "Refused, with the reason"),
    (status = 500, body = ControlError, description = "Failed"),
))]
async fn attach(
    State(state): State<ApiState>,
    Body(body): Body<AttachBody>,
) -> Result<(StatusCode, Json<VmReport>), Failure> {
    let report = state
        .run(move |control| {
            let name = body.name.unwrap_or_else(|| default_name(body.pid));
            check_name(&name)?;
            control.attach(AttachRequest {
                pid: body.pid,
                name,
                limit_bytes: body.limit_bytes,
                weight: body.weight,
                floor_bytes: body.floor_bytes,
            })
        })
        .await?;
    Ok((StatusCode::CREATED, Json(report)))
}

/// One VM.
#[utoipa::path(get, path = "/v1/vms/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = VmReport),
    (status = 404, body = ControlError),
))]
async fn show_vm(State(state): State<ApiState>, VmName(name): VmName) -> Answer<VmReport> {
    let report = state.run(move |control| control.vm(&name)).await?;
    Ok(Json(report))
}

/// Set or lift the limit of a VM.
#[utoipa::path(
    patch, path = "/v1/vms/{name}", params(("name" = String, Path)), request_body = LimitBody,
    responses(
        (status = 200, body = VmReport),
        (status = 400, body = ControlError, description = "No limit a VM can live with"),
        (status = 404, body = ControlError),
    )
)]
async fn set_limit(
    State(state): State<ApiState>,
    VmName(name): VmName,
    Body(body): Body<LimitBody>,
) -> Answer<VmReport> {
    let report = state
        .run(move |control| control.set_limit(&name, body.limit_bytes))
        .await?;
    Ok(Json(report))
}

/// Swap in all pages of the VM, then release it.
#[utoipa::path(delete, path = "/v1/vms/{name}", params(("name" = String, Path)), responses(
    (status = 200, body = DetachReport),
    (status = 404, body = ControlError),
    (status = 409, body = ControlError),
    (status = 500, body = ControlError, description = "Still attached"),
))]
async fn detach(State(state): State<ApiState>, VmName(name): VmName) -> Answer<DetachReport> {
    let report = state.run(move |control| control.detach(&name)).await?;
    Ok(Json(report))
}

/// Stop a detach that is under way: it is answered with 409, and the VM is served as before.
#[utoipa::path(delete, path = "/v1/vms/{name}/detach", params(("name" = String, Path)), responses(
    (status = 200, body = VmReport, description = "It will stop, unless it has brought every page back"),
    (status = 404, body = ControlError),
    (status = 409, body = ControlError, description = "No detach is under way"),
))]
async fn stop_detach(State(state): State<ApiState>, VmName(name): VmName) -> Answer<VmReport> {
    let report = state.run(move |control| control.stop_detach(&name)).await?;
    Ok(Json(report))
}

/// Evict pages of a VM now, coldest first.
#[utoipa::path(
    post, path = "/v1/vms/{name}/reclaim", params(("name" = String, Path)),
    request_body = ReclaimBody,
    responses(
        (status = 200, body = ReclaimReport),
        (status = 404, body = ControlError),
        (status = 409, body = ControlError, description = "Eviction is barred, with the reason"),
    )
)]
async fn reclaim(
    State(state): State<ApiState>,
    VmName(name): VmName,
    Body(body): Body<ReclaimBody>,
) -> Answer<ReclaimReport> {
    let report = state
        .run(move |control| control.reclaim(&name, body.bytes))
        .await?;
    Ok(Json(report))
}

/// Change the policy that protects what devices of a VM are about to touch; what the old one had learnt is lost.
#[utoipa::path(
    put, path = "/v1/vms/{name}/protector", params(("name" = String, Path)),
    request_body = ProtectorBody,
    responses(
        (status = 200, body = VmReport),
        (status = 400, body = ControlError, description = "No such policy, or no such parameter"),
        (status = 404, body = ControlError),
    )
)]
async fn set_protector(
    State(state): State<ApiState>,
    VmName(name): VmName,
    Body(body): Body<ProtectorBody>,
) -> Answer<VmReport> {
    let report = state
        .run(move |control| control.set_protector(&name, body.policy))
        .await?;
    Ok(Json(report))
}

/// What the pools of all VMs take.
#[utoipa::path(get, path = "/v1/pool", responses(
    (status = 200, body = PoolReport),
    (status = 404, body = ControlError, description = "A DPU process has none"),
))]
async fn show_pool(State(state): State<ApiState>) -> Answer<PoolReport> {
    let no_pools = || ControlError::not_found(NO_POOLS.to_owned());
    let report = state.run(move |control| control.pool().ok_or_else(no_pools));
    Ok(Json(report.await?))
}

/// Set or lift the cap of all pools, which is kept.
#[utoipa::path(put, path = "/v1/pool", request_body = CapBody, responses(
    (status = 200, body = PoolReport),
    (status = 400, body = ControlError, description = "No cap that can work"),
    (status = 404, body = ControlError, description = "A DPU process has none"),
    (status = 500, body = ControlError, description = "It cannot be kept"),
))]
async fn set_pool_cap(
    State(state): State<ApiState>,
    Body(body): Body<CapBody>,
) -> Answer<PoolReport> {
    let cap = body.cap_bytes.map_or(NewCap::None, NewCap::Bytes);
    let report = state.run(move |control| control.set_pool_cap(cap)).await?;
    Ok(Json(report))
}

/// Let the setting be the cap of all pools again.
#[utoipa::path(delete, path = "/v1/pool", responses(
    (status = 200, body = PoolReport),
    (status = 404, body = ControlError, description = "A DPU process has none"),
    (status = 500, body = ControlError, description = "What was set cannot be removed"),
))]
async fn reset_pool_cap(State(state): State<ApiState>) -> Answer<PoolReport> {
    let report = state.run(|control| control.set_pool_cap(NewCap::Default));
    Ok(Json(report.await?))
}

/// Every device.
#[utoipa::path(get, path = "/v1/devices", responses((status = 200, body = DeviceList)))]
async fn list_devices(State(state): State<ApiState>) -> Answer<DeviceList> {
    let devices = state.run(|control| Ok(control.devices())).await?;
    Ok(Json(DeviceList { devices }))
}

/// Serve an image as a vhost-user-blk device.
#[utoipa::path(post, path = "/v1/devices", request_body = BlkRequest, responses(
    (status = 201, body = DeviceReport),
    (status = 400, body = ControlError, description = "Makes no sense"),
    (status = 409, body = ControlError, description = "Socket or image is taken"),
    (status = 500, body = ControlError, description = "Failed"),
))]
async fn add_device(
    State(state): State<ApiState>,
    Body(request): Body<BlkRequest>,
) -> Result<(StatusCode, Json<DeviceReport>), Failure> {
    let report = state
        .run(move |control| {
            check_absolute("socket", &request.socket)?;
            check_absolute("image", &request.image)?;
            control.add_blk(request)
        })
        .await?;
    Ok((StatusCode::CREATED, Json(report)))
}

/// Change a device's share of the engines, which is kept.
#[utoipa::path(put, path = "/v1/devices", params(DeviceSocket), request_body = WeightBody, responses(
    (status = 200, body = DeviceReport),
    (status = 400, body = ControlError, description = "No such weight"),
    (status = 404, body = ControlError),
    (status = 500, body = ControlError, description = "Failed"),
))]
async fn set_weight(
    State(state): State<ApiState>,
    Query(device): Query<DeviceSocket>,
    Body(body): Body<WeightBody>,
) -> Answer<DeviceReport> {
    let socket = PathBuf::from(&device.socket);
    let report = state
        .run(move |control| control.set_weight(&socket, body.weight))
        .await?;
    Ok(Json(report))
}

/// Drain and remove a device.
#[utoipa::path(delete, path = "/v1/devices", params(DeviceSocket), responses(
    (status = 200, body = DeviceSocket, description = "Removed"),
    (status = 400, body = ControlError),
    (status = 404, body = ControlError),
))]
async fn remove_device(
    State(state): State<ApiState>,
    Query(device): Query<DeviceSocket>,
) -> Answer<DeviceSocket> {
    let socket = PathBuf::from(&device.socket);
    state
        .run(move |control| control.remove_device(&socket))
        .await?;
    Ok(Json(device))
}

/// Accounts of service levels, by the sockets of the devices.
#[utoipa::path(get, path = "/v1/slo", params(DeviceOrAll), responses(
    (status = 200, body = SloList),
    (status = 400, body = ControlError, description = "The serial number is of several devices"),
    (status = 404, body = ControlError),
))]
async fn slo(
    State(state): State<ApiState>,
    Query(DeviceOrAll { device }): Query<DeviceOrAll>,
) -> Answer<SloList> {
    let list = state
        .run(move |control| control.slo(device.as_deref()))
        .await?;
    Ok(Json(list))
}

/// Let requests of a live device fault from now on; replaces an injection that goes on there.
#[utoipa::path(post, path = "/v1/injection", request_body = InjectionRequest, responses(
    (status = 202, body = InjectionReport),
    (status = 400, body = ControlError, description = "Makes no sense"),
    (status = 404, body = ControlError),
))]
async fn inject(
    State(state): State<ApiState>,
    Body(request): Body<InjectionRequest>,
) -> Result<(StatusCode, Json<InjectionReport>), Failure> {
    let report = state.run(move |control| control.inject(request)).await?;
    Ok((StatusCode::ACCEPTED, Json(report)))
}

/// How far the last injection into a device is.
#[utoipa::path(get, path = "/v1/injection", params(DeviceNamed), responses(
    (status = 200, body = InjectionReport),
    (status = 400, body = ControlError),
    (status = 404, body = ControlError, description = "No such device, or nothing was injected"),
))]
async fn show_injection(
    State(state): State<ApiState>,
    Query(DeviceNamed { device }): Query<DeviceNamed>,
) -> Answer<InjectionReport> {
    let report = state.run(move |control| control.injection(&device)).await?;
    Ok(Json(report))
}

/// End the injection into a device.
#[utoipa::path(delete, path = "/v1/injection", params(DeviceNamed), responses(
    (status = 200, body = InjectionReport, description = "It is over"),
    (status = 400, body = ControlError),
    (status = 404, body = ControlError, description = "No such device, or nothing was injected"),
))]
async fn stop_injection(
    State(state): State<ApiState>,
    Query(DeviceNamed { device }): Query<DeviceNamed>,
) -> Answer<InjectionReport> {
    let report = state
        .run(move |control| control.stop_injection(&device))
        .await?;
    Ok(Json(report))
}

/// Record what DMA of attached VMs touches, as files.
#[utoipa::path(post, path = "/v1/log", request_body = RecordingRequest, responses(
    (status = 202, body = RecordingReport),
    (status = 400, body = ControlError, description = "Makes no sense"),
    (status = 404, body = ControlError, description = "No such device"),
    (status = 409, body = ControlError, description = "Something is being recorded, or there is no such directory"),
))]
async fn start_recording(
    State(state): State<ApiState>,
    Body(request): Body<RecordingRequest>,
) -> Result<(StatusCode, Json<RecordingReport>), Failure> {
    let report = state
        .run(move |control| control.start_recording(request))
        .await?;
    Ok((StatusCode::ACCEPTED, Json(report)))
}

/// How far the last recording is.
#[utoipa::path(get, path = "/v1/log", responses(
    (status = 200, body = RecordingReport),
    (status = 404, body = ControlError, description = "Nothing was recorded"),
))]
async fn show_recording(State(state): State<ApiState>) -> Answer<RecordingReport> {
    Ok(Json(state.run(|control| control.recording()).await?))
}

/// End the recording and complete its files.
#[utoipa::path(delete, path = "/v1/log", responses(
    (status = 200, body = RecordingReport, description = "It is over"),
    (status = 404, body = ControlError, description = "Nothing was recorded"),
))]
async fn stop_recording(State(state): State<ApiState>) -> Answer<RecordingReport> {
    Ok(Json(state.run(|control| control.stop_recording()).await?))
}

/// A path of the client means nothing in the daemon's working directory.
pub(crate) fn check_absolute(what: &str, path: &Path) -> Result<(), ControlError> {
    if path.is_absolute() {
        Ok(())
    } else {
        Err(ControlError::wrong_use(format!(
            "the {what} '{}' is not an absolute path: write it from /",
            path.display()
        )))
    }
}

/// The daemon lives.
#[utoipa::path(get, path = "/v1/health", responses((status = 200, body = Health)))]
async fn health(State(state): State<ApiState>) -> Answer<Health> {
    let uptime_seconds = state.started.elapsed().as_secs();
    let health = state
        .run(move |control| {
            Ok(Health {
                version: env!("CARGO_PKG_VERSION").to_owned(),
                pid: std::process::id(),
                uptime_seconds,
                vms: control.vms().len(),
                devices: control.devices().len(),
            })
        })
        .await?;
    Ok(Json(health))
}

/// Figures for Prometheus, as `OpenMetrics` text.
#[utoipa::path(get, path = "/metrics", responses(
    (status = 200, body = String, content_type = "application/openmetrics-text"),
))]
async fn metrics_page(State(state): State<ApiState>) -> Result<Response, Failure> {
    let page = state
        .run(|control| {
            let pools = control.pool().into_iter().collect();
            let classes = control
                .scheduler()
                .map_or(Vec::new(), |report| report.classes);
            let reports = metrics::Reports {
                host: control.host().ok(),
                vms: control.vms(),
                devices: control.devices(),
                pools,
                slo: control.slo(None)?,
                classes,
            };
            metrics::page(reports)
                .map_err(|error| ControlError::failed(format!("no metrics page: {error}")))
        })
        .await?;
    Ok(([(header::CONTENT_TYPE, metrics::CONTENT_TYPE)], page).into_response())
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", responses(
    (status = 200, body = Object, content_type = "application/json"),
))]
async fn document_page() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], openapi()).into_response()
}
