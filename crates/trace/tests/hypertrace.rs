// SPDX-License-Identifier: Apache-2.0
//! The trace constructor from outside: what it makes of settings, synthetic
//! tenants and logs, against the paper's figures and a naive constructor.

#[path = "hypertrace/support.rs"]
mod support;

#[path = "hypertrace/naive.rs"]
mod naive;
#[path = "hypertrace/recorded.rs"]
mod recorded;
#[path = "hypertrace/settings.rs"]
mod settings;
#[path = "hypertrace/synthetic.rs"]
mod synthetic;
