// SPDX-License-Identifier: Apache-2.0
//! What `pagetide bench overcommit` starts for its real guests: becomes a QEMU with a stock Linux guest whose
//! programs serve requests (`pagetide_guest::services`), and whose port is standard input and output.
//!
//! It does not stay as a parent: its process id is QEMU's, and ending it ends QEMU.

use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use pagetide_guest::params::Params;
use pagetide_guest::services::ServiceName;
use pagetide_guestkit::image::{self, Addition, Extras};
use pagetide_guestkit::programs::{ProgramError, REDIS_SERVER, SQLITE, compiler};
use pagetide_guestkit::qemu::{Accel, GuestSpec, Paths, Port, QEMU, Version, arguments};

/// Status if the machine lacks something, which the output names.
const UNABLE: u8 = 3;

/// Becomes a QEMU with a stock Linux guest whose programs serve requests.
#[derive(Parser)]
struct Arguments {
    /// What it will be told to serve
    #[arg(long)]
    service: ServiceName,
    /// RAM in MiB
    #[arg(long)]
    ram_mib: u64,
    /// Folder for the guest's console
    #[arg(long)]
    folder: PathBuf,
    /// What its requests begin with
    #[arg(long)]
    seed: u64,
    /// Memory cgroup to join before there is any RAM
    #[arg(long)]
    group: Option<PathBuf>,
}

fn main() -> ExitCode {
    let Err(error) = become_qemu(&Arguments::parse());
    // Nothing can be done if the reader is gone.
    match writeln!(std::io::stdout(), "unable: {error}") {
        Ok(()) => ExitCode::from(UNABLE),
        Err(_) => ExitCode::FAILURE,
    }
}

/// The programs of a service.
fn programs(service: ServiceName) -> Result<Vec<Addition>, ProgramError> {
    match service {
        ServiceName::Redis => REDIS_SERVER.additions(),
        ServiceName::Sqlite => SQLITE.additions(),
        // The guest's busybox has a server.
        ServiceName::Files => Ok(Vec::new()),
        ServiceName::Compile => compiler(),
    }
}

fn become_qemu(given: &Arguments) -> Result<std::convert::Infallible, Box<dyn std::error::Error>> {
    let image = image::prepare_with(&Extras {
        suffix: &format!("-service-{}", given.service.name()),
        additions: &programs(given.service)?,
        ..Extras::default()
    })?;
    if let Some(group) = &given.group {
        let processes = group.join("cgroup.procs");
        std::fs::write(&processes, std::process::id().to_string())
            .map_err(|error| format!("{}: {error}", processes.display()))?;
    }
    let spec = GuestSpec {
        ram_bytes: given.ram_mib.saturating_mul(1 << 20),
        cpus: 1,
        work: Params {
            services: 1,
            seed: given.seed,
            ..Params::default()
        },
        port: Port::Stdio,
        ..GuestSpec::default()
    };
    let paths = Paths::in_folder(&given.folder);
    let (accel, version) = (Accel::of_this_machine(), Version::installed()?);
    let error = Command::new(QEMU)
        .args(arguments(&spec, &image, &paths, accel, version))
        .exec();
    Err(format!("{QEMU}: {error}").into())
}
