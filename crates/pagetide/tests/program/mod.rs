// SPDX-License-Identifier: Apache-2.0
//! The program, run to its end.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// Runs the program in `dir`: status, stdout, stderr.
pub fn pagetide(dir: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output {
        status,
        stdout,
        stderr,
    } = Command::new(env!("CARGO_BIN_EXE_pagetide"))
        .args(arguments)
        .current_dir(dir)
        .output()
        .unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (status.code(), text(stdout), text(stderr))
}

/// The object that the program prints; it must succeed.
pub fn report(dir: &Path, arguments: &[&str]) -> Value {
    let (status, out, err) = pagetide(dir, arguments);
    assert_eq!(status, Some(0), "{err}");
    serde_json::from_str(&out).unwrap()
}
