// SPDX-License-Identifier: Apache-2.0
//! How long the daemon took for faults, from its metrics: counts by time, between two moments.

/// Metric of the time from reading a vCPU's fault to its page being there.
const METRIC: &str = "pagetide_vm_vcpu_fault_us_bucket";

/// Counts of faults that took at most so many microseconds; the last one without bound.
#[derive(Clone, PartialEq, Default, Debug)]
pub(super) struct Served(Vec<(f64, f64)>);

impl Served {
    /// Those of the VM `vm` on the page of metrics.
    ///
    /// # Errors
    /// If there are none.
    pub(super) fn of(metrics: &str, vm: &str) -> Result<Self, String> {
        let of_vm = format!("vm=\"{vm}\"");
        let lines = metrics.lines().filter_map(|line| {
            let (labels, count) = line.strip_prefix(METRIC)?.rsplit_once(' ')?;
            labels.contains(&of_vm).then_some((labels, count))
        });
        let buckets = lines.map(|(labels, count)| {
            let bound = labels.split("le=\"").nth(1)?.split('"').next()?;
            let bound = match bound {
                "+Inf" => f64::INFINITY,
                bound => number(bound)?,
            };
            Some((bound, number(count)?))
        });
        let buckets: Option<Vec<(f64, f64)>> = buckets.collect();
        match buckets {
            Some(buckets) if !buckets.is_empty() => Ok(Self(buckets)),
            _ => Err(format!(
                "the metrics do not tell how long faults of {vm} took"
            )),
        }
    }

    /// Those after `before`.
    pub(super) fn since(&self, before: &Self) -> Self {
        let both = self.0.iter().zip(&before.0);
        Self(
            both.map(|((bound, now), (_, then))| (*bound, now - then))
                .collect(),
        )
    }

    /// How many there are.
    pub(super) fn count(&self) -> f64 {
        self.0.last().map_or(0.0, |(_, count)| *count)
    }

    /// The share that took at most `us`; between two bounds in a straight line.
    pub(super) fn share_within(&self, us: f64) -> f64 {
        let (mut low, mut below) = (0.0, 0.0);
        for (bound, count) in &self.0 {
            if us <= *bound {
                let part = if bound.is_finite() {
                    (us - low) / (bound - low)
                } else {
                    0.0
                };
                return (below + part * (count - below)) / self.count();
            }
            (low, below) = (*bound, *count);
        }
        1.0
    }

    /// Bounds up to `max_us`, and the share within each.
    pub(super) fn shares(&self, max_us: f64) -> Vec<(f64, f64)> {
        let within = self.0.iter().filter(|(bound, _)| *bound <= max_us);
        within
            .map(|(bound, count)| (*bound, count / self.count()))
            .collect()
    }
}

fn number(text: &str) -> Option<f64> {
    text.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "\
pagetide_vm_vcpu_fault_us_bucket{vm=\"one\",le=\"10.0\"} 7\n\
pagetide_vm_vcpu_fault_us_bucket{vm=\"two\",le=\"10.0\"} 20\n\
pagetide_vm_vcpu_fault_us_bucket{vm=\"two\",le=\"15.0\"} 80\n\
pagetide_vm_vcpu_fault_us_bucket{vm=\"two\",le=\"+Inf\"} 100\n\
pagetide_vm_vcpu_fault_us_count{vm=\"two\"} 100\n";

    #[test]
    fn shares_are_of_one_vm_between_two_moments() {
        let later = PAGE.replace(" 20\n", " 30\n").replace(" 80\n", " 190\n");
        let later = later.replace(" 100\n", " 300\n");
        let before = Served::of(PAGE, "two").unwrap();
        let served = Served::of(&later, "two").unwrap().since(&before);
        assert!((served.count() - 200.0).abs() < 1e-9);
        for (us, share) in [
            (10.0, 0.05),
            (12.5, 0.3),
            (15.0, 0.55),
            (99.0, 0.55),
            (0.0, 0.0),
        ] {
            assert!((served.share_within(us) - share).abs() < 1e-9, "{us}");
        }
        assert_eq!(served.shares(12.0), [(10.0, 0.05)]);
        assert!(Served::of(PAGE, "three").is_err());
    }
}
