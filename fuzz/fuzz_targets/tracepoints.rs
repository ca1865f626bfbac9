// SPDX-License-Identifier: Apache-2.0
//! The records of Linux' tracepoints about its I/O page tables.

#![no_main]

#[expect(dead_code, reason = "a target runs one of the functions")]
#[path = "../../crates/trace/tests/formats_fuzz/bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bodies::tracepoints(bytes));
