// SPDX-License-Identifier: Apache-2.0
//! Measured times of page faults, as the simulator reads them.

#![no_main]

#[expect(dead_code, reason = "a target runs one of the functions")]
#[path = "../../crates/sim/tests/readers_fuzz/bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bodies::latency_samples(bytes));
