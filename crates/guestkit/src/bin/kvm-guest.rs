// SPDX-License-Identifier: Apache-2.0
//! What `pagetide bench guest-cost` starts: becomes a QEMU with a bare guest under KVM, whose serial port
//! is standard input and output.
//!
//! It does not stay as a parent: its process id is QEMU's, and ending it ends QEMU. (So its guest is not
//! kept out of kernel swap, as those of tests are.)

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use pagetide_guestkit::bare::{self, BareError, BareSpec};
use pagetide_guestkit::qemu::{Accel, QEMU, Ram};

/// Status if the machine lacks something, which the output names.
const UNABLE: u8 = 3;

/// Becomes a QEMU with a guest without an operating system.
#[derive(Parser)]
struct Arguments {
    /// RAM in MiB
    #[arg(long)]
    ram_mib: u64,
    /// Pages that are touched at random, in thousandths
    #[arg(long, default_value_t = 125)]
    hot_permille: u32,
    /// After so many touches one of the others is looked at; 0 for never
    #[arg(long, default_value_t = 0)]
    sweep_every: u32,
    /// Folder for the guest's program
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

fn become_qemu(arguments: &Arguments) -> Result<std::convert::Infallible, BareError> {
    let spec = BareSpec {
        ram_bytes: arguments.ram_mib.saturating_mul(1 << 20),
        hot_permille: arguments.hot_permille,
        sweep_every: arguments.sweep_every,
        accel: Accel::Kvm,
    };
    spec.check()?;
    let program = bare::build(&arguments.folder)?;
    let error = Command::new(QEMU)
        .args(bare::arguments(&spec, &Ram::SharedMemfd, &program))
        .exec();
    Err(BareError::Unable(format!("{QEMU}: {error}")))
}
