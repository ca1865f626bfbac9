// SPDX-License-Identifier: Apache-2.0
//! What `pagetide bench adp-live` starts: a guest under a DMA protector and without, in turns.

use std::io::Write;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use pagetide_guestkit::adp_live::{self, Found, Options};

/// Squeezes a running guest and sets its DMA protector on and off in turns; prints one JSON object.
#[derive(Parser)]
struct Arguments {
    /// Pairs of turns
    #[arg(long, default_value_t = Options::default().alternations)]
    alternations: u32,
    /// Seconds measured of each turn
    #[arg(long, default_value_t = Options::default().measure.as_secs())]
    seconds: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let options = Options {
        alternations: arguments.alternations,
        measure: Duration::from_secs(arguments.seconds),
    };
    let printed = match adp_live::run(&options) {
        Ok(found) => print(&found),
        Err(error) => {
            eprintln!("adp-live: {error}");
            return ExitCode::FAILURE;
        }
    };
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("adp-live: {error}");
            ExitCode::FAILURE
        }
    }
}

fn print(found: &Found) -> std::io::Result<()> {
    let json = serde_json::to_string(found)? + "\n";
    std::io::stdout().write_all(json.as_bytes())
}
