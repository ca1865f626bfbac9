// SPDX-License-Identifier: Apache-2.0
//! What a command, or a request to the API, is refused with.

use crate::daemon::Daemon;
use serde_json::{Value, json};
use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
};

/// A request: method, path, body.
pub type Request<'a> = (&'a str, &'a str, Value);

/// The same by a command and by the API: one sentence with `part` in it.
pub fn refuses_both(daemon: &Daemon, words: &[&str], request: &Request<'_>, part: &str) {
    refuses(daemon, words, part);
    let (status, error) = ask(daemon, request);
    assert_eq!(status, 400, "{request:?}: {error}");
    assert_eq!(error["kind"], json!("wrong-use"), "{request:?}: {error}");
    let told = error["message"].as_str().unwrap();
    assert!(told.contains(part), "{request:?}: {told}");
}

/// Status and body.
fn ask(daemon: &Daemon, (method, path, body): &Request<'_>) -> (u16, Value) {
    let mut stream = UnixStream::connect(daemon.socket()).unwrap();
    let body = body.to_string();
    let head = format!("{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n");
    let length = format!("content-length: {}\r\n\r\n", body.len());
    stream
        .write_all((head + &length + &body).as_bytes())
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, serde_json::from_str(body).unwrap())
}

/// Status 2 and one sentence with `part` in it.
pub fn refuses(daemon: &Daemon, words: &[&str], part: &str) {
    let output = daemon.client(words);
    let told = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{words:?}: {told}");
    assert!(output.stdout.is_empty(), "{words:?}: {:?}", output.stdout);
    assert!(told.contains(part), "{words:?}: {told}");
    assert!(!told.contains("panicked"), "{words:?}: {told}");
}
