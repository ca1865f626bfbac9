// SPDX-License-Identifier: Apache-2.0
//! Tells the program which commit it is built from, for the provenance of
//! results. Outside a checkout, or without git, it is not told.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let git = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.git");
    if !git.exists() {
        return;
    }
    // A line is added there with each commit and checkout.
    println!(
        "cargo::rerun-if-changed={}",
        git.join("logs/HEAD").display()
    );
    let told = Command::new("git")
        .args(["rev-parse", "--verify", "HEAD"])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    if let Ok(output) = told
        && output.status.success()
    {
        let commit = String::from_utf8_lossy(&output.stdout);
        println!("cargo::rustc-env=PAGETIDE_GIT_COMMIT={}", commit.trim());
    }
}
