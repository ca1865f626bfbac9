// SPDX-License-Identifier: Apache-2.0
//! What `pagetide bench guest-cost` (for its `stock` cells), `overhead` and `crash` start: becomes a QEMU with a
//! stock Linux guest that runs loads by name (`pagetide_guest::loads`), or verifies its memory and disk, whose
//! port is standard input and output.
//!
//! It does not stay as a parent: its process id is QEMU's, and ending it ends QEMU. (So its guest is not
//! kept out of kernel swap, as those of tests are.)

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use pagetide_guest::loads::Load;
use pagetide_guest::params::Params;
use pagetide_guestkit::image::{self, Extras};
use pagetide_guestkit::programs::{Program, of_load};
use pagetide_guestkit::qemu::{Accel, Disk, GuestSpec, Paths, Port, QEMU, Version, arguments};

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
    /// A load that it can be told to run; may be given again
    #[arg(long = "load", required_unless_present = "verify_memory_mib")]
    loads: Vec<Load>,
    /// MiB of memory that it writes and compares for ever, instead of loads
    #[arg(long, conflicts_with = "loads")]
    verify_memory_mib: Option<u64>,
    /// MiB of the disk that it writes and compares beside that
    #[arg(long, default_value_t = 0, requires = "disk")]
    verify_disk_mib: u64,
    /// Socket of a vhost-user disk
    #[arg(long)]
    disk: Option<PathBuf>,
}

fn main() -> ExitCode {
    let Err(error) = become_qemu(&Arguments::parse());
    // Nothing can be done if the reader is gone.
    match writeln!(std::io::stdout(), "unable: {error}") {
        Ok(()) => ExitCode::from(UNABLE),
        Err(_) => ExitCode::FAILURE,
    }
}

/// The programs of all loads, each once.
fn programs(loads: &[Load]) -> Vec<Program> {
    let mut programs: Vec<Program> = Vec::new();
    for program in loads.iter().flat_map(|load| of_load(*load)) {
        if !programs.contains(program) {
            programs.push(*program);
        }
    }
    programs
}

fn work(arguments: &Arguments) -> Params {
    match arguments.verify_memory_mib {
        Some(mib) => Params {
            mem_bytes: mib.saturating_mul(1 << 20),
            file_bytes: arguments.verify_disk_mib.saturating_mul(1 << 20),
            ..Params::default()
        },
        None => Params {
            loads: 1,
            ..Params::default()
        },
    }
}

fn become_qemu(
    arguments_given: &Arguments,
) -> Result<std::convert::Infallible, Box<dyn std::error::Error>> {
    let (mut suffix, mut additions) = ("-loads".to_owned(), Vec::new());
    for program in programs(&arguments_given.loads) {
        let file = PathBuf::from(program.name);
        suffix += &format!(
            "-{}",
            file.file_name().unwrap_or_default().to_string_lossy()
        );
        additions.extend(program.additions()?);
    }
    let image = image::prepare_with(&Extras {
        suffix: &suffix,
        additions: &additions,
        ..Extras::default()
    })?;
    let spec = GuestSpec {
        ram_bytes: arguments_given.ram_mib.saturating_mul(1 << 20),
        disk: arguments_given
            .disk
            .clone()
            .map_or(Disk::Absent, Disk::VhostUser),
        work: work(arguments_given),
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
