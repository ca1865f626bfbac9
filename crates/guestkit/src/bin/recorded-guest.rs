// SPDX-License-Identifier: Apache-2.0
//! What `pagetide trace collect` starts for each run: boots a stock guest behind an emulated IOMMU, lets its devices
//! work, and leaves QEMU's log and the records of the guest's kernel in a folder. Says what it did as JSON.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use pagetide_guestkit::recording::{
    DEVICES_MAX, Device, Mode, RecordingError, RecordingSpec, Workload, record,
};
use rustix::process::Signal;

/// Status if the machine lacks something, which the message names.
const UNABLE: u8 = 3;

/// Records what the devices of a stock guest ask of its IOMMU.
#[derive(Parser)]
struct Arguments {
    /// Kind of devices
    #[arg(long)]
    device: Device,
    /// How many
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(DEVICES_MAX)))]
    devices: u32,
    /// What they do
    #[arg(long)]
    workload: Workload,
    /// For how long
    #[arg(long)]
    seconds: u32,
    /// Who maps memory for them
    #[arg(long)]
    mode: Mode,
    /// Folder for log and records
    #[arg(long)]
    folder: PathBuf,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    // The log of a guest that nobody waits for is of no use.
    if let Err(error) = rustix::process::set_parent_process_death_signal(Some(Signal::TERM)) {
        eprintln!("recorded-guest: {error}");
        return ExitCode::FAILURE;
    }
    let spec = RecordingSpec {
        device: arguments.device,
        devices: arguments.devices,
        workload: arguments.workload,
        seconds: arguments.seconds,
        mode: arguments.mode,
        folder: arguments.folder,
    };
    let recorded = match record(&spec) {
        Ok(recorded) => recorded,
        Err(error) => {
            eprintln!("recorded-guest: {error}");
            return match error {
                RecordingError::Image(_) | RecordingError::Program(_) | RecordingError::Qemu(_) => {
                    ExitCode::from(UNABLE)
                }
                _ => ExitCode::FAILURE,
            };
        }
    };
    let said = serde_json::to_string(&recorded)
        .map_err(std::io::Error::from)
        .and_then(|line| writeln!(std::io::stdout(), "{line}"));
    match said {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("recorded-guest: {error}");
            ExitCode::FAILURE
        }
    }
}
