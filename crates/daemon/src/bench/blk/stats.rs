// SPDX-License-Identifier: Apache-2.0
//! Ratios of pairs, their geometric mean, and how low it may truly be.

/// Logarithms of the ratios of one cell's pairs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct PairedRatios(Vec<f64>);

/// A mean over cells with its lower bound.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Overall {
    pub mean: f64,
    /// Lower end of the two-sided 95% interval: with 97.5% it is not lower.
    pub low95: f64,
}

/// 97.5% quantile of the normal distribution, to which Student's comes close with the 60 and more
/// degrees of freedom that four cells of 15 and more pairs have (there it is 2.00).
const QUANTILE: f64 = 2.0;

impl PairedRatios {
    /// `None` if there is no pair, or a run without I/O.
    pub fn new(ratios: impl Iterator<Item = f64>) -> Option<Self> {
        let logs: Vec<f64> = ratios.map(f64::ln).collect();
        let usable = !logs.is_empty() && logs.iter().all(|l| l.is_finite());
        usable.then_some(Self(logs))
    }

    /// Geometric mean.
    pub fn mean(&self) -> f64 {
        mean(self.0.iter().copied()).exp()
    }

    /// Square of the standard error of the mean of the logarithms.
    fn error_squared(&self) -> f64 {
        let n = self.0.len();
        if n < 2 {
            return f64::INFINITY;
        }
        let mean = mean(self.0.iter().copied());
        let squares: f64 = self.0.iter().map(|l| (l - mean).powi(2)).sum();
        let n = super::to_f64(n as u64);
        squares / (n - 1.0) / n
    }
}

/// Each cell counts the same; only the scatter within cells makes it uncertain.
pub(super) fn overall(cells: &[PairedRatios]) -> Option<Overall> {
    if cells.is_empty() {
        return None;
    }
    let count = super::to_f64(cells.len() as u64);
    let log = mean(cells.iter().map(|c| c.mean().ln()));
    let error = cells
        .iter()
        .map(PairedRatios::error_squared)
        .sum::<f64>()
        .sqrt()
        / count;
    Some(Overall {
        mean: log.exp(),
        low95: (log - QUANTILE * error).exp(),
    })
}

/// Arithmetic mean; 0 of nothing.
pub(super) fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0_u64), |(s, n), v| (s + v, n + 1));
    if count == 0 {
        0.0
    } else {
        sum / super::to_f64(count)
    }
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
        assert!(overall(&[odd]).unwrap().low95 < 1.0);
    }

    #[test]
    fn run_without_io_gives_no_ratio() {
        assert_eq!(PairedRatios::new([1.0, 0.0].into_iter()), None);
        assert_eq!(PairedRatios::new(std::iter::empty()), None);
        assert_eq!(overall(&[]), None);
    }
}
