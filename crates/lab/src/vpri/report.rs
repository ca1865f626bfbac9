// SPDX-License-Identifier: Apache-2.0
//! The report of `vpri check`.

use pagetide_conformance::{self, CheckOutcome, Verdict};
use serde::Serialize;

use pagetide_report::text::Text;

/// Width of the column of names.
const NAME_WIDTH: usize = 26;

/// Results of the checks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct CheckReport {
    /// Socket of the function.
    pub socket: String,
    /// Feature bits that it offers.
    pub features: u64,
    /// Most spaces per driver.
    pub spaces_max: u32,
    /// Most outstanding page requests.
    pub requests_max: u32,
    /// Most elements per event.
    pub ranges_max: u32,
    /// Longest time that an event waits for DMA.
    pub lease_wait_us: u32,
    /// Number of this start of the device.
    pub generation: u32,
    /// Checks that passed.
    pub passed: usize,
    /// Checks that failed.
    pub failed: usize,
    /// Checks that could not be run.
    pub skipped: usize,
    /// Every check.
    pub checks: Vec<CheckLine>,
}

/// One check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct CheckLine {
    /// Group and name.
    pub name: &'static str,
    /// What the specification requires.
    pub demand: &'static str,
    /// `pass`, `fail` or `skipped`.
    pub verdict: &'static str,
    /// Why it failed or was skipped.
    pub why: Option<String>,
}

impl From<&CheckOutcome> for CheckLine {
    fn from(outcome: &CheckOutcome) -> Self {
        let (verdict, why) = match &outcome.verdict {
            Verdict::Passed => ("pass", None),
            Verdict::Failed(why) => ("fail", Some(why.clone())),
            Verdict::Skipped(why) => ("skipped", Some(why.clone())),
        };
        Self {
            name: outcome.name,
            demand: outcome.demand,
            verdict,
            why,
        }
    }
}

impl From<pagetide_conformance::CheckReport> for CheckReport {
    fn from(report: pagetide_conformance::CheckReport) -> Self {
        let checks: Vec<CheckLine> = report.checks.iter().map(CheckLine::from).collect();
        let count = |verdict| checks.iter().filter(|line| line.verdict == verdict).count();
        Self {
            socket: report.socket.display().to_string(),
            features: report.features,
            spaces_max: report.config.spaces_max,
            requests_max: report.config.requests_max,
            ranges_max: report.config.ranges_max,
            lease_wait_us: report.config.lease_wait_us,
            generation: report.config.generation,
            passed: count("pass"),
            failed: count("fail"),
            skipped: count("skipped"),
            checks,
        }
    }
}

/// The line printed when a check ends, with a second line if something is wrong.
pub fn line(outcome: &CheckOutcome) -> String {
    let CheckLine {
        name,
        demand,
        verdict,
        why,
    } = CheckLine::from(outcome);
    let why = why.map_or_else(String::new, |why| format!("         {why}\n"));
    format!("{verdict:<7}  {name:<NAME_WIDTH$}  {demand}\n{why}")
}

/// The lines of the checks were printed as they ended.
impl Text for CheckReport {
    fn text(&self) -> String {
        let Self {
            passed,
            failed,
            skipped,
            ..
        } = self;
        format!("{passed} passed, {failed} failed, {skipped} skipped\n")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(verdict: Verdict) -> CheckOutcome {
        CheckOutcome {
            name: "map/good",
            demand: "pages are mapped",
            verdict,
        }
    }

    #[test]
    fn failed_check_says_why_on_a_line_of_its_own() {
        let passed = line(&outcome(Verdict::Passed));
        assert_eq!(passed.lines().count(), 1);
        let failed = line(&outcome(Verdict::Failed("it was not".to_owned())));
        assert!(failed.starts_with("fail     map/good"), "{failed}");
        assert_eq!(failed.lines().nth(1), Some("         it was not"));
    }

    #[test]
    fn report_counts_checks_by_their_verdict() {
        let config = pagetide_vpri_function::wire::Config {
            spaces_max: 1,
            requests_max: 2,
            ranges_max: 256,
            lease_wait_us: 4,
            generation: 5,
        };
        let report = CheckReport::from(pagetide_conformance::CheckReport {
            socket: "vpri.sock".into(),
            config,
            features: 1,
            checks: vec![
                outcome(Verdict::Passed),
                outcome(Verdict::Failed("no".to_owned())),
                outcome(Verdict::Skipped("not here".to_owned())),
                outcome(Verdict::Passed),
            ],
        });
        assert_eq!((report.passed, report.failed, report.skipped), (2, 1, 1));
        assert_eq!(report.text(), "2 passed, 1 failed, 1 skipped\n");
    }
}
