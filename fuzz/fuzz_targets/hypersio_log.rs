// SPDX-License-Identifier: Apache-2.0
//! The text log of the authors' patched QEMU.

#![no_main]

#[expect(dead_code, reason = "a target runs one of the functions")]
#[path = "../../crates/trace/tests/formats_fuzz/bodies.rs"]
mod bodies;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| bodies::hypersio_log(bytes));
