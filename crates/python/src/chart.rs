// SPDX-License-Identifier: Apache-2.0
//! A picture of one's own results.

use pagetide_chart::{Axis, Chart, SERIES_MAX, Scale, Series, Shape};
use pyo3::prelude::*;

use crate::error::error;

/// Lines over named places as SVG: each series has a value, or none, for each place.
#[pyfunction]
pub fn chart(
    title: String,
    x_name: String,
    y_name: String,
    places: Vec<String>,
    series: Vec<(String, Vec<Option<f64>>)>,
) -> PyResult<String> {
    if series.len() > SERIES_MAX {
        return Err(error(format!(
            "a picture has {SERIES_MAX} lines at most, and these are {}; choose fewer rows, or another 'by'",
            series.len()
        )));
    }
    if places.is_empty() || series.is_empty() {
        return Err(error(
            "there is nothing to draw: the table has no such rows",
        ));
    }
    let line = |(name, values): (String, Vec<Option<f64>>)| {
        let points = values
            .into_iter()
            .zip(0_u32..)
            .filter_map(|(value, place)| {
                let value = value.filter(|value| value.is_finite())?;
                // The middle of a place.
                Some((f64::from(place) + 0.5, value))
            });
        let shape = Shape::Line(points.collect());
        Series { name, shape }
    };
    let series: Vec<Series> = series.into_iter().map(line).collect();
    let top = series.iter().map(|one| one.shape.top()).fold(0.0, f64::max);
    let chart = Chart {
        title,
        x: Axis::Things {
            name: x_name,
            things: places,
        },
        y_name,
        y_max: if top > 0.0 { top * 1.05 } else { 1.0 },
        y_scale: Scale::Plain,
        series,
        mark: None,
    };
    chart.svg().map_err(error)
}
