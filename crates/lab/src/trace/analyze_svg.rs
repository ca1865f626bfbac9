// SPDX-License-Identifier: Apache-2.0
//! Charts as SVG, which is text: a few lines of code write it, so no drawing crate is needed. A
//! [`Chart`] does not know the meaning of its data.

use std::fmt::{Display, Write as _};

/// Size of a plot, in pixels.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 440.0;

/// Margins around the axes: for numbers, names, title and legend.
const LEFT: f64 = 76.0;
const RIGHT: f64 = 24.0;
const TOP: f64 = 84.0;
const BOTTOM: f64 = 72.0;

/// Colours that are distinguishable with colour blindness (Okabe and Ito).
const COLOURS: [&str; 7] = [
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
];

/// Most series in a plot; more could not be told apart.
pub const SERIES_MAX: usize = COLOURS.len();

/// The x axis.
#[derive(Clone, Debug)]
pub enum Axis {
    /// Numbers from 0.
    Numbers {
        /// What they count.
        name: String,
        /// The largest.
        max: f64,
    },
    /// Categories side by side; each is as wide as the step between two numbers.
    Things {
        /// What they are.
        name: String,
        /// Their names, from left to right.
        things: Vec<String>,
    },
}

/// A shape to draw.
#[derive(Clone, Debug)]
pub enum Shape {
    /// A line from point to point, in axis coordinates.
    Line(Vec<(f64, f64)>),
    /// One bar per category.
    Bars(Vec<f64>),
    /// Dots, in axis coordinates.
    Dots(Vec<(f64, f64)>),
}

/// Data drawn in one colour.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// How it is drawn.
    pub shape: Shape,
}

/// Format of the numbers on the y axis.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Scale {
    /// As they are.
    Plain,
    /// As percentages.
    Shares,
}

/// A chart: title, axes and data.
#[derive(Clone, Debug)]
pub struct Chart {
    /// The title.
    pub title: String,
    /// The x axis.
    pub x: Axis,
    /// What the y axis counts.
    pub y_name: String,
    /// The largest y value that must fit.
    pub y_max: f64,
    /// Format of the y values.
    pub y_scale: Scale,
    /// The data, at most [`SERIES_MAX`] series.
    pub series: Vec<Series>,
    /// A labelled vertical line at an x value.
    pub mark: Option<(f64, String)>,
}

impl Shape {
    /// Its largest y value.
    #[must_use]
    pub fn top(&self) -> f64 {
        match self {
            Self::Line(points) | Self::Dots(points) => {
                points.iter().map(|(_, y)| *y).fold(0.0, f64::max)
            }
            Self::Bars(heights) => heights.iter().copied().fold(0.0, f64::max),
        }
    }
}

/// Steps of a y axis.
struct Upright {
    step: f64,
    max: f64,
}

impl Chart {
    /// The chart as an SVG file.
    #[must_use]
    pub fn svg(&self) -> String {
        let upright = Upright::up_to(self.y_max);
        let mut out = String::new();
        put(
            &mut out,
            format_args!(
                "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
                 width=\"{WIDTH}\" height=\"{HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
                 <rect width=\"100%\" height=\"100%\" fill=\"white\"/>"
            ),
        );
        let title = format!("<tspan font-size=\"15\">{}</tspan>", escaped(&self.title));
        text(&mut out, (LEFT, 24.0), "start", &title);
        self.legend(&mut out);
        self.draw_upright(&mut out, &upright);
        self.draw_level(&mut out);
        for (number, series) in self.series.iter().enumerate() {
            self.draw(&mut out, number, series, &upright);
        }
        self.draw_mark(&mut out);
        put(&mut out, format_args!("</svg>"));
        out
    }

    /// Horizontal position of an x value.
    fn across(&self, x: f64) -> f64 {
        let max = match &self.x {
            Axis::Numbers { max, .. } => *max,
            Axis::Things { things, .. } => number(things.len()),
        };
        LEFT + x / max.max(f64::MIN_POSITIVE) * (WIDTH - LEFT - RIGHT)
    }

    /// The legend, in one or two rows.
    fn legend(&self, out: &mut String) {
        let (mut x, mut y) = (LEFT, 37.0);
        for (series, colour) in self.series.iter().zip(COLOURS) {
            // Letters are about seven pixels wide.
            let width = 40.0 + 7.0 * number(series.name.chars().count());
            if x > LEFT && x + width > WIDTH {
                (x, y) = (LEFT, y + 19.0);
            }
            put(
                out,
                format_args!(
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"12\" height=\"12\" \
                     fill=\"{colour}\"/>"
                ),
            );
            text(out, (x + 17.0, y + 10.0), "start", &escaped(&series.name));
            x += width;
        }
    }

    fn draw_upright(&self, out: &mut String, upright: &Upright) {
        let mut y = 0.0;
        while y <= upright.max * 1.001 {
            let at = upright.at(y);
            line(out, (LEFT, at), (WIDTH - RIGHT, at), "#dddddd");
            let label = match self.y_scale {
                Scale::Plain => short(y),
                Scale::Shares => format!("{}%", short(y * 100.0)),
            };
            text(out, (LEFT - 8.0, at + 4.0), "end", &label);
            y += upright.step;
        }
        let middle = f64::midpoint(TOP, HEIGHT - BOTTOM);
        put(
            out,
            format_args!(
                "<text transform=\"translate(18 {middle:.1}) rotate(-90)\" \
                 text-anchor=\"middle\">{}</text>",
                escaped(&self.y_name)
            ),
        );
    }

    fn draw_level(&self, out: &mut String) {
        let base = HEIGHT - BOTTOM;
        line(out, (LEFT, base), (WIDTH - RIGHT, base), "#000000");
        let name = match &self.x {
            Axis::Numbers { name, max } => {
                let step = step_for(*max);
                let mut x = 0.0;
                while x <= max * 1.001 {
                    let at = self.across(x);
                    line(out, (at, base), (at, base + 5.0), "#000000");
                    text(out, (at, base + 20.0), "middle", &short(x));
                    x += step;
                }
                name
            }
            Axis::Things { name, things } => {
                for (thing, x) in things.iter().zip(0u32..) {
                    let at = self.across(f64::from(x) + 0.5);
                    put(
                        out,
                        format_args!(
                            "<text font-size=\"10\" text-anchor=\"end\" \
                             transform=\"translate({:.1} {:.1}) rotate(-30)\">{}</text>",
                            at + 6.0,
                            base + 14.0,
                            escaped(thing)
                        ),
                    );
                }
                name
            }
        };
        let middle = f64::midpoint(LEFT, WIDTH - RIGHT);
        text(out, (middle, HEIGHT - 10.0), "middle", &escaped(name));
    }

    fn draw(&self, out: &mut String, which: usize, series: &Series, upright: &Upright) {
        let Some(colour) = COLOURS.get(which) else {
            return;
        };
        match &series.shape {
            Shape::Dots(points) => {
                for (x, y) in points {
                    put(
                        out,
                        format_args!(
                            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\" \
                             fill-opacity=\"0.7\"/>",
                            self.across(*x),
                            upright.at(*y)
                        ),
                    );
                }
            }
            Shape::Line(points) => {
                let mut path = String::new();
                for (x, y) in points {
                    let begun = if path.is_empty() { 'M' } else { 'L' };
                    put(
                        &mut path,
                        format_args!("{begun}{:.1} {:.1}", self.across(*x), upright.at(*y)),
                    );
                }
                put(
                    out,
                    format_args!(
                        "<path d=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                        path.trim_end()
                    ),
                );
            }
            Shape::Bars(heights) => {
                // Bars of one category stand side by side, with a gap before the next category.
                let share = 0.8 / number(self.series.len()).max(1.0);
                let first = 0.1 + share * number(which);
                for (height, x) in heights.iter().zip(0u32..) {
                    let left = self.across(f64::from(x) + first);
                    let right = self.across(f64::from(x) + first + share);
                    let top = upright.at(*height);
                    put(
                        out,
                        format_args!(
                            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{:.1}\" \
                             height=\"{:.1}\" fill=\"{colour}\"/>",
                            right - left,
                            HEIGHT - BOTTOM - top
                        ),
                    );
                }
            }
        }
    }

    fn draw_mark(&self, out: &mut String) {
        let Some((x, word)) = &self.mark else {
            return;
        };
        let at = self.across(*x);
        line(out, (at, TOP), (at, HEIGHT - BOTTOM), "#777777");
        text(
            out,
            (at + 5.0, HEIGHT - BOTTOM - 8.0),
            "start",
            &escaped(word),
        );
    }
}

impl Upright {
    /// A y axis that ends at a whole number of steps.
    fn up_to(max: f64) -> Self {
        let step = step_for(max);
        Self {
            step,
            max: (max / step).ceil().max(1.0) * step,
        }
    }

    /// Vertical position of a y value.
    fn at(&self, y: f64) -> f64 {
        HEIGHT - BOTTOM - y / self.max * (HEIGHT - BOTTOM - TOP)
    }
}

/// A step of 1, 2 or 5 times a power of ten, at most seven of which fit in `max`.
fn step_for(max: f64) -> f64 {
    if !max.is_normal() || max < 0.0 {
        return 1.0;
    }
    let power = 10f64.powf(max.log10().floor() - 1.0);
    [1.0, 2.0, 5.0, 10.0, 20.0]
        .map(|step| step * power)
        .into_iter()
        .find(|step| max / step <= 7.0)
        .unwrap_or(max)
}

/// A number in short form.
fn short(value: f64) -> String {
    let text = format!("{value:.3}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

#[expect(clippy::cast_precision_loss, reason = "counts of what is in a picture")]
const fn number(count: usize) -> f64 {
    count as f64
}

fn line(out: &mut String, from: (f64, f64), to: (f64, f64), colour: &str) {
    put(
        out,
        format_args!(
            "<line x1=\"{:.1}\" y1=\"{:.1}\" x2=\"{:.1}\" y2=\"{:.1}\" stroke=\"{colour}\"/>",
            from.0, from.1, to.0, to.1
        ),
    );
}

/// Writes text; any markup in it must be escaped already.
fn text(out: &mut String, at: (f64, f64), anchor: &str, words: &dyn Display) {
    put(
        out,
        format_args!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"{anchor}\">{words}</text>",
            at.0, at.1
        ),
    );
}

/// Appends a line.
fn put(out: &mut String, what: std::fmt::Arguments<'_>) {
    if writeln!(out, "{what}").is_err() {
        unreachable!("writing to a string does not fail");
    }
}

/// Escapes text that may come from a file or VM name.
fn escaped(words: &str) -> String {
    let mut escaped = String::with_capacity(words.len());
    for letter in words.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            letter if letter.is_control() => escaped.push('\u{fffd}'),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(name: &str) -> Chart {
        Chart {
            title: name.to_owned(),
            x: Axis::Things {
                name: "things".to_owned(),
                things: vec!["a".to_owned(), "b".to_owned()],
            },
            y_name: "share".to_owned(),
            y_max: 0.5,
            y_scale: Scale::Shares,
            series: vec![
                Series {
                    name: "bars".to_owned(),
                    shape: Shape::Bars(vec![0.25, 0.5]),
                },
                Series {
                    name: "line".to_owned(),
                    shape: Shape::Line(vec![(0.0, 0.0), (2.0, 0.5)]),
                },
            ],
            mark: Some((1.0, "here".to_owned())),
        }
    }

    #[test]
    fn names_cannot_break_out_of_the_picture() {
        let svg = chart("</text><script>\"&\u{1}").svg();
        assert!(!svg.contains("<script>") && svg.contains("&lt;script&gt;&quot;&amp;\u{fffd}"));
    }

    #[test]
    fn bars_and_lines_are_in_proportion() {
        let svg = chart("x").svg();
        let full = HEIGHT - TOP - BOTTOM;
        for part in [
            format!("height=\"{:.1}\" fill", full),
            format!("height=\"{:.1}\" fill", full / 2.0),
            format!("L{:.1} {TOP:.1}", WIDTH - RIGHT),
            ">50%</text>".to_owned(),
        ] {
            assert!(svg.contains(&part), "no {part} in {svg}");
        }
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }

    #[test]
    fn steps_are_round_and_few() {
        for (max, step) in [
            (1.0, 0.2),
            (0.283, 0.05),
            (30.0, 5.0),
            (61.0, 10.0),
            (9.0, 2.0),
        ] {
            let got: f64 = step_for(max);
            assert!((got - step).abs() < 1e-9, "{max}: {got}");
        }
        assert_eq!(step_for(0.0), 1.0);
        assert_eq!(step_for(f64::NAN), 1.0);
        assert!(chart("x").svg().len() < 10_000);
    }

    #[test]
    fn picture_of_nothing_is_one_all_the_same() {
        let nothing = Chart {
            x: Axis::Numbers {
                name: "minutes".to_owned(),
                max: 0.0,
            },
            y_max: 0.0,
            series: vec![],
            mark: None,
            ..chart("x")
        };
        let svg = nothing.svg();
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"));
    }
}
