// SPDX-License-Identifier: Apache-2.0
//! `scripts/soak`: a real guest at work, while its daemon dies again and again.

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Parser;
use pagetide_guestkit::soak::{self, Options, SoakError, Tiers};

/// Runs all kinds of verified loads in a squeezed, unmodified guest, kills the daemon at random, calls its API
/// at random, and has other tenants misbehave; then says whether a byte was wrong.
#[derive(Parser)]
struct Arguments {
    /// How long deaths and calls go on; fractions are allowed
    #[arg(long, default_value_t = 60.0, value_parser = minutes)]
    minutes: f64,
    /// What everything random follows from; without it another one each time
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seed: Option<u64>,
    /// Part of the names of the attacks that other tenants choose from; without it all
    #[arg(long, value_name = "PART", default_value = "")]
    attacks: String,
    /// Has cold memory go to a disk and to another host as well, which are taken away and given back all the time
    #[arg(long)]
    all_tiers: bool,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let options = Options {
        minutes: arguments.minutes,
        seed: arguments.seed.unwrap_or_else(seed_of_now),
        attacks: arguments.attacks,
        tiers: match arguments.all_tiers {
            true => Tiers::All,
            false => Tiers::InMemory,
        },
    };
    let report = match soak::run(&options) {
        Ok(report) => report,
        Err(SoakError::Missing(what)) => {
            eprintln!("SKIPPED: {what}");
            return ExitCode::SUCCESS;
        }
        Err(error) => {
            eprintln!("\nsoak: {error}");
            return ExitCode::FAILURE;
        }
    };
    let failures = report.failures();
    for failure in &failures {
        eprintln!("FAILED: {failure}");
    }
    eprintln!(
        "soak: {} kills, {} wrong bytes, {} I/O errors, longest gap {} ms ({} ms of it without a CPU), left: {} \
         descriptors, {} bytes; seed {}",
        report.kills,
        report.wrong_bytes,
        report.io_errors,
        report.longest_gap_ms,
        report.stolen_in_longest_gap_ms,
        report.leaked_descriptors,
        report.leaked_bytes,
        report.seed
    );
    if failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(minutes) if minutes > 0.0 && minutes <= 24.0 * 60.0 => Ok(minutes),
        _ => Err("give minutes, more than 0 and at most a day".to_owned()),
    }
}

fn seed_of_now() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(1, |now| now.as_secs().max(1))
}
