// SPDX-License-Identifier: Apache-2.0
//! Answers that a route gives whatever it is about, in the OpenAPI document.

use utoipa::openapi::path::{Operation, PathItem};
use utoipa::openapi::{ContentBuilder, OpenApi, Ref, RefOr, Response, ResponseBuilder};

/// Of every route.
const OF_ALL: [(&str, &str); 3] = [
    ("408", "The body did not come in time"),
    ("413", "The body is too long"),
    ("500", "Failed; the daemon's log says more"),
];
/// Of a route with a name in its path, a query, or a body.
const OF_INPUT: (&str, &str) = ("400", "Makes no sense, or the body cannot be read");
/// Of a route about VMs or devices: these may be in a state, or in a process, in which it cannot be done.
const OF_STATE: (&str, &str) = ("409", "Refused, with the reason");
/// Of a route that names one.
const OF_NAMES: (&str, &str) = ("404", "There is none of that name");

/// Adds to each route what it does not say itself.
pub(super) fn add_common_answers(document: &mut OpenApi) {
    for (path, item) in &mut document.paths.paths {
        for operation in operations(item) {
            let has_input = operation.parameters.is_some() || operation.request_body.is_some();
            let mut answers = OF_ALL.to_vec();
            // A GET may have a body too, and it may be cut off.
            answers.push(OF_INPUT);
            if path.starts_with("/v1/") && path != "/v1/health" {
                answers.push(OF_STATE);
                if has_input {
                    answers.push(OF_NAMES);
                }
            }
            for (status, description) in answers {
                let responses = &mut operation.responses.responses;
                responses
                    .entry(status.to_owned())
                    .or_insert_with(|| RefOr::T(error(description)));
            }
        }
    }
}

fn operations(item: &mut PathItem) -> impl Iterator<Item = &mut Operation> {
    [
        &mut item.get,
        &mut item.put,
        &mut item.post,
        &mut item.delete,
        &mut item.patch,
    ]
    .into_iter()
    .flatten()
}

fn error(description: &str) -> Response {
    let schema = Ref::from_schema_name("ControlError");
    let content = ContentBuilder::new().schema(Some(schema)).build();
    ResponseBuilder::new()
        .description(description)
        .content("application/json", content)
        .build()
}
