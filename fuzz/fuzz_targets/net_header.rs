// SPDX-License-Identifier: Apache-2.0
//! The header before a packet.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| pagetide_dpu::hostile::net_header(bytes));
