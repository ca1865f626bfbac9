// SPDX-License-Identifier: Apache-2.0
//! From rows to panels, and to our numbers beside the paper's.

use super::figure::{Figure, Readings};
use super::paper::Quantity;
use super::rows::{Name, Row, reading};
use super::{Beside, Curve, Form, Panel, Places, Shares};

/// The panels of a figure by reading, and the paper's numbers beside ours.
pub(super) fn collect(figure: &Figure, rows: &[Row]) -> (Vec<Panel>, Vec<Beside>) {
    let named: Vec<(String, &Row)> = rows
        .iter()
        .map(|row| (of_reading(figure.readings, row), row))
        .collect();
    let readings = distinct(named.iter().map(|(name, _)| name.clone()));
    let mut panels = Vec::new();
    let mut beside: Vec<Beside> = figure
        .paper
        .iter()
        .map(|stated| Beside {
            what: stated.what,
            paper: stated.paper,
            ours: Vec::new(),
        })
        .collect();
    for reading in readings {
        let own: Vec<&Row> = named
            .iter()
            .filter(|(name, _)| *name == reading)
            .map(|(_, row)| *row)
            .collect();
        panels.extend(panels_of(figure, &reading, &own));
        for (beside, stated) in beside.iter_mut().zip(figure.paper) {
            beside.ours.push((reading.clone(), stated.ours.of(&own)));
        }
    }
    (panels, beside)
}

/// The reading's name, without what does not matter to the figure.
fn of_reading(readings: Readings, row: &Row) -> String {
    let [cost, unit, third] = reading(row);
    match readings {
        Readings::All => [cost, unit, third].join(", "),
        Readings::OfOneEntry => [cost, third].join(", "),
    }
}

fn panels_of(figure: &Figure, reading: &str, rows: &[&Row]) -> Vec<Panel> {
    let name_of = |row: &Row| figure.panel.map_or(String::new(), |name| name(row));
    let places = distinct(rows.iter().map(|row| (figure.x)(row)));
    distinct(rows.iter().map(|row| name_of(row)))
        .into_iter()
        .map(|name| {
            let own: Vec<&Row> = rows
                .iter()
                .filter(|row| name_of(row) == name)
                .copied()
                .collect();
            Panel {
                reading: reading.to_owned(),
                curves: curves(figure, &own, &places),
                name,
                x_name: figure.x_name,
                y_name: figure.y_name,
                shares: match figure.y {
                    Quantity::Of(column) if column != "link_share" => Shares::No,
                    _ => Shares::Yes,
                },
                places: Places::Named(places.clone()),
                form: Form::Lines,
            }
        })
        .collect()
}

fn curves(figure: &Figure, rows: &[&Row], places: &[String]) -> Vec<Curve> {
    distinct(rows.iter().map(|row| series_name(figure.series, row)))
        .into_iter()
        .map(|name| {
            let own = rows
                .iter()
                .filter(|row| series_name(figure.series, row) == name);
            let mut points: Vec<(f64, f64)> = own
                .filter_map(|row| {
                    let place = (figure.x)(row);
                    let (_, at) = places
                        .iter()
                        .zip(0_u32..)
                        .find(|(name, _)| **name == place)?;
                    Some((f64::from(at), figure.y.of(row)))
                })
                .collect();
            points.sort_by(|(a, _), (b, _)| a.total_cmp(b));
            Curve { name, points }
        })
        .collect()
}

/// 'iperf3, PTB of 8'
fn series_name(names: &[Name], row: &Row) -> String {
    let parts: Vec<String> = names.iter().map(|name| name(row)).collect();
    parts.join(", ")
}

/// Each once, in the order of its first appearance.
fn distinct(all: impl Iterator<Item = String>) -> Vec<String> {
    let mut distinct: Vec<String> = Vec::new();
    for one in all {
        if !distinct.contains(&one) {
            distinct.push(one);
        }
    }
    distinct
}
