// SPDX-License-Identifier: Apache-2.0
//! Ratios of pairs, their geometric mean, and its bounds.

use super::figures::{mean, to_f64};

/// Logarithms of the ratios of one cell's pairs.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct PairedRatios(Vec<f64>);

/// A mean over cells with its bounds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Overall {
    /// Geometric mean.
    pub(crate) mean: f64,
    /// Lower end of the two-sided 95% interval: with 97.5% it is not lower.
    pub(crate) low95: f64,
    /// Upper end of it.
    pub(crate) high95: f64,
}

impl PairedRatios {
    /// `None` if there is no pair, or a run without I/O.
    pub(crate) fn new(ratios: impl Iterator<Item = f64>) -> Option<Self> {
        let logs: Vec<f64> = ratios.map(f64::ln).collect();
        let usable = !logs.is_empty() && logs.iter().all(|l| l.is_finite());
        usable.then_some(Self(logs))
    }

    /// Geometric mean.
    pub(crate) fn mean(&self) -> f64 {
        mean(self.0.iter().copied()).exp()
    }

    /// Their mean with its bounds; `None` as [`PairedRatios::new`].
    pub(crate) fn bounds(ratios: impl Iterator<Item = f64>) -> Option<Overall> {
        overall(&[Self::new(ratios)?])
    }

    /// Square of the standard error of the mean of the logarithms.
    fn error_squared(&self) -> f64 {
        let n = self.0.len();
        if n < 2 {
            return f64::INFINITY;
        }
        let mean = mean(self.0.iter().copied());
        let squares: f64 = self.0.iter().map(|l| (l - mean).powi(2)).sum();
        let n = to_f64(n as u64);
        squares / (n - 1.0) / n
    }
}

/// The 97.5% quantile of Student's distribution, by the first terms of its expansion around the normal
/// one's (Cornish and Fisher): accurate to a hundredth from 5 degrees of freedom on.
fn student(degrees: u64) -> f64 {
    if degrees == 0 {
        return f64::INFINITY;
    }
    let z = 1.959_964_f64;
    let n = to_f64(degrees);
    let first = (z.powi(3) + z) / 4.0;
    let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
    let third = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
    z + first / n + second / n.powi(2) + third / n.powi(3)
}

/// All cells have equal weight; the uncertainty comes only from the scatter within cells.
pub(crate) fn overall(cells: &[PairedRatios]) -> Option<Overall> {
    if cells.is_empty() {
        return None;
    }
    let count = to_f64(cells.len() as u64);
    let log = mean(cells.iter().map(|c| c.mean().ln()));
    let error = cells
        .iter()
        .map(PairedRatios::error_squared)
        .sum::<f64>()
        .sqrt()
        / count;
    let degrees = cells.iter().map(|c| c.0.len().saturating_sub(1) as u64);
    let reach = student(degrees.sum()) * error;
    Some(Overall {
        mean: log.exp(),
        low95: (log - reach).exp(),
        high95: (log + reach).exp(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lower_bound_lies_below_the_mean_by_the_scatter() {
        let even = PairedRatios::new([2.0, 2.0, 2.0].into_iter()).unwrap();
        let all = overall(&[even.clone(), even]).unwrap();
        assert!((all.mean - 2.0).abs() < 1e-9 && (all.low95 - 2.0).abs() < 1e-9);
        let odd = PairedRatios::new([1.0, 4.0, 1.0, 4.0].into_iter()).unwrap();
        assert!((odd.mean() - 2.0).abs() < 1e-9);
        let bounds = overall(&[odd]).unwrap();
        assert!(bounds.low95 < 1.0);
        assert!((bounds.low95 * bounds.high95 - 4.0).abs() < 1e-9);
    }

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (degrees, quantile) in [(5, 2.571), (14, 2.145), (30, 2.042), (80, 1.990)] {
            let ours = student(degrees);
            assert!((ours - quantile).abs() < 0.01, "{degrees}: {ours}");
        }
    }

    #[test]
    fn run_without_io_gives_no_ratio() {
        assert_eq!(PairedRatios::new([1.0, 0.0].into_iter()), None);
        assert_eq!(PairedRatios::new(std::iter::empty()), None);
        assert_eq!(overall(&[]), None);
    }
}
