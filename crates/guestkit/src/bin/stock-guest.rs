// SPDX-License-Identifier: Apache-2.0
//! What `pagetide bench guest-cost` starts for its `stock` cells: becomes a QEMU with a stock Linux guest
//! that runs loads by name (`pagetide_guest::loads`), whose port is standard input and output.
//!
//! It does not stay as a parent: its process id is QEMU's, and ending it ends QEMU. (So its guest is not
//! kept out of kernel swap, as those of tests are.)

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use pagetide_guest::params::Params;
use pagetide_guestkit::image::{self, Extras};
use pagetide_guestkit::programs::{REDIS_BENCHMARK, REDIS_SERVER, STRESS_NG};
use pagetide_guestkit::qemu::{Accel, GuestSpec, Paths, Port, QEMU, Version, arguments};

/// Status if the machine lacks something, which the output names.
const UNABLE: u8 = 3;

/// Becomes a QEMU with a stock Linux guest that runs loads by name.
#[derive(Parser)]
struct Arguments {
    /// RAM in MiB
    #[arg(long)]
    ram_mib: u64,
    /// Folder for the guest's console
    #[arg(long)]
    folder: PathBuf,
}

fn main() -> ExitCode {
    let Err(error) = become_qemu(&Arguments::parse());
    // Nothing can be done if the reader is gone.
    match writeln!(std::io::stdout(), "unable: {error}") {
        Ok(()) => ExitCode::from(UNABLE),
        Err(_) => ExitCode::FAILURE,
    }
}

fn become_qemu(
    arguments_given: &Arguments,
) -> Result<std::convert::Infallible, Box<dyn std::error::Error>> {
    let mut additions = Vec::new();
    for program in [STRESS_NG, REDIS_SERVER, REDIS_BENCHMARK] {
        additions.extend(program.additions()?);
    }
    let image = image::prepare_with(&Extras {
        suffix: "-loads",
        additions: &additions,
    })?;
    let spec = GuestSpec {
        ram_bytes: arguments_given.ram_mib.saturating_mul(1 << 20),
        work: Params {
            loads: 1,
            ..Params::default()
        },
        port: Port::Stdio,
        ..GuestSpec::default()
    };
    let paths = Paths::in_folder(&arguments_given.folder);
    let (accel, version) = (Accel::of_this_machine(), Version::installed()?);
    let error = Command::new(QEMU)
        .args(arguments(&spec, &image, &paths, accel, version))
        .exec();
    Err(format!("{QEMU}: {error}").into())
}
