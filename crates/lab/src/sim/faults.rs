// SPDX-License-Identifier: Apache-2.0
//! `pagetide sim study faults`: the model's figures of I/O page faults, and beside them what
//! `bench iopf-scale` measures of the same experiment in the same command.

use pagetide_bench::BenchReport;
use pagetide_bench::iopf_scale::{self, IopfScaleOptions};
use pagetide_report::outcome::{CommandError, print_report};
use pagetide_report::progress::Progress;
use pagetide_sim::{SamplesError, ServiceSamples, read_samples, run_fault_study};
use serde_json::{Value, json};

use super::args::FaultStudyArgs;
use super::{all_cores, of_sim, of_trace};

/// Runs the study.
pub fn run(args: &FaultStudyArgs) -> Result<(), CommandError> {
    let samples = match &args.samples {
        None => ServiceSamples::default(),
        Some(path) => read_samples(path, &args.samples_of).map_err(of_samples)?.0,
    };
    let jobs = args.jobs.unwrap_or_else(all_cores).get();
    let progress = Progress::new("study", "runs");
    let study = run_fault_study(&samples, jobs, &|done, all| progress.at(done, Some(all)));
    drop(progress);
    let study = study.map_err(of_sim)?;
    let mut report = BenchReport::new("faults");
    report.figures = study.figures;
    report.ratios = study.ratios;
    let peers = &mut report.peers;
    peers.insert("paper_serialized_16_over_1".into(), 10.4.into());
    match iopf_scale::aligned_means_ms(&IopfScaleOptions::default()) {
        Ok([serialized_ms, affined_ms]) => {
            peers.insert("bench_serialized_16_ms".into(), json!(serialized_ms));
            peers.insert("bench_affined_16_ms".into(), json!(affined_ms));
            let model_ms = report.figures["serialized_16_ms"].as_f64();
            let ratio = model_ms.map(|model_ms| model_ms / serialized_ms);
            (report.ratios).insert("model_over_bench_serialized_16".into(), json!(ratio));
        }
        Err(error) => {
            peers.insert("bench_serialized_16_ms".into(), error.to_string().into());
            (report.ratios).insert("model_over_bench_serialized_16".into(), Value::Null);
        }
    }
    print_report(&report, args.json.into())
}

/// The command error of samples that cannot be used.
fn of_samples(error: SamplesError) -> CommandError {
    match error {
        SamplesError::File(error) => of_trace(error),
        SamplesError::Content { .. } => CommandError::refused(error),
    }
}
