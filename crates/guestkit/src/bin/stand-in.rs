// SPDX-License-Identifier: Apache-2.0
//! A process that is taken for a VMM; see `pagetide_guestkit::stand_in`.

use std::process::ExitCode;

use pagetide_guestkit::stand_in::{StandInSpec, serve};

fn main() -> ExitCode {
    let Some(spec) = StandInSpec::parse(std::env::args().skip(1)) else {
        eprintln!("usage: stand-in RAM_MIB THREADS usual|hugetlb|giant [SOCKET]");
        return ExitCode::from(2);
    };
    match serve(&spec) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("stand-in: {error}");
            ExitCode::from(3)
        }
    }
}
