// SPDX-License-Identifier: Apache-2.0
//! Tables in Arrow as traces.

#![no_main]

#[path = "../../crates/arrow/tests/arrow_fuzz/bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bodies::arrow_table(bytes));
