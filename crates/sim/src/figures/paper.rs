// SPDX-License-Identifier: Apache-2.0
//! Numbers that the paper's sentences have, and how ours are found.

use super::rows::{Name, Row};

/// Rows of which a name is one of these.
pub(super) type Where = (Name, &'static [&'static str]);

/// A figure of a row.
#[derive(Clone, Copy, Debug)]
pub(super) enum Quantity {
    /// A column as it is.
    Of(&'static str),
    /// One column over another.
    Share(&'static str, &'static str),
    /// One minus that.
    Misses(&'static str, &'static str),
}

impl Quantity {
    pub(super) fn of(self, row: &Row) -> f64 {
        let share = |part: &str, all: &str| match row.number(all) {
            all if all > 0.0 => row.number(part) / all,
            _ => 0.0,
        };
        match self {
            Self::Of(column) => row.number(column),
            Self::Share(part, all) => share(part, all),
            Self::Misses(hits, all) if row.number(all) > 0.0 => 1.0 - share(hits, all),
            Self::Misses(..) => 0.0,
        }
    }
}

/// How ours is found.
#[derive(Clone, Copy, Debug)]
pub(super) enum Ours {
    /// Least and greatest of a quantity over rows.
    Range(&'static [Where], Quantity),
    /// The same, as percent.
    Percent(&'static [Where], Quantity),
    /// A quantity of the first rows over that of the second, one by one, in the order of the study: least and
    /// greatest.
    Ratio(&'static [Where], &'static [Where], Quantity),
    /// The places on the x axis at which the mean of a quantity over rows is greatest, give or take 0.5%.
    Best(&'static [Where], Name, Quantity),
}

/// A number of the paper.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stated {
    pub(super) what: &'static str,
    pub(super) paper: &'static str,
    pub(super) ours: Ours,
}

impl Ours {
    /// Ours of the rows of one reading; a dash if there are none.
    pub(super) fn of(self, rows: &[&Row]) -> String {
        match self {
            Self::Range(which, quantity) => range(&values(rows, which, quantity), 1, "", 1.0),
            Self::Percent(which, quantity) => range(&values(rows, which, quantity), 1, "%", 100.0),
            Self::Ratio(over, under, quantity) => {
                let under = values(rows, under, quantity);
                let over = values(rows, over, quantity);
                let pairs = over.iter().zip(&under).filter(|(_, under)| **under > 0.0);
                let ratios: Vec<f64> = pairs.map(|(over, under)| over / under).collect();
                range(&ratios, 2, " times", 1.0)
            }
            Self::Best(which, place, quantity) => best(rows, which, place, quantity),
        }
    }
}

fn chosen<'a>(rows: &[&'a Row], which: &[Where]) -> Vec<&'a Row> {
    let fits =
        |row: &&&Row| (which.iter()).all(|(name, values)| values.contains(&name(row).as_str()));
    rows.iter().filter(fits).copied().collect()
}

fn values(rows: &[&Row], which: &[Where], quantity: Quantity) -> Vec<f64> {
    let chosen = chosen(rows, which);
    chosen.into_iter().map(|row| quantity.of(row)).collect()
}

/// 'least to greatest', or the one.
fn range(values: &[f64], digits: usize, unit: &str, by: f64) -> String {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min) * by;
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max) * by;
    if least > greatest {
        return "–".to_owned();
    }
    // What is small needs more of them.
    let digits = match greatest.abs() {
        small if small < 1.0 => digits.max(2),
        _ => digits,
    };
    let (least, greatest) = (format!("{least:.digits$}"), format!("{greatest:.digits$}"));
    match least == greatest {
        true => format!("{least}{unit}"),
        false => format!("{least} to {greatest}{unit}"),
    }
}

fn best(rows: &[&Row], which: &[Where], place: Name, quantity: Quantity) -> String {
    let mut means: Vec<(String, f64, f64)> = Vec::new();
    for row in chosen(rows, which) {
        let at = place(row);
        match means.iter_mut().find(|(name, ..)| *name == at) {
            Some((_, sum, count)) => {
                *sum += quantity.of(row);
                *count += 1.0;
            }
            None => means.push((at, quantity.of(row), 1.0)),
        }
    }
    let mean = |(_, sum, count): &(String, f64, f64)| sum / count;
    let greatest = means.iter().map(mean).fold(0.0, f64::max);
    let names: Vec<&str> = means
        .iter()
        .filter(|one| mean(one) >= 0.995 * greatest)
        .map(|(name, ..)| name.as_str())
        .collect();
    match names.len() {
        0 => "–".to_owned(),
        all if all == means.len() => "all alike".to_owned(),
        _ => names.join(", "),
    }
}
