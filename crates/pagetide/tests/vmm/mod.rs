// SPDX-License-Identifier: Apache-2.0
//! A test that is a VMM: a process with a file of RAM, mapped shared, whose program has an emulator's name.

use std::process::Command;

/// Set in the process that is the VMM.
const IS_VMM: &str = "PAGETIDE_TEST_IS_VMM";

/// True in the VMM. Elsewhere runs `test` of this program as one, and returns false when it has passed.
///
/// # Panics
/// It has failed there.
pub fn is_this(test: &str) -> bool {
    if std::env::var_os(IS_VMM).is_some() {
        return true;
    }
    let own = std::env::current_exe().unwrap();
    // Tests of one program run at the same time.
    let named = own.with_file_name(format!("qemu-test-{}-{test}", std::process::id()));
    std::fs::hard_link(&own, &named).unwrap();
    let status = Command::new(&named)
        .args(["--exact", test, "--nocapture"])
        .env(IS_VMM, "1")
        .status();
    std::fs::remove_file(&named).unwrap();
    assert!(status.unwrap().success(), "{test} failed in the VMM");
    false
}
