// SPDX-License-Identifier: Apache-2.0
//! `pagetide host scheduler`: shows the scheduler of background work, changes it, or takes changes back.

use super::{ScheduleChange, SchedulerReport, Share, api::PATH, args::SchedulerArgs};
use crate::command::Call;
use hyper::Method;
use pagetide_report::{
    outcome::CommandError,
    text::{Text, table, word},
};

/// Executes it.
///
/// # Errors
/// The daemon's, or that there is none.
pub fn execute(args: &SchedulerArgs) -> Result<(), CommandError> {
    let change = args.change();
    let is_change = change != ScheduleChange::default();
    let (method, body) = match (args.reset, is_change) {
        (true, true) => {
            return Err(CommandError::refused(
                "--reset returns to the settings of the start, so nothing else can be set with it: give it alone",
            ));
        }
        (true, false) => (Method::DELETE, None),
        (false, true) => (Method::PATCH, Some(&change)),
        (false, false) => (Method::GET, None),
    };
    let call = Call {
        client: &args.client,
        method,
        path: PATH.into(),
    };
    call.make::<_, SchedulerReport>(body)
}

impl Text for SchedulerReport {
    fn text(&self) -> String {
        let header = [
            "CLASS",
            "SHARE",
            "RUNS",
            "USED",
            "PASSED DOWN",
            "IDLE",
            "HELD BACK",
            "OVERRUNS",
        ];
        let mut rows = vec![header.map(String::from)];
        rows.extend(self.classes.iter().map(|class| {
            let permille = u32::try_from(class.share_permille).unwrap_or(0);
            let seconds = |seconds: f64| format!("{seconds:.3} s");
            [
                class.class.clone(),
                Share { permille }.to_string(),
                class.runs.to_string(),
                seconds(class.own_seconds + class.inherited_seconds),
                seconds(class.passed_down_seconds),
                seconds(class.idle_seconds),
                format!("{} ({})", class.held_runs, seconds(class.held_seconds)),
                class.overruns.to_string(),
            ]
        }));
        let source = match self.is_kept {
            true => "set while it ran, and kept over restarts",
            false => "as the daemon was started",
        };
        format!(
            "cycle {} us, longest run {} us, penalty {} %, idle time {}, background on CPUs {} ({source})\n{}",
            self.cycle_us,
            self.longest_run_us,
            self.penalty_percent,
            word(&self.idle_time),
            self.background_cpus,
            table(&rows)
        )
    }
}
