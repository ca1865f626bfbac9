// SPDX-License-Identifier: Apache-2.0
//! `pagetide sim figures`: the paper's figures as pictures, data, and one page.
//!
//! [`pagetide_sim::figures`] computes; this module draws each panel as SVG and writes `index.html`, which
//! contains the pictures, so that it can be read and sent on its own, without a network.

mod page;

use std::io::Write as _;
use std::path::Path;

use pagetide_access_log::PartialFile;
use pagetide_chart::{Axis, Chart, SERIES_MAX, Scale, Series, Shape};
use pagetide_report::outcome::{CommandError, print_report};
use pagetide_report::text::{Text, table};
use pagetide_sim::figures::{
    Beside, Computed, FigureOptions, Form, Panel, Places, Shares, compute,
};
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

/// A panel as a picture.
pub(super) struct Picture<'a> {
    pub(super) panel: &'a Panel,
    pub(super) file: String,
    pub(super) svg: String,
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
    };
    let computed = sweep_progress("figures", |told| compute(&options, told)).map_err(of_study)?;
    let mut drawn = Vec::new();
    for figure in &computed.figures {
        let pictures = draw(figure)?;
        for picture in &pictures {
            write(&options.out.join(&picture.file), &picture.svg)?;
        }
        drawn.push((figure, pictures));
    }
    let page = options.out.join("index.html");
    write(&page, &page::page(&drawn, options.packets))?;
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

fn draw(figure: &Computed) -> Result<Vec<Picture<'_>>, CommandError> {
    figure
        .panels
        .iter()
        .map(|panel| {
            Ok(Picture {
                panel,
                file: file_name(figure, panel),
                svg: chart(figure, panel).svg().map_err(CommandError::failed)?,
            })
        })
        .collect()
}

/// `figure-10-rr1-short-walk-ptb-of-requests-third-page-ring.svg`
fn file_name(figure: &Computed, panel: &Panel) -> String {
    let mut stem = format!("figure-{}", figure.id);
    for part in [&panel.name, &panel.reading] {
        if !part.is_empty() {
            stem.push('-');
            stem.extend(
                part.to_lowercase()
                    .chars()
                    .filter_map(|letter| match letter {
                        ' ' => Some('-'),
                        ',' => None,
                        other => Some(other),
                    }),
            );
        }
    }
    stem + ".svg"
}

fn chart(figure: &Computed, panel: &Panel) -> Chart {
    // A named place is as wide as a step between two numbers, and its point is in its middle.
    let middle = match panel.places {
        Places::Named(_) => 0.5,
        Places::Numbers(_) => 0.0,
    };
    let series: Vec<Series> = panel
        .curves
        .iter()
        .take(SERIES_MAX)
        .map(|curve| {
            let points = curve.points.iter().map(|(x, y)| (x + middle, *y)).collect();
            Series {
                name: curve.name.clone(),
                shape: match panel.form {
                    Form::Lines => Shape::Line(points),
                    Form::Dots => Shape::Dots(points),
                    Form::Bars => Shape::Bars(curve.points.iter().map(|(_, y)| *y).collect()),
                },
            }
        })
        .collect();
    let top = series
        .iter()
        .map(|series| series.shape.top())
        .fold(0.0, f64::max);
    let title = match panel.name.as_str() {
        "" => figure.title.to_owned(),
        name => format!("{}: {name}", figure.title),
    };
    Chart {
        title,
        x: match &panel.places {
            Places::Named(places) => Axis::Things {
                name: panel.x_name.to_owned(),
                things: places.clone(),
            },
            Places::Numbers(max) => Axis::Numbers {
                name: panel.x_name.to_owned(),
                max: *max,
            },
        },
        y_name: panel.y_name.to_owned(),
        y_max: top * 1.05,
        y_scale: match panel.shares {
            Shares::Yes => Scale::Shares,
            Shares::No => Scale::Plain,
        },
        series,
        mark: None,
    }
}

fn write(path: &Path, text: &str) -> Result<(), CommandError> {
    let write = || {
        let (partial, mut file) = PartialFile::create(path)?;
        file.write_all(text.as_bytes())
            .map_err(|source| partial.error(source))?;
        partial.complete(&file)
    };
    write().map_err(of_trace)
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

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_sim::figures::Curve;

    pub(super) fn figure() -> Computed {
        let panel = |reading: &str| Panel {
            reading: reading.to_owned(),
            name: "RR1".to_owned(),
            x_name: "tenants",
            y_name: "Gb/s",
            shares: Shares::No,
            places: Places::Named(vec!["4".into(), "8".into()]),
            form: Form::Lines,
            curves: vec![Curve {
                name: "Base".into(),
                points: vec![(0.0, 10.0), (1.0, 20.0)],
            }],
        };
        Computed {
            id: "10",
            title: "Scalability <&>",
            section: "V-B",
            about: "two presets",
            panels: vec![panel("short walk, PTB of requests"), panel("another")],
            beside: vec![Beside {
                what: "use of the link",
                paper: "6%",
                ours: vec![("short walk, PTB of requests".into(), "7%".into())],
            }],
            files: vec!["figure-10.parquet".into()],
        }
    }

    #[test]
    fn pictures_have_names_of_their_own_and_lines_through_the_middle_of_places() {
        let figure = figure();
        let pictures = draw(&figure).unwrap();
        assert_eq!(
            pictures[0].file,
            "figure-10-rr1-short-walk-ptb-of-requests.svg"
        );
        assert_ne!(pictures[0].file, pictures[1].file);
        let chart = chart(&figure, &figure.panels[0]);
        let Shape::Line(points) = &chart.series[0].shape else {
            panic!("no line");
        };
        assert_eq!(points[..], [(0.5, 10.0), (1.5, 20.0)]);
    }

    #[test]
    fn page_needs_nothing_from_elsewhere_and_escapes_what_it_shows() {
        let figure = figure();
        let drawn = [(&figure, draw(&figure).unwrap())];
        let page = page::page(&drawn, 100);
        assert_eq!(page.matches("<svg").count(), 2);
        assert!(page.contains("Scalability &lt;&amp;&gt;") && page.contains("<td>7%</td>"));
        for other in ["src=", "<script", "@import", "url(", "<link"] {
            assert!(!page.contains(other), "{other}");
        }
        // The name space of SVG is an address that nobody fetches.
        let addresses = page.matches("http").count();
        assert_eq!(
            addresses,
            page.matches("http://www.w3.org/2000/svg").count()
        );
    }
}
