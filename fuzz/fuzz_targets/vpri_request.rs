// SPDX-License-Identifier: Apache-2.0
//! A page request of a VPRI function.

#![no_main]

#[expect(dead_code, reason = "a target runs one of the functions")]
#[path = "../../crates/vpri-function/tests/wire_fuzz/bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bodies::request(bytes));
