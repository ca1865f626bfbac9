// SPDX-License-Identifier: Apache-2.0
//! `make demo`: squeezes a running stock guest and lets it verify every byte.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use pagetide_guestkit::demo::{self, Device, Options};
use pagetide_guestkit::report::Report;

/// Squeezes a running, unmodified guest to half of its memory while it works,
/// kills the daemon once, lets go, and has the guest verify every byte.
#[derive(Parser)]
struct Arguments {
    /// Print the report as JSON instead of a table
    #[arg(long)]
    json: bool,
    /// Squeeze a guest without a disk
    #[arg(long)]
    no_device: bool,
    /// How long to stay squeezed
    #[arg(long, default_value_t = 32)]
    seconds: u32,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let device = if arguments.no_device {
        Device::Absent
    } else {
        Device::Disk
    };
    let options = Options {
        device,
        seconds: arguments.seconds,
    };
    let report = match demo::run(&options) {
        Ok(report) => report,
        Err(error) => {
            eprintln!("\ndemo: {error}");
            return ExitCode::FAILURE;
        }
    };
    if let Err(error) = print(&report, arguments.json) {
        eprintln!("demo: {error}");
        return ExitCode::FAILURE;
    }
    let failures = report.failures(&options.wanted());
    for failure in &failures {
        eprintln!("FAILED: {failure}");
    }
    if failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

#[expect(
    clippy::fn_params_excessive_bools,
    reason = "a flag of the command line, as given"
)]
fn print(report: &Report, json: bool) -> std::io::Result<()> {
    let text = if json {
        serde_json::to_string(report)? + "\n"
    } else {
        format!("\n{}", report.table())
    };
    std::io::stdout().write_all(text.as_bytes())
}
