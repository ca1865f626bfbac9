// SPDX-License-Identifier: Apache-2.0
//! `pagetide sim figures`: the paper's figures as pictures, data, and one page.
//!
//! [`pagetide_sim::figures`] computes, [`pagetide_figures`] draws; this module reports.

use pagetide_figures::{DrawError, draw_all};
use pagetide_report::outcome::{CommandError, print_report};
use pagetide_report::text::{Text, table};
use pagetide_sim::Stop;
use pagetide_sim::figures::{Beside, Computed, FigureOptions, compute};
use serde::Serialize;

use super::args::FiguresArgs;
use super::{all_cores, build, host, of_study, of_trace, sweep_progress};

/// What was drawn.
#[derive(Debug, Serialize)]
struct FiguresReport {
    name: &'static str,
    figures: Counts,
    /// The page with all of them.
    page: String,
    /// The paper's numbers beside ours.
    paper: Vec<OfFigure>,
}

/// Figures of the command itself.
#[derive(Debug, Serialize)]
struct Counts {
    /// Figures that were drawn.
    drawn: usize,
    /// Tables.
    tables: usize,
    /// Pictures: a figure has one for each panel and reading.
    pictures: usize,
    /// Packets of each run.
    packets: u64,
    /// Points of all studies.
    points: usize,
    /// Of these, run now.
    points_run: usize,
    /// Impossible ones that were left out.
    points_skipped: usize,
    /// Translation requests simulated now.
    requests: u64,
    /// How long it all took.
    wall_seconds: f64,
}

/// Numbers of one figure.
#[derive(Debug, Serialize)]
struct OfFigure {
    figure: &'static str,
    #[serde(flatten)]
    beside: Beside,
}

/// Computes and draws.
pub fn run(args: FiguresArgs) -> Result<(), CommandError> {
    std::fs::create_dir_all(&args.out)
        .map_err(|error| CommandError::refused(format!("{}: {error}", args.out.display())))?;
    let options = FigureOptions {
        out: args.out,
        packets: args.packets,
        only: args.only,
        jobs: args.jobs.unwrap_or_else(all_cores),
        build: build()?,
        host: host(),
        stop: Stop::default(),
    };
    let computed = sweep_progress("figures", |told| compute(&options, told)).map_err(of_study)?;
    let (drawn, page) =
        draw_all(&computed, &options.out, options.packets).map_err(|error| match error {
            DrawError::Chart(reason) => CommandError::failed(reason),
            DrawError::File(error) => of_trace(error),
        })?;
    let report = FiguresReport {
        name: "figures",
        figures: Counts {
            drawn: drawn
                .iter()
                .filter(|(_, pictures)| !pictures.is_empty())
                .count(),
            tables: drawn
                .iter()
                .filter(|(_, pictures)| pictures.is_empty())
                .count(),
            pictures: drawn.iter().map(|(_, pictures)| pictures.len()).sum(),
            packets: options.packets,
            points: computed.points,
            points_run: computed.run,
            points_skipped: computed.skipped,
            requests: computed.requests,
            wall_seconds: computed.wall_seconds,
        },
        page: page.display().to_string(),
        paper: numbers(&computed.figures),
    };
    print_report(&report, args.json.into())
}

fn numbers(figures: &[Computed]) -> Vec<OfFigure> {
    let of = |figure: &Computed| {
        let id = figure.id;
        let beside = figure.beside.iter().cloned();
        beside
            .map(move |beside| OfFigure { figure: id, beside })
            .collect::<Vec<_>>()
    };
    figures.iter().flat_map(of).collect()
}

impl Text for FiguresReport {
    fn text(&self) -> String {
        let mut text = String::new();
        for (at, number) in self.paper.iter().enumerate() {
            if at == 0 || self.paper[at - 1].figure != number.figure {
                text += &format!("\n{}\n", number.figure);
            }
            let Beside { what, paper, ours } = &number.beside;
            text += &format!("  {what}: paper {paper}\n");
            let rows: Vec<[String; 2]> = ours
                .iter()
                .map(|(reading, ours)| [format!("    {reading}"), ours.clone()])
                .collect();
            text += &table(&rows);
        }
        let counts = &self.figures;
        text += &format!(
            "\n{}: {} figures in {} pictures, {} tables; {} points, {} run now, {:.1} s\n",
            self.page,
            counts.drawn,
            counts.pictures,
            counts.tables,
            counts.points,
            counts.points_run,
            counts.wall_seconds
        );
        text
    }
}
