// SPDX-License-Identifier: Apache-2.0
//! The findings as data: each statement of the paper with its criterion, the function that looks at its runs,
//! and a cause, which explains where it does not hold.

mod active_set;
mod base;
mod hypertrio;
mod prefetch;

use pagetide_trace::Workload;

use super::lab::{Interleaving, Lab, Trace};
use super::report::Observation;
use super::setting::Setting;
use crate::config::Config;

/// One statement of the paper.
#[derive(Clone, Copy, Debug)]
pub(super) struct Statement {
    /// Its name.
    pub(super) id: &'static str,
    /// Where the paper has it.
    pub(super) section: &'static str,
    /// The paper's sentence, shortened.
    pub(super) claim: &'static str,
    /// The criterion, tolerance included.
    pub(super) expected: &'static str,
    /// Why it does not hold where it does not.
    pub(super) cause: &'static str,
    /// Looks at the runs that it needs, under each reading.
    pub(super) look: fn(&mut Lab) -> Vec<Observation>,
}

/// Every statement, in the paper's order.
pub(super) const ALL: &[Statement] = &[
    hypertrio::WALK_ACCESSES,
    hypertrio::OUTSTANDING_REQUESTS,
    hypertrio::ISOLATION,
    base::BASE_DOES_NOT_SCALE,
    base::BASE_AT_1024,
    base::BASE_OF_IPERF3,
    base::BURSTS_OF_FEW_TENANTS,
    base::BURSTS_OF_MANY_TENANTS,
    hypertrio::HYPERTRIO_SCALES,
    hypertrio::HYPERTRIO_FILLS_THE_LINK,
    hypertrio::INTERLEAVING,
    hypertrio::RAND_ORDER,
    prefetch::BUFFER_SUPPLIES,
    base::LARGE_DEVTLB_HELPS,
    base::LARGE_DEVTLB_OF_MANY_TENANTS,
    base::SMALL_DEVTLB_IN_BURSTS,
    base::LFU_OVER_LRU,
    base::LFU_AT_16,
    base::LFU_BELOW_THE_ORACLE,
    base::ORACLE_DOES_NOT_RESCUE,
    active_set::IPERF3,
    active_set::MEDIASTREAM,
    active_set::WEBSEARCH,
    active_set::MORE_THAN_EIGHT_TENANTS,
    hypertrio::PARTITIONS_UNTIL_SHARED,
    hypertrio::PARTITIONS_OVER_ASSOCIATIVITY,
    hypertrio::PARTITIONS_DO_NOT_SCALE,
    hypertrio::PTB_OF_8_IPERF3,
    hypertrio::PTB_OF_8_MEDIASTREAM,
    hypertrio::PTB_OF_8_WEBSEARCH,
    hypertrio::PTB_OF_32,
    prefetch::BUFFER_OF_8,
    prefetch::HISTORY_OF_48,
    prefetch::TWO_PAGES,
    prefetch::PREFETCHING,
    prefetch::PREFETCHING_SCALES,
];

/// The paper's workloads.
const WORKLOADS: [Workload; 3] = [Workload::Iperf3, Workload::Mediastream, Workload::Websearch];

/// Percent of the link.
fn share(lab: &mut Lab, trace: &Trace, config: &Config) -> f64 {
    lab.outcome(trace, config).link_share * 100.0
}

fn gbps(lab: &mut Lab, trace: &Trace, config: &Config) -> f64 {
    lab.outcome(trace, config).gbps
}

/// Least and greatest.
fn range(values: &[f64]) -> (f64, f64) {
    let least = values.iter().copied().fold(f64::INFINITY, f64::min);
    let greatest = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    (least, greatest)
}

/// Tries each setting.
fn observe(
    settings: Vec<Setting>,
    mut look: impl FnMut(Setting) -> (String, bool),
) -> Vec<Observation> {
    settings
        .into_iter()
        .map(|setting| {
            let (got, holds) = look(setting);
            Observation {
                setting: setting.name(),
                got,
                holds,
            }
        })
        .collect()
}

/// 'RR1 2.9 to 3.1%, …'
fn of_orders(by_order: &[(Interleaving, (f64, f64))]) -> String {
    let texts: Vec<String> = by_order
        .iter()
        .map(|(order, (least, most))| format!("{} {least:.1} to {most:.1}%", order.name()))
        .collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statements_have_names_of_their_own_texts_and_settings() {
        let mut lab = Lab::new();
        for (at, statement) in ALL.iter().enumerate() {
            let observations = (statement.look)(&mut lab);
            assert!(observations.len() >= 2, "{}", statement.id);
            assert!(ALL[..at].iter().all(|other| other.id != statement.id));
            for text in [statement.section, statement.claim, statement.expected] {
                assert!(!text.is_empty(), "{}", statement.id);
            }
        }
        assert!(ALL.len() >= 24);
    }
}
