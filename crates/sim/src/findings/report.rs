// SPDX-License-Identifier: Apache-2.0
//! Results of the checks, for programs and for people.

use std::fmt::Write as _;

use serde::Serialize;

use super::checks::Statement;

/// Whether the model reproduces a finding of the paper.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// Under every setting.
    Holds,
    /// Under some settings, named by the observations.
    HoldsUnderSomeSettings,
    /// Under none.
    NotReproduced,
}

/// The result under one setting.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Observation {
    /// Its name.
    pub setting: String,
    /// The figures.
    pub got: String,
    /// Whether they meet the criterion.
    pub holds: bool,
}

/// One finding of the paper.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// Its name.
    pub id: &'static str,
    /// Where the paper has it.
    pub section: &'static str,
    /// The paper's sentence, shortened.
    pub claim: &'static str,
    /// The criterion, tolerance included.
    pub expected: &'static str,
    /// Runs that it needs.
    pub runs: u64,
    /// The traces of these.
    pub traces: Vec<String>,
    /// Whether it is met.
    pub verdict: Verdict,
    /// The settings tried.
    pub observations: Vec<Observation>,
    /// Why it does not hold where it does not; empty if it holds everywhere.
    pub cause: &'static str,
}

impl Finding {
    /// What `observations` say about `statement`.
    pub(super) fn of(statement: &Statement, observations: Vec<Observation>) -> Self {
        let holding = observations.iter().filter(|seen| seen.holds).count();
        let verdict = match holding {
            all if all == observations.len() => Verdict::Holds,
            0 => Verdict::NotReproduced,
            _ => Verdict::HoldsUnderSomeSettings,
        };
        let cause = match (verdict, statement.cause) {
            (Verdict::Holds, _) => "",
            (_, "") => "not known",
            (_, cause) => cause,
        };
        Self {
            id: statement.id,
            section: statement.section,
            claim: statement.claim,
            expected: statement.expected,
            runs: 0,
            traces: Vec::new(),
            verdict,
            observations,
            cause,
        }
    }
}

/// All findings.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct FindingsReport {
    /// *findings*.
    pub name: &'static str,
    /// Counts.
    pub figures: FindingCounts,
    /// What the runs showed.
    pub findings: Vec<Finding>,
}

/// Findings by verdict, and the runs behind them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct FindingCounts {
    /// Findings.
    pub findings: u64,
    /// Of these, met under every setting.
    pub hold: u64,
    /// Of these, met under some.
    pub hold_under_some: u64,
    /// Of these, met under none.
    pub not_reproduced: u64,
    /// Number of runs.
    pub runs: u64,
    /// Translation requests of all of them.
    pub requests: u64,
    /// Packets of each run.
    pub packets_per_run: u64,
}

impl FindingsReport {
    /// The report of `findings`, made by so many runs.
    pub(super) fn of(findings: Vec<Finding>, mut figures: FindingCounts) -> Self {
        for finding in &findings {
            figures.findings += 1;
            *match finding.verdict {
                Verdict::Holds => &mut figures.hold,
                Verdict::HoldsUnderSomeSettings => &mut figures.hold_under_some,
                Verdict::NotReproduced => &mut figures.not_reproduced,
            } += 1;
        }
        Self {
            name: "findings",
            figures,
            findings,
        }
    }

    /// The report as text.
    #[must_use]
    pub fn render(&self) -> String {
        let FindingCounts {
            findings,
            hold,
            hold_under_some,
            not_reproduced,
            runs,
            requests,
            packets_per_run,
        } = self.figures;
        let mut text = format!(
            "The paper's findings under flavour paper: {runs} runs of {packets_per_run} packets, {requests} \
             requests.\nOf {findings} findings {hold} hold, {hold_under_some} under some readings, and \
             {not_reproduced} are not reproduced.\n"
        );
        for finding in &self.findings {
            // Writing to a string does not fail.
            if render_finding(&mut text, finding).is_err() {
                break;
            }
        }
        text
    }
}

fn render_finding(text: &mut String, finding: &Finding) -> std::fmt::Result {
    let verdict = match finding.verdict {
        Verdict::Holds => "holds",
        Verdict::HoldsUnderSomeSettings => "holds under some settings only",
        Verdict::NotReproduced => "not reproduced",
    };
    writeln!(text, "\n{}: {verdict}", finding.id)?;
    writeln!(text, "  paper, {}: {}", finding.section, finding.claim)?;
    writeln!(text, "  expected: {}", finding.expected)?;
    for seen in &finding.observations {
        let mark = if seen.holds { "yes" } else { "no " };
        writeln!(text, "  {mark}  {}: {}", seen.setting, seen.got)?;
    }
    if !finding.cause.is_empty() {
        writeln!(text, "  cause: {}", finding.cause)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding(holds: &[bool]) -> Finding {
        let observations = holds.iter().map(|holds| Observation {
            setting: "a setting".to_owned(),
            got: "figures".to_owned(),
            holds: *holds,
        });
        let statement = Statement {
            id: "id",
            section: "V",
            claim: "claim",
            expected: "criterion",
            cause: "a cause",
            look: |_| Vec::new(),
        };
        Finding::of(&statement, observations.collect())
    }

    #[test]
    fn verdict_follows_from_the_settings_that_hold() {
        assert_eq!(finding(&[true, true]).verdict, Verdict::Holds);
        let some = finding(&[true, false]).verdict;
        assert_eq!(some, Verdict::HoldsUnderSomeSettings);
        assert_eq!(finding(&[false, false]).verdict, Verdict::NotReproduced);
    }

    #[test]
    fn cause_is_told_only_where_something_does_not_hold() {
        assert_eq!(finding(&[true]).cause, "");
        assert_eq!(finding(&[true, false]).cause, "a cause");
    }

    #[test]
    fn text_has_verdict_settings_and_cause() {
        let findings = vec![finding(&[true, false]), finding(&[true])];
        let report = FindingsReport::of(findings, FindingCounts::default());
        assert_eq!(
            (report.figures.hold, report.figures.hold_under_some),
            (1, 1)
        );
        let text = report.render();
        for part in [
            "id: holds under some settings only",
            "yes  a setting: figures",
            "no   a setting: figures",
            "cause: a cause",
        ] {
            assert!(text.contains(part), "{part} in {text}");
        }
    }
}
