// SPDX-License-Identifier: Apache-2.0
//! The paper's figures drawn: each panel as SVG, and one page with all of them.
//!
//! [`pagetide_sim::figures`] computes; this draws, for the command line and for whoever shows a figure elsewhere.

mod page;

use std::io::Write as _;
use std::path::{Path, PathBuf};

use pagetide_access_log::{PartialFile, TraceError};
use pagetide_chart::{Axis, Chart, SERIES_MAX, Scale, Series, Shape};
use pagetide_sim::figures::{Computed, ComputedFigures, Form, Panel, Places, Shares};

/// A panel as a picture.
#[derive(Debug)]
pub struct Picture<'a> {
    /// The panel.
    pub panel: &'a Panel,
    /// The name of its file.
    pub file: String,
    /// The picture.
    pub svg: String,
}

/// A figure and its pictures.
pub type Drawn<'a> = (&'a Computed, Vec<Picture<'a>>);

/// Why figures were not drawn.
#[derive(Debug)]
pub enum DrawError {
    /// A picture could not be drawn.
    Chart(String),
    /// A file could not be written.
    File(TraceError),
}

impl std::fmt::Display for DrawError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Chart(reason) => f.write_str(reason),
            Self::File(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for DrawError {}

impl From<TraceError> for DrawError {
    fn from(error: TraceError) -> Self {
        Self::File(error)
    }
}

/// Draws all figures into files in `out`, and the page `index.html` there; returns them and the page's path.
///
/// # Errors
/// If a picture cannot be drawn or a file not written.
pub fn draw_all<'a>(
    computed: &'a ComputedFigures,
    out: &Path,
    packets: u64,
) -> Result<(Vec<Drawn<'a>>, PathBuf), DrawError> {
    let mut drawn = Vec::new();
    for figure in &computed.figures {
        let pictures = draw(figure)?;
        for picture in &pictures {
            write(&out.join(&picture.file), &picture.svg)?;
        }
        drawn.push((figure, pictures));
    }
    let page = out.join("index.html");
    write(&page, &page::page(&drawn, packets))?;
    Ok((drawn, page))
}

/// Draws the panels of a figure.
///
/// # Errors
/// If a chart cannot be drawn.
pub fn draw(figure: &Computed) -> Result<Vec<Picture<'_>>, DrawError> {
    figure
        .panels
        .iter()
        .map(|panel| {
            let svg = chart(figure, panel).svg();
            Ok(Picture {
                panel,
                file: file_name(figure, panel),
                svg: svg.map_err(|error| DrawError::Chart(error.to_string()))?,
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

fn write(path: &Path, text: &str) -> Result<(), TraceError> {
    let (partial, mut file) = PartialFile::create(path)?;
    file.write_all(text.as_bytes())
        .map_err(|source| partial.error(source))?;
    partial.complete(&file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_sim::figures::{Beside, Curve};

    fn figure() -> Computed {
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
