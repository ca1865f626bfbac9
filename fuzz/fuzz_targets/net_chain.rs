// SPDX-License-Identifier: Apache-2.0
//! A descriptor chain of a network device.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagetide_dpu::hostile::net_chain(bytes));
