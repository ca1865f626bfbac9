// SPDX-License-Identifier: Apache-2.0
//! The record of held receive buffers.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagetide_dpu::hostile::held_record(bytes));
