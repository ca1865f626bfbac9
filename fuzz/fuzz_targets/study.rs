// SPDX-License-Identifier: Apache-2.0
//! Studies and the recipes in them, as `sim sweep` reads them.

#![no_main]

#[expect(dead_code, reason = "a target runs one of the functions")]
#[path = "../../crates/sim/tests/readers_fuzz/bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bodies::study(bytes));
