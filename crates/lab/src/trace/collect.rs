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
    let mut report = sums.report(&last.accel);
    let wall_seconds = began.elapsed().as_secs_f64();
    report
        .figures
        .insert("wall_seconds".to_owned(), json!(wall_seconds));
    print_report(&report, args.json.into())?;
    write_recipe(args, &logs)?;
    sums.judge(args.nics, &args.mode)?;
    // Only what has passed is for studies.
    write_collection(args, logs, last)
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

/// Writes the recipe for a trace of what was recorded.
fn write_recipe(args: &CollectArgs, logs: &[PathBuf]) -> Result<(), CommandError> {
    let recipe = format!(
        "# The tenants of this collection, one after the other. `pagetide trace build` makes a trace of it.\n\
         tenants = {}\n\n[input.recorded]\nrequests_per_packet = 3\nlogs = {}\n",
        args.nics,
        json!(logs)
    );
    let path = args.out.join("recipe.toml");
    fs::write(&path, recipe).map_err(failed(&path))
}

/// Says what was recorded, for studies.
fn write_collection(
    args: &CollectArgs,
    logs: Vec<PathBuf>,
    last: Recorded,
) -> Result<(), CommandError> {
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

    /// Fails if the two witnesses do not agree, a device did nothing, or the guest was not of this mode.
    fn judge(&self, devices: u32, mode: &str) -> Result<(), CommandError> {
        if self.sources != u64::from(devices) {
            return Err(CommandError::failed(format!(
                "{} of {devices} devices made requests",
                self.sources
            )));
        }
        if let Some(first) = &self.check.first_unmapped {
            return Err(CommandError::failed(format!(
                "a request is not in the guest's maps: {first}"
            )));
        }
        match mode {
            "strict" => self.judge_strict(),
            "passthrough" if self.requests_2m == 0 => Err(CommandError::failed(
                "no request is to a page of 2 MiB: the guest's memory is not of huge pages",
            )),
            _ => Ok(()),
        }
    }

    fn judge_strict(&self) -> Result<(), CommandError> {
        let agreeing = share(self.check.invalidations_unmapped, self.check.invalidations);
        let Some(agreeing) = agreeing.as_f64() else {
            return Err(CommandError::failed(
                "no page was invalidated: the guest's kernel is not strict",
            ));
        };
        match &self.check.first_without_unmap {
            Some(first) if agreeing < INVALIDATIONS_LEAST => Err(CommandError::failed(format!(
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

    /// Two devices, and two invalidations of which so many have an unmap.
    fn sums(invalidations: u64, unmapped: u64) -> Sums {
        Sums {
            sources: 2,
            requests: 100,
            check: MapCheck {
                requests: 100,
                requests_mapped: 100,
                invalidations,
                invalidations_unmapped: unmapped,
                first_without_unmap: (unmapped < invalidations).then(|| "line 7".to_owned()),
                ..MapCheck::default()
            },
            ..Sums::default()
        }
    }

    #[test]
    fn strict_guest_invalidates_what_it_unmaps() {
        assert!(sums(200, 200).judge(2, "strict").is_ok());
        let refused = |sums: &Sums| sums.judge(2, "strict").unwrap_err().to_string();
        assert!(refused(&sums(0, 0)).contains("no page was invalidated"));
        assert!(refused(&sums(200, 100)).contains("line 7"));
        assert!(sums(0, 0).judge(2, "lazy").is_ok());
    }

    #[test]
    fn huge_pages_are_expected_by_passthrough_and_all_devices_always() {
        let mut sums = sums(0, 0);
        assert!(sums.judge(2, "passthrough").is_err());
        sums.requests_2m = 100;
        assert!(sums.judge(2, "passthrough").is_ok());
        let refused = sums.judge(3, "passthrough").unwrap_err().to_string();
        assert!(refused.contains("2 of 3 devices"), "{refused}");
    }

    #[test]
    fn runs_have_as_many_devices_as_fit_and_about_the_same() {
        assert_eq!(devices_of_runs(1), [1]);
        assert_eq!(devices_of_runs(24), [24]);
        assert_eq!(devices_of_runs(25), [13, 12]);
        assert_eq!(devices_of_runs(96), [24; 4]);
    }
}
