// SPDX-License-Identifier: Apache-2.0
//! Measured times of page faults, as the simulator reads them.

#![no_main]

#[path = "../../crates/sim/tests/samples_fuzz/bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bodies::latency_samples(bytes));
