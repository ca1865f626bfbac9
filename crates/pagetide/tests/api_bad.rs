// SPDX-License-Identifier: Apache-2.0
//! Clients of the HTTP API that are slow or wrong: none keeps others from being answered, and each answer is one
//! that the document has.

mod fake;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use fake::Server;
use pagetide_daemon::api::{BODY_BYTES_MAX, BODY_WAIT, HEAD_WAIT, openapi};
use serde_json::Value;

/// Longer than any bound of the server's.
fn patience() -> Duration {
    (HEAD_WAIT + BODY_WAIT) * 3
}

fn connect(server: &Server) -> UnixStream {
    let stream = UnixStream::connect(&server.socket).unwrap();
    stream.set_read_timeout(Some(patience())).unwrap();
    stream
}

/// What comes until the server closes; an error if it does not.
fn rest(mut stream: UnixStream) -> std::io::Result<String> {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => {}
        // Closed with bytes of ours unread.
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {}
        Err(error) => return Err(error),
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Status and body.
fn ask(server: &Server, method: &str, path: &str, body: &[u8]) -> (u16, String) {
    let mut stream = connect(server);
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).unwrap();
    if let Err(error) = stream.write_all(body) {
        eprintln!("the body was cut off: {error}");
    }
    let answer = rest(stream).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    let status = head.split(' ').nth(1).map(str::parse);
    match status {
        Some(Ok(status)) => (status, body.to_owned()),
        _ => panic!("{method} {path}: no answer but '{answer}'"),
    }
}

const HALF_BODY: &[u8] =
    b"POST /v1/vms HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{\"pid\":";

#[test]
fn body_that_does_not_come_is_answered_with_408_and_the_connection_is_closed() {
    let server = Server::start();
    let mut stream = connect(&server);
    stream.write_all(HALF_BODY).unwrap();
    let answer = rest(stream).expect("an end");
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    assert_eq!(
        serde_json::from_str::<Value>(body).unwrap()["kind"],
        "wrong-use"
    );
}

#[test]
fn head_that_does_not_come_and_connection_that_rests_are_closed() {
    let server = Server::start();
    // All at once: each waits for as long as the server does.
    let begun = [
        b"GET /v1/health HTTP/1.1\r\nhost: x\r\nx-slow: ".as_slice(),
        b"",
        b"G",
        b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n",
    ]
    .map(|sent| {
        let mut stream = connect(&server);
        stream.write_all(sent).unwrap();
        stream
    });
    let [.., answered] = begun.map(|stream| rest(stream).expect("an end"));
    assert!(answered.starts_with("HTTP/1.1 200 "), "{answered}");
}

#[test]
fn thousand_half_requests_keep_nobody_out_and_all_of_them_end() {
    const CLIENTS: usize = 1000;
    if let Err(why) = pagetide_daemon::files::raise_limit() {
        panic!("{why}");
    }
    let server = Server::start();
    let mut halves = Vec::new();
    for number in 0..CLIENTS {
        let mut stream = connect(&server);
        let sent: &[u8] = [b"GET /v1/hea".as_slice(), HALF_BODY][number % 2];
        // One that was closed already to make room for others.
        if let Err(error) = stream.write_all(sent) {
            assert_eq!(error.kind(), std::io::ErrorKind::BrokenPipe, "{error}");
        }
        halves.push(stream);
        if number % 100 == 99 {
            assert_eq!(ask(&server, "GET", "/v1/health", b"").0, 200);
        }
    }
    for stream in halves {
        rest(stream).expect("an end");
    }
    assert_eq!(ask(&server, "GET", "/v1/health", b"").0, 200);
}

const METHODS: [&str; 5] = ["get", "put", "post", "delete", "patch"];

fn paths_of(route: &str) -> Vec<String> {
    let names = ["nobody", "%ff", "a%2Fb", "%00", "..", &"x".repeat(65)];
    let queries = [
        "",
        "?x=1",
        "?device=%ff&socket=%ff",
        "?device=&socket=",
        "?device=x&socket=x",
    ];
    let mut paths = Vec::new();
    for name in names {
        for query in queries {
            paths.push(format!("{}{query}", route.replace("{name}", name)));
        }
        if !route.contains("{name}") {
            break;
        }
    }
    paths
}

/// What is wrong with an answer, by the document.
fn wrong(document: &Value, route: &str, method: &str, answer: &(u16, String)) -> Option<String> {
    let (status, body) = answer;
    let operation = &document["paths"][route][method];
    if operation.is_object() && operation["responses"][status.to_string()].is_null() {
        return Some(format!("{status} is not in the document"));
    }
    // A body that is too long is refused before it is looked who takes it.
    if !operation.is_object() && ![405, 413].contains(status) {
        return Some(format!("{status} for a method that the document has not"));
    }
    if *status < 400 {
        return None;
    }
    let error: Value = match serde_json::from_str(body) {
        Ok(error) => error,
        Err(why) => {
            return Some(format!(
                "{status} with a body that is no JSON: {why}: '{body}'"
            ));
        }
    };
    let keys: Vec<&str> = error
        .as_object()
        .map(|fields| fields.keys().map(String::as_str).collect())
        .unwrap_or_default();
    (keys != ["kind", "message"]).then(|| format!("{status} with {body}"))
}

#[test]
fn every_answer_to_bad_input_is_in_the_document_and_errors_have_one_shape() {
    let document: Value = serde_json::from_str(&openapi()).unwrap();
    let server = Server::start();
    let huge = vec![b'['; BODY_BYTES_MAX + 1];
    let bodies: [&[u8]; 8] = [
        b"",
        b"null",
        b"{",
        b"[1]",
        b"{}",
        b"{\"x\": 1}",
        b"\xff\xfe",
        &huge,
    ];
    let mut wrongs = Vec::new();
    let mut asked = 0;
    for route in document["paths"].as_object().unwrap().keys() {
        for method in METHODS {
            for path in paths_of(route) {
                for body in bodies {
                    let answer = ask(&server, &method.to_uppercase(), &path, body);
                    asked += 1;
                    if let Some(why) = wrong(&document, route, method, &answer) {
                        let shown =
                            String::from_utf8_lossy(&body[..body.len().min(20)]).into_owned();
                        wrongs.push(format!("{method} {path} '{shown}': {why}"));
                    }
                }
            }
        }
    }
    assert!(asked > 1_000, "{asked}");
    assert!(
        wrongs.is_empty(),
        "{} of {asked}:\n{}",
        wrongs.len(),
        wrongs.join("\n")
    );
}

#[test]
fn daemon_that_says_nothing_is_told_of_after_a_while() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("api.sock");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let client =
        pagetide_daemon::client::Client::new(&path).with_ask_wait(Duration::from_millis(200));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let asked = client.ask::<Value>(hyper::Method::GET, "/v1/health");
    let error = runtime.block_on(asked).unwrap_err();
    assert!(error.to_string().contains("SIGSTOP"), "{error}");
}
