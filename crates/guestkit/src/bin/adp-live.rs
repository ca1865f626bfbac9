// SPDX-License-Identifier: Apache-2.0
//! What `pagetide bench adp-live` starts: a guest under a DMA protector and without, in turns.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use pagetide_guestkit::adp_live::{self, Device, Options};

/// Status if the machine lacks something, which the output names.
const UNABLE: u8 = 3;

/// Squeezes a running guest and sets its DMA protector on and off in turns; prints one JSON object.
#[derive(Parser)]
struct Arguments {
    /// What of the guest does DMA
    #[arg(long, value_enum, default_value_t = Device::default())]
    device: Device,
    /// Turns of each policy
    #[arg(long, default_value_t = Options::default().alternations)]
    alternations: u32,
    /// Seconds of each turn before it is measured
    #[arg(long, default_value_t = Options::default().settle.as_secs())]
    settle: u64,
    /// Seconds measured of each turn
    #[arg(long, default_value_t = Options::default().measure.as_secs())]
    seconds: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let options = Options {
        device: arguments.device,
        alternations: arguments.alternations,
        settle: Duration::from_secs(arguments.settle),
        measure: Duration::from_secs(arguments.seconds),
    };
    let (text, status) = match adp_live::run(&options) {
        Ok(found) => match serde_json::to_string(&found) {
            Ok(json) => (json, ExitCode::SUCCESS),
            Err(error) => return failure(&error),
        },
        Err(error) if error.is_unable() => (error.to_string(), ExitCode::from(UNABLE)),
        Err(error) => return failure(&error),
    };
    match writeln!(std::io::stdout(), "{text}") {
        Ok(()) => status,
        Err(error) => failure(&error),
    }
}

fn failure(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("adp-live: {error}");
    ExitCode::FAILURE
}
