// SPDX-License-Identifier: Apache-2.0
//! Charts as SVG, drawn by the crate plotters. A [`Chart`] does not know the meaning of its data.
//!
//! ```text
//!   title                         every series has a colour of its own
//!   ■ series  ■ series            as many rows as the names need
//!   y │▁▃▆ ⌇mark
//!     └───────
//!      x or things
//! ```

use std::io;

use plotters::chart::{ChartBuilder, ChartContext};
use plotters::coord::Shift;
use plotters::coord::types::RangedCoordf64;
use plotters::drawing::{DrawingArea, DrawingAreaErrorKind, IntoDrawingArea as _};
use plotters::element::{Circle, PathElement, Rectangle, Text};
use plotters::prelude::{Cartesian2d, SVGBackend};
use plotters::series::LineSeries;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use plotters::style::{
    BLACK, Color as _, FontTransform, IntoFont as _, RGBColor, TRANSPARENT, TextStyle, WHITE,
};

/// Size of a chart, in pixels.
const SIZE: (u32, u32) = (760, 460);

/// Margins around the axes: for numbers and names, title and legend.
const LEFT: i32 = 76;
const RIGHT: i32 = 24;
const TOP: i32 = 84;
const BOTTOM: i32 = 48;
/// Between the names of the axes and the edge.
const EDGE: i32 = 8;
/// Room for upright names of things, at most.
const UPRIGHT_MAX: i32 = 110;

/// Sizes of text. The crate's points are 1.24 pixels.
const TITLE: f64 = 18.0;
const NORMAL: f64 = 15.0;
const SMALL: f64 = 13.0;
/// Width of a letter of [`SMALL`] and [`NORMAL`] text, about.
const LETTER: i32 = 7;

const GREY: RGBColor = RGBColor(0x77, 0x77, 0x77);
const LIGHT_GREY: RGBColor = RGBColor(0xdd, 0xdd, 0xdd);

/// Colours that are distinguishable with colour blindness (Okabe and Ito).
const COLOURS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x00, 0x00, 0x00),
];

/// Most series in a plot; more could not be told apart.
pub const SERIES_MAX: usize = COLOURS.len();

/// All of the picture, in pixels.
type Canvas<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// What is between the axes, in their numbers.
type Plane<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;
/// Why the crate drew nothing.
type NotDrawn = DrawingAreaErrorKind<io::Error>;

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

impl Chart {
    /// The chart as an SVG file.
    ///
    /// # Errors
    /// If the crate cannot draw it.
    pub fn svg(&self) -> io::Result<String> {
        let mut svg = String::new();
        self.draw(SVGBackend::with_string(&mut svg, SIZE))
            .map_err(|error| io::Error::other(format!("the chart cannot be drawn: {error}")))?;
        Ok(svg)
    }

    fn draw(&self, backend: SVGBackend<'_>) -> Result<(), NotDrawn> {
        let canvas = backend.into_drawing_area();
        canvas.fill(&WHITE)?;
        canvas.draw(&Text::new(shown(&self.title), (LEFT, 12), font(TITLE)))?;
        self.draw_legend(&canvas)?;
        let x_max = match &self.x {
            Axis::Numbers { max, .. } => *max,
            Axis::Things { things, .. } => number(things.len()),
        };
        let mut plane = ChartBuilder::on(&canvas)
            .margin_top(TOP)
            .margin_right(RIGHT)
            .margin_bottom(EDGE)
            .margin_left(EDGE)
            .x_label_area_size(BOTTOM + self.upright_room())
            .y_label_area_size(LEFT - EDGE)
            .build_cartesian_2d(0.0..some(x_max), 0.0..some(self.y_max))?;
        self.draw_axes(&mut plane)?;
        self.draw_things(&canvas, &plane)?;
        for (which, (series, colour)) in self.series.iter().zip(COLOURS).enumerate() {
            self.draw_shape(&mut plane, which, &series.shape, colour)?;
        }
        self.draw_mark(&canvas, &mut plane)?;
        canvas.present()
    }

    /// In rows, each as full as it may be.
    fn draw_legend(&self, canvas: &Canvas<'_>) -> Result<(), NotDrawn> {
        let (mut x, mut y) = (LEFT, 38);
        for (series, colour) in self.series.iter().zip(COLOURS) {
            let name = shown(&series.name);
            let width = 40 + width_of(&name);
            if x > LEFT && x + width > pixels(SIZE.0) {
                (x, y) = (LEFT, y + 19);
            }
            let corners = [(x, y), (x + 12, y + 12)];
            canvas.draw(&Rectangle::new(corners, colour.filled()))?;
            canvas.draw(&Text::new(name, (x + 17, y), font(NORMAL)))?;
            x += width;
        }
        Ok(())
    }

    fn draw_axes(&self, plane: &mut Plane<'_, '_>) -> Result<(), NotDrawn> {
        let (x_name, x_labels) = match &self.x {
            Axis::Numbers { name, .. } => (name, 8),
            Axis::Things { name, .. } => (name, 0),
        };
        let y_scale = self.y_scale;
        plane
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(LIGHT_GREY)
            .x_desc(shown(x_name))
            .y_desc(shown(&self.y_name))
            .axis_desc_style(font(NORMAL))
            .label_style(font(SMALL))
            .x_labels(x_labels)
            .y_labels(7)
            .x_label_formatter(&|x| short(*x))
            .y_label_formatter(&|y| match y_scale {
                Scale::Plain => short(*y),
                Scale::Shares => format!("{}%", short(y * 100.0)),
            })
            .draw()
    }

    /// The names of things along the x axis: upright where they have no room side by side.
    fn draw_things(&self, canvas: &Canvas<'_>, plane: &Plane<'_, '_>) -> Result<(), NotDrawn> {
        let Axis::Things { things, .. } = &self.x else {
            return Ok(());
        };
        let style = match self.upright_room() {
            0 => font(SMALL).pos(Pos::new(HPos::Center, VPos::Top)),
            _ => font(SMALL)
                .pos(Pos::new(HPos::Left, VPos::Center))
                .transform(FontTransform::Rotate90),
        };
        for (thing, x) in things.iter().zip(0_u32..) {
            let (x, y) = plane.backend_coord(&(f64::from(x) + 0.5, 0.0));
            canvas.draw(&Text::new(shown(thing), (x, y + 7), style.clone()))?;
        }
        Ok(())
    }

    /// Pixels for names that stand upright; 0 if all lie side by side.
    fn upright_room(&self) -> i32 {
        let Axis::Things { things, .. } = &self.x else {
            return 0;
        };
        let longest = things
            .iter()
            .map(|thing| width_of(thing))
            .max()
            .unwrap_or(0);
        let count = i32::try_from(things.len()).unwrap_or(i32::MAX);
        match longest.saturating_mul(count) <= pixels(SIZE.0) - LEFT - RIGHT {
            true => 0,
            false => longest.min(UPRIGHT_MAX),
        }
    }

    fn draw_shape(
        &self,
        plane: &mut Plane<'_, '_>,
        which: usize,
        shape: &Shape,
        colour: RGBColor,
    ) -> Result<(), NotDrawn> {
        match shape {
            Shape::Dots(points) => {
                let style = colour.mix(0.7).filled();
                plane.draw_series(points.iter().map(|at| Circle::new(*at, 4, style)))?;
            }
            Shape::Line(points) => {
                let line = LineSeries::new(points.iter().copied(), colour.stroke_width(2));
                plane.draw_series(line)?;
            }
            Shape::Bars(heights) => {
                // Bars of one category stand side by side, with a gap before the next category.
                let share = 0.8 / number(self.series.len()).max(1.0);
                let first = 0.1 + share * number(which);
                let bars = heights.iter().zip(0_u32..).map(|(height, x)| {
                    let left = f64::from(x) + first;
                    Rectangle::new([(left, 0.0), (left + share, *height)], colour.filled())
                });
                plane.draw_series(bars)?;
            }
        }
        Ok(())
    }

    fn draw_mark(&self, canvas: &Canvas<'_>, plane: &mut Plane<'_, '_>) -> Result<(), NotDrawn> {
        let Some((x, word)) = &self.mark else {
            return Ok(());
        };
        let line = PathElement::new([(*x, 0.0), (*x, some(self.y_max))], GREY);
        plane.draw_series(std::iter::once(line))?;
        let (x, y) = plane.backend_coord(&(*x, 0.0));
        let style = font(NORMAL).pos(Pos::new(HPos::Left, VPos::Bottom));
        canvas.draw(&Text::new(shown(word), (x + 5, y - 8), style))
    }
}

/// The end of an axis from 0, which has to be somewhere else.
fn some(max: f64) -> f64 {
    match max.is_normal() && max > 0.0 {
        true => max,
        false => 1.0,
    }
}

fn font(size: f64) -> TextStyle<'static> {
    TextStyle::from(("sans-serif", size).into_font()).color(&BLACK)
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

fn pixels(size: u32) -> i32 {
    i32::try_from(size).unwrap_or(i32::MAX)
}

/// Width of some text, about.
fn width_of(text: &str) -> i32 {
    let letters = i32::try_from(text.chars().count()).unwrap_or(i32::MAX);
    letters.saturating_mul(LETTER)
}

/// Text that may come from a file or the name of a VM: the crate escapes markup, but SVG has no control
/// characters at all.
fn shown(text: &str) -> String {
    let visible = |letter: char| match letter.is_control() {
        true => '\u{fffd}',
        false => letter,
    };
    text.chars().map(visible).collect()
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

    /// Values of the attribute `name` of the elements `tag` that have `colour`.
    fn attributes(svg: &str, tag: &str, name: &str, colour: &str) -> Vec<f64> {
        let begin = format!("<{tag} ");
        let elements = svg.lines().filter(|line| line.starts_with(&begin));
        elements
            .filter(|line| line.contains(colour))
            .map(|line| {
                let (_, value) = line.split_once(&format!("{name}=\"")).unwrap();
                value.split_once('"').unwrap().0.parse().unwrap()
            })
            .collect()
    }

    #[test]
    fn names_cannot_break_out_of_the_picture() {
        let svg = chart("</text><script>\"&\u{1}").svg().unwrap();
        assert!(!svg.contains("<script>") && svg.contains("&lt;script&gt;&quot;&amp;\u{fffd}"));
    }

    #[test]
    fn bars_are_in_proportion_and_stand_on_the_axis() {
        let svg = chart("x").svg().unwrap();
        let of = |name| attributes(&svg, "rect", name, "#0072B2");
        // The first is the legend's.
        let [_, low, high] = *of("height") else {
            panic!("not two bars in {svg}");
        };
        assert!((high - 2.0 * low).abs() <= 2.0, "{low} {high}");
        let [_, low_top, high_top] = *of("y") else {
            panic!("not two bars in {svg}");
        };
        assert!((low_top + low - high_top - high).abs() <= 1.0);
        assert!((high_top - f64::from(TOP)).abs() <= 1.0, "{high_top}");
        for part in ["50%", "here", "bars", "line", "things"] {
            assert!(svg.contains(&format!("{part}\n")), "no {part} in {svg}");
        }
        assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
    }

    #[test]
    fn long_names_of_things_stand_upright_and_short_ones_lie() {
        let mut chart = chart("x");
        assert_eq!(chart.upright_room(), 0);
        chart.x = Axis::Things {
            name: "VM".to_owned(),
            things: (0..20).map(|vm| format!("machine-{vm}")).collect(),
        };
        let svg = chart.svg().unwrap();
        assert_eq!(svg.matches("rotate(90").count(), 20, "{svg}");
        assert!(chart.upright_room() > 0);
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
        let svg = nothing.svg().unwrap();
        assert!(svg.ends_with("</svg>\n") && !svg.contains("NaN") && !svg.contains("inf"));
    }
}
