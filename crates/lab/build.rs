// SPDX-License-Identifier: Apache-2.0
//! Tells the program which commit it is built from, for the provenance of
//! results: its name, with `-dirty` behind it if what the program is made of was
//! changed since. Outside a checkout, or without git, it is not told.
//!
//! Only a release is told: else each commit and each change of any crate would compile this again, and all tests
//! of programs with it.
//!
//! A commit alone does not say what a program does; results are also marked with
//! the hash of the program itself.

use std::path::Path;
use std::process::Command;

/// What the program is made of, from the top of the checkout.
const SOURCES: [&str; 4] = ["Cargo.toml", "Cargo.lock", ".cargo", "crates"];

fn main() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    println!("cargo::rerun-if-changed=build.rs");
    let released = std::env::var("PROFILE").is_ok_and(|profile| profile == "release");
    if !released || !top.join(".git").exists() {
        return;
    }
    // A line is added there with each commit and checkout.
    let log = top.join(".git/logs/HEAD");
    for path in SOURCES.iter().map(|source| top.join(source)).chain([log]) {
        println!("cargo::rerun-if-changed={}", path.display());
    }
    let Some(commit) = git(&top, &["rev-parse", "--verify", "HEAD"]) else {
        return;
    };
    // A new file has no part in the program unless one that is known names it.
    let status = [
        &["status", "--porcelain", "--untracked-files=no", "--"],
        &SOURCES[..],
    ]
    .concat();
    let mark = match git(&top, &status) {
        Some(changes) if changes.is_empty() => "",
        Some(_) | None => "-dirty",
    };
    println!("cargo::rustc-env=PAGETIDE_GIT_COMMIT={commit}{mark}");
}

/// What git answers in the directory `top`; `None` if it does not.
fn git(top: &Path, arguments: &[&str]) -> Option<String> {
    // Without optional locks, so that a build does not get in a commit's way.
    let mut git = Command::new("git");
    git.arg("--no-optional-locks")
        .args(arguments)
        .current_dir(top);
    match git.output() {
        Ok(output) if output.status.success() => {
            Some(String::from_utf8_lossy(&output.stdout).trim().to_owned())
        }
        Ok(_) | Err(_) => None,
    }
}
