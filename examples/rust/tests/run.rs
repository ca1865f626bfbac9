// SPDX-License-Identifier: Apache-2.0
//! The examples do what they say, in that order.

use std::process::Command;

/// Runs `program` and looks for each of `wanted` after the one before it.
#[track_caller]
fn says(program: &str, wanted: &[&str]) {
    let output = Command::new(program).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let complaint = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complaint}");
    let mut rest = &*said;
    for words in wanted {
        let Some((_, after)) = rest.split_once(words) else {
            panic!("'{words}' is missing, or out of order, in:\n{said}");
        };
        rest = after;
    }
}

#[test]
fn faulting_device_reads_what_was_swapped_out() {
    says(
        env!("CARGO_BIN_EXE_faulting_device"),
        &[
            "page 3 stays, for a DMA is under way",
            "page 3 is swapped out",
            "page 3 is absent, and is requested",
            "page 3 is back",
            "page 3 is read",
            "it says 'a cold page'",
        ],
    );
}

#[test]
fn page_moves_to_the_accelerator_and_is_read_there() {
    says(
        env!("CARGO_BIN_EXE_gmem_device"),
        &[
            "the CPU faults at 0x10000000",
            "the accelerator faults at 0x10000000",
            "the page is copied",
            "4096 bytes are in its memory",
            "the CPU faults",
            "'ONE ADDRESS, TWO DEVICES'",
            "0 bytes are in the accelerator's memory",
        ],
    );
}
