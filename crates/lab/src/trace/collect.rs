// SPDX-License-Identifier: Apache-2.0
//! `pagetide trace collect`: records logs of stock guests, and checks them against the guests' own records.
//!
//! The guests come from the project's test kit: `recorded-guest`, of the crate `pagetide-guestkit`, lies beside this
//! program when both were built, and does one run:
//!
//! ```text
//!   OUT/run-0/vtd.log ── requests, invalidations ──┐
//!   OUT/run-0/maps.txt ─ the guest's maps, unmaps ─┴─ compared ─► figures and ratios
//!   OUT/collection.json  what was recorded        OUT/recipe.toml  for `trace build`
//! ```

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use pagetide_bench::BenchReport;
use pagetide_report::outcome::{CommandError, print_report};
use pagetide_trace::{Distinct, FormatChoice, GuestMaps, MapCheck, PageSize, TraceInfo, info};
use serde::Deserialize;
use serde_json::{Value, json};

use super::args::CollectArgs;
use super::collection::{self, Collection};
use crate::sim::of_trace;

const PROGRAM: &str = "recorded-guest";
/// Devices of one run: as many as fit on the bus of the paper's machine.
const DEVICES_OF_A_RUN: u32 = 24;
/// Invalidations of pages that must have an unmap of their own where the guest's drivers are strict.
const INVALIDATIONS_LEAST: f64 = 0.99;

/// What the program says of a run.
#[derive(Debug, Deserialize)]
struct Recorded {
    bytes_received: u64,
    accel: String,
    qemu_version: String,
    kernel: String,
}

/// What was recorded and compared, of all runs.
#[derive(Debug, Default)]
struct Sums {
    sources: u64,
    requests: u64,
    requests_2m: u64,
    pages: u64,
    /// Of any kind.
    invalidations: u64,
    bytes_received: u64,
    maps: u64,
    unmaps: u64,
    check: MapCheck,
}

/// Records, compares, prints.
pub fn run(args: &CollectArgs) -> Result<(), CommandError> {
    check_words(args)?;
    prepare(&args.out)?;
    let program = program()?;
    let began = Instant::now();
    let mut sums = Sums::default();
    let (mut logs, mut last) = (Vec::new(), None);
    for (number, devices) in devices_of_runs(args.nics).into_iter().enumerate() {
        let name = format!("run-{number}");
        let folder = args.out.join(&name);
        fs::create_dir(&folder).map_err(failed(&folder))?;
        let recorded = record(&program, args, devices, &folder)?;
        sums.add(&folder, &recorded)?;
        logs.push(PathBuf::from(name).join("vtd.log"));
        last = Some(recorded);
    }
    let last = last.ok_or_else(|| CommandError::failed("there was no run"))?;
    let accel = last.accel.clone();
    write_beside(args, logs, last)?;
    let mut report = sums.report(&accel);
    let wall_seconds = began.elapsed().as_secs_f64();
    report
        .figures
        .insert("wall_seconds".to_owned(), json!(wall_seconds));
    print_report(&report, args.json.into())?;
    sums.judge(args)
}

/// Refuses devices that cannot do the workload.
fn check_words(args: &CollectArgs) -> Result<(), CommandError> {
    match (args.device.as_str(), args.workload.as_str()) {
        ("nvme", "fio") if args.mode == "passthrough" => Err(CommandError::refused(
            "--mode passthrough is for NICs; for disks take strict or lazy",
        )),
        ("nvme", "fio") => Ok(()),
        ("nvme", _) | (_, "fio") => Err(CommandError::refused(
            "fio is for --device nvme, and nothing else is: write --device nvme --workload fio",
        )),
        _ => Ok(()),
    }
}

fn program() -> Result<PathBuf, CommandError> {
    let ours = std::env::current_exe()
        .map_err(|error| CommandError::failed(format!("this program cannot be found: {error}")))?;
    let beside = ours.with_file_name(PROGRAM);
    if beside.exists() {
        return Ok(beside);
    }
    Err(CommandError::failed(format!(
        "there is no {}; build it by `cargo build --release -p pagetide-guestkit`",
        beside.display()
    )))
}

/// Makes the directory, which must have nothing of others.
fn prepare(out: &Path) -> Result<(), CommandError> {
    let refused =
        |error: std::io::Error| CommandError::refused(format!("--out {}: {error}", out.display()));
    fs::create_dir_all(out).map_err(refused)?;
    if fs::read_dir(out).map_err(refused)?.next().is_some() {
        return Err(CommandError::refused(format!(
            "--out {}: it is not empty; give a new directory",
            out.display()
        )));
    }
    Ok(())
}

/// Devices of each run, as evenly as possible.
fn devices_of_runs(devices: u32) -> Vec<u32> {
    let runs = devices.div_ceil(DEVICES_OF_A_RUN);
    (0..runs)
        .map(|run| devices / runs + u32::from(run < devices % runs))
        .collect()
}

fn record(
    program: &Path,
    args: &CollectArgs,
    devices: u32,
    folder: &Path,
) -> Result<Recorded, CommandError> {
    let output = Command::new(program)
        .args(["--device", &args.device, "--workload", &args.workload])
        .args(["--mode", &args.mode, "--seconds", &args.seconds.to_string()])
        .args(["--devices", &devices.to_string(), "--folder"])
        .arg(folder)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .map_err(failed(program))?;
    if !output.status.success() {
        return Err(CommandError::failed(format!(
            "nothing was recorded ({}); its message is above, consoles are in {}",
            output.status,
            folder.display()
        )));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| {
        CommandError::failed(format!("{PROGRAM} said something unexpected: {error}"))
    })
}

fn failed(path: &Path) -> impl Fn(std::io::Error) -> CommandError + '_ {
    move |error| CommandError::failed(format!("{}: {error}", path.display()))
}

/// Writes what was recorded, and the recipe for a trace of it.
fn write_beside(
    args: &CollectArgs,
    logs: Vec<PathBuf>,
    last: Recorded,
) -> Result<(), CommandError> {
    let recipe = format!(
        "# The tenants of this collection, one after the other. `pagetide trace build` makes a trace of it.\n\
         tenants = {}\n\n[input.recorded]\nrequests_per_packet = 3\nlogs = {}\n",
        args.nics,
        json!(logs)
    );
    let path = args.out.join("recipe.toml");
    fs::write(&path, recipe).map_err(failed(&path))?;
    let collection = Collection {
        device: args.device.clone(),
        workload: args.workload.clone(),
        mode: args.mode.clone(),
        seconds: args.seconds,
        kernel: last.kernel,
        qemu_version: last.qemu_version,
        logs,
    };
    let text = serde_json::to_string_pretty(&collection).map_err(CommandError::failed)?;
    let path = args.out.join(collection::NAME);
    fs::write(&path, text + "\n").map_err(failed(&path))
}

impl Sums {
    /// Reads the files of a run, compares them, and adds up.
    fn add(&mut self, folder: &Path, recorded: &Recorded) -> Result<(), CommandError> {
        let log = folder.join("vtd.log");
        let info = info(&log, FormatChoice::Detect).map_err(of_trace)?;
        let maps = GuestMaps::read(&folder.join("maps.txt")).map_err(of_trace)?;
        let check = MapCheck::of(&log, &maps).map_err(of_trace)?;
        self.sources += count(info.sources);
        self.pages += count(info.distinct_pages);
        self.requests += check.requests;
        self.requests_2m += requests_of(&info, PageSize::SIZE_2M);
        let kinds = info.kinds.iter();
        self.invalidations += kinds
            .filter(|(kind, _)| kind.starts_with("invalidate"))
            .map(|(_, events)| events)
            .sum::<u64>();
        self.bytes_received += recorded.bytes_received;
        self.maps += maps.maps();
        self.unmaps += maps.unmaps();
        self.check.requests += check.requests;
        self.check.requests_mapped += check.requests_mapped;
        self.check.invalidations += check.invalidations;
        self.check.invalidations_unmapped += check.invalidations_unmapped;
        let first = &mut self.check.first_unmapped;
        *first = first.take().or(check.first_unmapped);
        let first = &mut self.check.first_without_unmap;
        *first = first.take().or(check.first_without_unmap);
        Ok(())
    }

    fn report(&self, accel: &str) -> BenchReport {
        let mut report = BenchReport::new("trace-collect");
        for (name, value) in [
            ("sources", self.sources),
            ("requests", self.requests),
            ("invalidations", self.invalidations),
            ("invalidations_of_pages", self.check.invalidations),
            ("pages", self.pages),
            ("bytes_received", self.bytes_received),
            ("guest_maps", self.maps),
            ("guest_unmaps", self.unmaps),
        ] {
            report.figures.insert(name.to_owned(), value.into());
        }
        report.figures.insert("accel".to_owned(), accel.into());
        for (name, value) in [
            (
                "requests_in_guest_maps",
                share(self.check.requests_mapped, self.check.requests),
            ),
            (
                "invalidations_in_guest_unmaps",
                share(self.check.invalidations_unmapped, self.check.invalidations),
            ),
            ("requests_2m", share(self.requests_2m, self.requests)),
        ] {
            report.ratios.insert(name.to_owned(), value);
        }
        report
    }

    /// Fails if the two witnesses do not agree, or a device did nothing.
    fn judge(&self, args: &CollectArgs) -> Result<(), CommandError> {
        if self.sources != u64::from(args.nics) {
            return Err(CommandError::failed(format!(
                "{} of {} devices made requests",
                self.sources, args.nics
            )));
        }
        if let Some(first) = &self.check.first_unmapped {
            return Err(CommandError::failed(format!(
                "a request is not in the guest's maps: {first}"
            )));
        }
        let least = share(self.check.invalidations_unmapped, self.check.invalidations);
        let agrees = least
            .as_f64()
            .is_none_or(|share| share >= INVALIDATIONS_LEAST);
        match &self.check.first_without_unmap {
            Some(first) if args.mode == "strict" && !agrees => Err(CommandError::failed(format!(
                "an invalidation has no unmap in the guest's records: {first}"
            ))),
            _ => Ok(()),
        }
    }
}

fn requests_of(info: &TraceInfo, size: PageSize) -> u64 {
    let of = info.page_sizes.by_bytes.get(&size.bytes());
    of.copied().unwrap_or_default()
}

fn count(distinct: Distinct) -> u64 {
    match distinct {
        Distinct::Exactly(count) | Distinct::AtLeast(count) => count,
    }
}

/// `part` of `whole`, null if there is nothing.
fn share(part: u64, whole: u64) -> Value {
    if whole == 0 {
        return Value::Null;
    }
    #[expect(clippy::cast_precision_loss, reason = "a ratio for people")]
    let share = part as f64 / whole as f64;
    json!(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_have_as_many_devices_as_fit_and_about_the_same() {
        assert_eq!(devices_of_runs(1), [1]);
        assert_eq!(devices_of_runs(24), [24]);
        assert_eq!(devices_of_runs(25), [13, 12]);
        assert_eq!(devices_of_runs(96), [24; 4]);
    }
}
