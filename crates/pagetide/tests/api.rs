// SPDX-License-Identifier: Apache-2.0
//! The HTTP API against a fake system: each route answers by its own schema,
//! and no body makes it do anything but answer.

mod fake;

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use fake::{BROKEN_PID, NO_VMM_PID, PANIC_PID, Server};
use pagetide_daemon::api::{BODY_BYTES_MAX, openapi};
use serde_json::{Value, json};

/// Sends bytes as they are and returns status and body of the answer.
fn raw(server: &Server, method: &str, path: &str, body: &[u8]) -> (u16, String) {
    let mut stream = UnixStream::connect(&server.socket).unwrap();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    // The server may answer and close before it has read a body too large for it.
    if let Err(error) = stream.write_all(body) {
        eprintln!("the body was cut off: {error}");
    }
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    let body = if head.contains("transfer-encoding: chunked") {
        body.lines().step_by(2).skip(1).collect()
    } else {
        body.to_owned()
    };
    (status, body)
}

/// Sends JSON, or nothing for null, and reads JSON.
fn exchange(
    server: &Server,
    method: &str,
    path: &str,
    body: &serde_json::Value,
) -> (u16, serde_json::Value) {
    let body = if body.is_null() {
        String::new()
    } else {
        body.to_string()
    };
    let (status, body) = raw(server, method, path, body.as_bytes());
    let value = serde_json::from_str(&body).unwrap_or_else(|e| panic!("{e} in {body}"));
    (status, value)
}

/// What does not fit `schema` in `value`, by the parts of JSON Schema the document uses.
fn misfit(document: &Value, schema: &Value, value: &Value) -> Option<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        let target = document.pointer(reference.trim_start_matches('#'));
        return misfit(document, target.expect(reference), value);
    }
    if let Some(choices) = schema["oneOf"].as_array() {
        let fits = choices
            .iter()
            .any(|choice| misfit(document, choice, value).is_none());
        return (!fits).then(|| format!("{value} is none of {choices:?}"));
    }
    if let Some(words) = schema["enum"].as_array() {
        return (!words.contains(value)).then(|| format!("{value} is not in {words:?}"));
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(many) => many.iter().filter_map(Value::as_str).collect(),
        _ => return None,
    };
    let fits = types.iter().any(|name| match *name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "integer" => value.is_u64() || value.is_i64(),
        "number" => value.is_number(),
        "null" => value.is_null(),
        other => panic!("schema type {other}"),
    });
    if !fits {
        return Some(format!("{value} is no {types:?}"));
    }
    if let Some(items) = value.as_array() {
        return items
            .iter()
            .find_map(|item| misfit(document, &schema["items"], item));
    }
    let object = value.as_object()?;
    if let Some(required) = schema["required"].as_array() {
        for name in required.iter().filter_map(Value::as_str) {
            if !object.contains_key(name) {
                return Some(format!("{name} is missing"));
            }
        }
    }
    let properties = schema["properties"].as_object()?;
    object
        .iter()
        .find_map(|(name, part)| match properties.get(name) {
            Some(schema) => misfit(document, schema, part).map(|why| format!("{name}: {why}")),
            None => Some(format!("{name} is not in the schema")),
        })
}

type Step = (&'static str, &'static str, &'static str, Value);

/// Method, route, path and body of each step, good ones and refused ones.
fn steps() -> Vec<Step> {
    [
        device_steps(),
        vm_steps(),
        refused_steps(),
        log_steps(),
        host_steps(),
        background_steps(),
    ]
    .concat()
}

/// Pools and the scheduler of background work.
fn background_steps() -> Vec<Step> {
    let (pool, scheduler) = ("/v1/pool", "/v1/host/scheduler");
    vec![
        ("get", pool, pool, json!(null)),
        ("put", pool, pool, json!({"cap_bytes": 1 << 30})),
        ("put", pool, pool, json!({"cap_bytes": 0})),
        ("put", pool, pool, json!({"cap_bytes": null})),
        ("delete", pool, pool, json!(null)),
        ("get", scheduler, scheduler, json!(null)),
        ("patch", scheduler, scheduler, json!({"cycle_us": 1000})),
        ("patch", scheduler, scheduler, json!({"cycle_us": 0})),
        ("delete", scheduler, scheduler, json!(null)),
    ]
}

/// Steps that come to nothing: there is no detach to stop.
fn refused_steps() -> Vec<Step> {
    vec![(
        "delete",
        "/v1/vms/{name}/detach",
        "/v1/vms/a/detach",
        json!(null),
    )]
}

fn vm_steps() -> Vec<Step> {
    vec![
        (
            "post",
            "/v1/vms",
            "/v1/vms",
            json!({"pid": 4711, "name": "a"}),
        ),
        ("post", "/v1/vms", "/v1/vms", json!({"pid": NO_VMM_PID})),
        ("post", "/v1/vms", "/v1/vms", json!({"pid": BROKEN_PID})),
        ("post", "/v1/vms", "/v1/vms", json!({"pid": -1})),
        ("get", "/v1/vms", "/v1/vms", json!(null)),
        ("get", "/v1/vms/{name}", "/v1/vms/a", json!(null)),
        ("get", "/v1/vms/{name}", "/v1/vms/b", json!(null)),
        (
            "patch",
            "/v1/vms/{name}",
            "/v1/vms/a",
            json!({"limit_bytes": 1 << 28}),
        ),
        (
            "patch",
            "/v1/vms/{name}",
            "/v1/vms/a",
            json!({"limit_bytes": null}),
        ),
        (
            "patch",
            "/v1/vms/{name}",
            "/v1/vms/a",
            json!({"limit_bytes": 1}),
        ),
        (
            "put",
            "/v1/vms/{name}/protector",
            "/v1/vms/a/protector",
            json!({"policy": "adp:promote-after=2min"}),
        ),
        (
            "put",
            "/v1/vms/{name}/protector",
            "/v1/vms/a/protector",
            json!({"policy": "arc"}),
        ),
        (
            "put",
            "/v1/vms/{name}/protector",
            "/v1/vms/b/protector",
            json!({"policy": "none"}),
        ),
        (
            "post",
            "/v1/vms/{name}/reclaim",
            "/v1/vms/a/reclaim",
            json!({"bytes": 4096}),
        ),
        (
            "post",
            "/v1/vms/{name}/reclaim",
            "/v1/vms/b/reclaim",
            json!({}),
        ),
        ("get", "/v1/health", "/v1/health", json!(null)),
        ("get", "/openapi.json", "/openapi.json", json!(null)),
        ("delete", "/v1/vms/{name}", "/v1/vms/a", json!(null)),
        ("delete", "/v1/vms/{name}", "/v1/vms/a", json!(null)),
    ]
}

fn host_steps() -> Vec<Step> {
    let budget = "/v1/host/budget";
    let share = "/v1/vms/{name}/share";
    vec![
        ("get", "/v1/host", "/v1/host", json!(null)),
        ("put", budget, budget, json!({"low": "3%"})),
        (
            "put",
            budget,
            budget,
            json!({"budget_bytes": 1 << 30, "min": "1%", "high": "64M"}),
        ),
        ("put", budget, budget, json!({"budget_bytes": 1u64 << 40})),
        ("put", budget, budget, json!({"min": "0.25%"})),
        ("put", budget, budget, json!({"budget": 7})),
        (
            "post",
            "/v1/vms",
            "/v1/vms",
            json!({"pid": 4712, "name": "h", "weight": 50, "floor_bytes": 1 << 25}),
        ),
        (
            "put",
            share,
            "/v1/vms/h/share",
            json!({"weight": 200, "floor_bytes": 1 << 26, "ceiling_bytes": null}),
        ),
        ("put", share, "/v1/vms/h/share", json!({"weight": 0})),
        ("put", share, "/v1/vms/h/share", json!({"weight": -1})),
        ("put", share, "/v1/vms/none/share", json!({})),
        ("get", "/v1/host", "/v1/host", json!(null)),
        ("delete", budget, budget, json!(null)),
    ]
}

fn log_steps() -> Vec<Step> {
    vec![
        ("get", "/v1/log", "/v1/log", json!(null)),
        ("delete", "/v1/log", "/v1/log", json!(null)),
        ("post", "/v1/log", "/v1/log", json!({"dir": "here"})),
        (
            "post",
            "/v1/log",
            "/v1/log",
            json!({"dir": "/tmp", "seconds": 5}),
        ),
        ("post", "/v1/log", "/v1/log", json!({"dir": "/tmp"})),
        ("get", "/v1/log", "/v1/log", json!(null)),
        ("delete", "/v1/log", "/v1/log", json!(null)),
    ]
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn device_steps() -> Vec<Step> {
    let blk = json!({"socket": "/tmp/d.sock", "image": "/tmp/i"});
    vec![
        ("post", "/v1/devices", "/v1/devices", blk),
        (
            "post",
            "/v1/devices",
            "/v1/devices",
            json!({"socket": "x", "image": "/i"}),
        ),
        (
            "post",
            "/v1/devices/net",
            "/v1/devices/net",
            json!({"socket": "/tmp/n.sock", "link": {"tap": "tap0"}, "queues": 2}),
        ),
        (
            "post",
            "/v1/devices/net",
            "/v1/devices/net",
            json!({"socket": "x", "link": "null"}),
        ),
        ("get", "/v1/devices", "/v1/devices", json!(null)),
        (
            "put",
            "/v1/devices",
            "/v1/devices?socket=%2Ftmp%2Fd.sock",
            json!({"weight": 200}),
        ),
        (
            "put",
            "/v1/devices",
            "/v1/devices?socket=x",
            json!({"weight": 200}),
        ),
        ("get", "/v1/slo", "/v1/slo", json!(null)),
        (
            "get",
            "/v1/slo",
            "/v1/slo?device=%2Ftmp%2Fd.sock",
            json!(null),
        ),
        ("get", "/v1/slo", "/v1/slo?device=x", json!(null)),
        (
            "get",
            "/v1/injection",
            "/v1/injection?device=x",
            json!(null),
        ),
        ("get", "/v1/injection", "/v1/injection", json!(null)),
        (
            "post",
            "/v1/injection",
            "/v1/injection",
            json!({"device": "/tmp/d.sock", "rate": 1.5, "latency_us": 5000}),
        ),
        (
            "post",
            "/v1/injection",
            "/v1/injection",
            json!({"device": "/tmp/d.sock", "rate": 0, "latency_us": 5000}),
        ),
        (
            "post",
            "/v1/injection",
            "/v1/injection",
            json!({"device": "x", "rate": 1, "latency_us": 5000}),
        ),
        (
            "get",
            "/v1/injection",
            "/v1/injection?device=%2Ftmp%2Fd.sock",
            json!(null),
        ),
        (
            "delete",
            "/v1/injection",
            "/v1/injection?device=%2Ftmp%2Fd.sock",
            json!(null),
        ),
        (
            "delete",
            "/v1/devices",
            "/v1/devices?socket=%2Ftmp%2Fd.sock",
            json!(null),
        ),
        (
            "delete",
            "/v1/devices",
            "/v1/devices?socket=%2Ftmp%2Fd.sock",
            json!(null),
        ),
        ("delete", "/v1/devices", "/v1/devices", json!(null)),
        ("get", "/v1/upgrade", "/v1/upgrade", json!(null)),
        (
            "post",
            "/v1/upgrade",
            "/v1/upgrade",
            json!({"program": "/usr/bin/x"}),
        ),
    ]
}

#[test]
fn every_route_of_the_document_answers_by_its_schema() {
    let document: Value = serde_json::from_str(&openapi()).unwrap();
    let server = Server::start();
    let mut reached = BTreeSet::from([("get".to_owned(), "/metrics".to_owned())]);
    for (method, route, path, body) in steps() {
        let (status, answer) = exchange(&server, &method.to_uppercase(), path, &body);
        let responses = &document["paths"][route][method]["responses"];
        let content = &responses[status.to_string()]["content"]["application/json"];
        assert!(content.is_object(), "{method} {path}: {status} {answer}");
        let wrong = misfit(&document, &content["schema"], &answer);
        assert_eq!(wrong, None, "{method} {path}: {status} {answer}");
        reached.insert((method.to_owned(), route.to_owned()));
    }
    let (status, page) = raw(&server, "GET", "/metrics", b"");
    assert_eq!((status, page.ends_with("# EOF\n")), (200, true), "{page}");
    let declared: BTreeSet<_> = document["paths"]
        .as_object()
        .unwrap()
        .iter()
        .flat_map(|(path, item)| {
            let methods = item.as_object().unwrap().keys();
            methods.map(move |method| (method.clone(), path.clone()))
        })
        .collect();
    assert_eq!(reached, declared);
}

#[test]
fn hostile_body_is_answered_as_wrong_use() {
    let server = Server::start();
    let huge = vec![b'['; BODY_BYTES_MAX + 1];
    let deep = vec![b'['; 10_000];
    let bodies: [(&[u8], u16); 11] = [
        (b"", 400),
        (b"null", 400),
        (b"[]", 400),
        (b"{}", 400),
        (b"{\"pid\": \"4711\"}", 400),
        (b"{\"pid\": 99999999999}", 400),
        (b"{\"pid\": 1e3}", 400),
        (b"{\"pid\": 5, \"limit\": 3}", 400),
        (b"{\"pid\": 5, \"name\": \"\xff\xfe\"}", 400),
        (&deep, 400),
        (&huge, 413),
    ];
    for (body, expected) in bodies {
        let (status, answer) = raw(&server, "POST", "/v1/vms", body);
        let shown = String::from_utf8_lossy(&body[..body.len().min(60)]);
        assert_eq!(status, expected, "{shown}: {answer}");
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["kind"], "wrong-use", "{shown}: {answer}");
    }
    assert_eq!(
        exchange(&server, "GET", "/v1/vms", &Value::Null).1["vms"],
        json!([])
    );
}

#[test]
fn limit_that_is_not_given_lifts_nothing() {
    let server = Server::start();
    let attach = json!({"pid": 4711, "name": "a", "limit_bytes": 1 << 28});
    assert_eq!(exchange(&server, "POST", "/v1/vms", &attach).0, 201);
    assert_eq!(exchange(&server, "PATCH", "/v1/vms/a", &json!({})).0, 400);
    let vm = exchange(&server, "GET", "/v1/vms/a", &Value::Null).1;
    assert_eq!(vm["limit_bytes"], 1 << 28);
}

#[test]
fn name_that_cannot_be_one_is_wrong_use() {
    let server = Server::start();
    let long = "x".repeat(65);
    for name in ["", "a/b", "..", long.as_str()] {
        let (status, answer) =
            exchange(&server, "POST", "/v1/vms", &json!({"pid": 9, "name": name}));
        assert_eq!(
            (status, &answer["kind"]),
            (400, &json!("wrong-use")),
            "{name}"
        );
    }
    for path in ["/v1/vms/%ff", "/v1/vms/a%2Fb", "/v1/vms/%00"] {
        let (status, answer) = exchange(&server, "GET", path, &Value::Null);
        assert_eq!(
            (status, &answer["kind"]),
            (400, &json!("wrong-use")),
            "{path}"
        );
    }
}

#[test]
fn route_or_method_that_is_none_is_told_so_in_json() {
    let server = Server::start();
    let (status, answer) = exchange(&server, "GET", "/v2/vms", &Value::Null);
    assert_eq!((status, &answer["kind"]), (404, &json!("not-found")));
    let (status, answer) = exchange(&server, "PUT", "/v1/vms", &Value::Null);
    assert_eq!((status, &answer["kind"]), (405, &json!("wrong-use")));
}

#[test]
fn panic_in_the_system_is_answered_and_the_api_lives_on() {
    let server = Server::start();
    let (status, answer) = exchange(
        &server,
        "POST",
        "/v1/vms",
        &json!({"pid": PANIC_PID, "name": "p"}),
    );
    assert_eq!(
        (status, &answer["kind"]),
        (500, &json!("failed")),
        "{answer}"
    );
    assert_eq!(exchange(&server, "GET", "/v1/health", &Value::Null).0, 200);
}
