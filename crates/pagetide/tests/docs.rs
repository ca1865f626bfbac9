// SPDX-License-Identifier: Apache-2.0
//! Generated pages of `docs/` are what the code generates.
//!
//! `UPDATE_DOCS=1 cargo test -p pagetide --test docs` writes them.

use std::path::Path;

use pagetide_daemon::{api, metrics, settings};

fn check(name: &str, generated: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../docs")
        .join(name);
    if std::env::var_os("UPDATE_DOCS").is_some() {
        std::fs::write(&path, generated).unwrap();
    }
    let written = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == generated,
        "docs/{name} is not what the code generates: run this test with UPDATE_DOCS=1"
    );
}

#[test]
fn page_of_settings_is_up_to_date() {
    check("settings.md", &settings::settings_page());
}

#[test]
fn page_of_metrics_is_up_to_date() {
    check("metrics.md", &metrics::documentation());
}

#[test]
fn openapi_document_is_up_to_date() {
    check("openapi.json", &api::openapi());
}
