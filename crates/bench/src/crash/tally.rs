// SPDX-License-Identifier: Apache-2.0
//! What the deaths came to: how many in which act, what was wrong afterwards, how long the VMs stood still.

use super::{
    plan::{Act, Cast, Death, Victim},
    scene::add,
};
use crate::{
    busy::disk::DiskCounted,
    harness::figures::{at_permille, thousandths, to_f64},
};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;

/// Quantiles that are told, and their thousandths.
const QUANTILES: [(&str, usize); 4] = [("p50", 500), ("p90", 900), ("p99", 990), ("max", 1000)];

/// One death, as it came out.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Played {
    pub death: Death,
    /// Whether its act was under way when the process died.
    pub is_under_way: bool,
    /// From the first kill on, no longer than a vCPU stood still, less the starts of programs.
    pub stall_ns: u64,
    /// The longest time that a vCPU touched no page before that, since the death before.
    pub quiet_ns: u64,
    /// The starts of programs in it.
    pub start_ns: u64,
    /// From the last spawn until requests were served.
    pub recovery_ns: u64,
    /// What was in use: pages by where they were, before the kill.
    pub in_use: InUse,
    pub disk: DiskCounted,
}

/// Where the pages of the VM were.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) struct InUse {
    pub zero_pages: u64,
    pub same_filled_pages: u64,
    pub lz4_pages: u64,
    pub zstd_pages: u64,
    pub disk_pages: u64,
    pub remote_pages: u64,
}

/// How often an act was played.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Count {
    deaths: u64,
    under_way: u64,
}

/// All of a run.
#[derive(Default)]
pub(super) struct Tally {
    kills: u64,
    guest_kills: u64,
    acts: BTreeMap<Act, Count>,
    victims: BTreeMap<Victim, u64>,
    stalls: Vec<u64>,
    stalls_by_dpu: Vec<u64>,
    guest_stalls: Vec<u64>,
    quiet: Vec<u64>,
    starts: Vec<u64>,
    recoveries: Vec<u64>,
    in_use: InUse,
    disk: DiskCounted,
    disk_longest: Vec<u64>,
    kills_with_requests: u64,
    pub wrong_pages: u64,
    pub lost_pages: u64,
    pub wrong_blocks: u64,
    pub failed_requests: u64,
    compared_blocks: u64,
    guest_compared_bytes: [u64; 2],
    pub logged_errors: u64,
    pub first_error: Option<String>,
    pub without_remote: Option<String>,
    pub first_wrong: Option<String>,
}

impl Tally {
    /// Adds a death.
    pub(super) fn add(&mut self, cast: Cast, played: Played) {
        let kills = played.death.kills();
        self.kills += kills;
        let count = self.acts.entry(played.death.act).or_default();
        count.deaths += 1;
        count.under_way += u64::from(played.is_under_way);
        *self.victims.entry(played.death.victim).or_default() += kills;
        if cast == Cast::Guest {
            self.guest_kills += kills;
        }
        // vCPUs do not wait for a DPU process.
        match (played.death.victim, cast) {
            (Victim::Dpu, _) => self.stalls_by_dpu.push(played.stall_ns),
            // A stand-in beside a guest, which has the CPUs.
            (_, Cast::Guest) => self.guest_stalls.push(played.stall_ns),
            (_, Cast::Daemon | Cast::WithDpu) => self.stalls.push(played.stall_ns),
        }
        self.quiet.push(played.quiet_ns);
        self.starts.push(played.start_ns);
        self.recoveries.push(played.recovery_ns);
        let (all, now) = (&mut self.in_use, played.in_use);
        all.zero_pages += now.zero_pages;
        all.same_filled_pages += now.same_filled_pages;
        all.lz4_pages += now.lz4_pages;
        all.zstd_pages += now.zstd_pages;
        all.disk_pages += now.disk_pages;
        all.remote_pages += now.remote_pages;
        self.kills_with_requests += u64::from(played.disk.under_way_at_hang_up > 0);
        self.disk_longest.push(played.disk.longest_ns);
        self.count_disk(&played.disk);
    }

    /// Adds work on a disk.
    pub(super) fn count_disk(&mut self, disk: &DiskCounted) {
        self.wrong_blocks += disk.wrong_blocks;
        self.failed_requests += disk.failed_requests;
        self.compared_blocks += disk.compared_blocks;
        if let Some(wrong) = &disk.first_wrong {
            self.first_wrong.get_or_insert_with(|| wrong.clone());
        }
        add(&mut self.disk, disk.clone());
    }

    /// Adds what a stock guest has compared.
    pub(super) fn compared_guest(&mut self, memory_bytes: u64, disk_bytes: u64) {
        self.guest_compared_bytes[0] += memory_bytes;
        self.guest_compared_bytes[1] += disk_bytes;
    }

    /// Something is wrong: more deaths would show nothing.
    pub(super) fn is_wrong(&self) -> bool {
        self.wrong_pages + self.lost_pages + self.wrong_blocks + self.failed_requests > 0
    }

    /// Processes killed so far.
    pub(super) fn kills(&self) -> u64 {
        self.kills
    }

    /// As figures of a report.
    pub(super) fn figures(&mut self) -> Map<String, Value> {
        let deaths = self.recoveries.len() as u64;
        let mean = |pages: u64| pages.checked_div(deaths).unwrap_or(0);
        let acts = self.acts.iter().map(|(act, count)| {
            let value = json!({"deaths": count.deaths, "under_way": count.under_way});
            (act.name(), value)
        });
        let victims = self
            .victims
            .iter()
            .map(|(victim, kills)| (victim.name(), json!(kills)));
        let in_use = json!({
            "zero_pages": mean(self.in_use.zero_pages),
            "same_filled_pages": mean(self.in_use.same_filled_pages),
            "lz4_pages": mean(self.in_use.lz4_pages),
            "zstd_pages": mean(self.in_use.zstd_pages),
            "disk_pages": mean(self.in_use.disk_pages),
            "remote_pages": mean(self.in_use.remote_pages),
        });
        let mut figures = Map::new();
        let mut put = |name: &str, value: Value| figures.insert(name.to_owned(), value);
        put("kills", json!(self.kills));
        put("wrong_pages", json!(self.wrong_pages));
        put("lost_pages", json!(self.lost_pages));
        put("wrong_blocks", json!(self.wrong_blocks));
        put("failed_requests", json!(self.failed_requests));
        put("guest_kills", json!(self.guest_kills));
        put("deaths", json!(deaths));
        put("by_act", Value::Object(acts.collect()));
        put("kills_by_victim", Value::Object(victims.collect()));
        put("in_use_mean", in_use);
        put("deaths_with_disk_requests", json!(self.kills_with_requests));
        put(
            "requests_under_way_at_hang_up",
            json!(self.disk.under_way_at_hang_up),
        );
        put("compared_blocks", json!(self.compared_blocks));
        let [memory, disk] = self.guest_compared_bytes;
        put("guest_memory_compared_bytes", json!(memory));
        put("guest_disk_compared_bytes", json!(disk));
        put("logged_errors", json!(self.logged_errors));
        put("first_error", json!(self.first_error));
        put("first_wrong", json!(self.first_wrong));
        put("without_remote", json!(self.without_remote));
        for (name, values) in [
            ("stall", &mut self.stalls),
            ("stall_without_dpu", &mut self.stalls_by_dpu),
            ("stall_beside_guest", &mut self.guest_stalls),
            ("gap_between_deaths", &mut self.quiet),
            ("process_start", &mut self.starts),
            ("recovery", &mut self.recoveries),
            ("disk_request_longest", &mut self.disk_longest),
        ] {
            values.sort_unstable();
            for (quantile, permille) in QUANTILES {
                put(
                    &format!("{name}_{quantile}_us"),
                    quantile_us(values, permille),
                );
            }
        }
        figures
    }
}

/// The value that so many thousandths do not exceed, in microseconds; null without values.
fn quantile_us(sorted: &[u64], permille: usize) -> Value {
    match at_permille(sorted, permille) {
        Some(ns) => thousandths(to_f64(ns) / 1e3),
        None => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn played(act: Act, stall_ns: u64) -> Played {
        Played {
            death: Death {
                act,
                victim: Victim::Daemon,
                permille: 0,
            },
            is_under_way: stall_ns.is_multiple_of(2),
            stall_ns,
            quiet_ns: 0,
            start_ns: 1,
            recovery_ns: 2,
            in_use: InUse {
                disk_pages: 10,
                ..InUse::default()
            },
            disk: DiskCounted::default(),
        }
    }

    #[test]
    fn deaths_are_counted_by_act_and_stalls_have_quantiles_by_nearest_rank() {
        let mut tally = Tally::default();
        for number in 1..=200 {
            tally.add(Cast::Daemon, played(Act::Running, number * 1000));
        }
        tally.add(Cast::Guest, played(Act::Recovering, 7000));
        let figures = tally.figures();
        assert_eq!(
            (&figures["kills"], &figures["guest_kills"]),
            (&json!(202), &json!(2))
        );
        assert_eq!(
            figures["by_act"]["running"],
            json!({"deaths": 200, "under_way": 200})
        );
        assert_eq!(figures["stall_p50_us"], json!(100.0));
        assert_eq!(figures["stall_p99_us"], json!(198.0));
        assert_eq!(figures["stall_max_us"], json!(200.0));
        assert_eq!(figures["stall_beside_guest_p99_us"], json!(7.0));
        assert_eq!(figures["in_use_mean"]["disk_pages"], json!(10));
        assert!(!tally.is_wrong());
    }

    #[test]
    fn wrong_block_ends_the_run_and_is_told() {
        let mut tally = Tally::default();
        tally.count_disk(&DiskCounted {
            wrong_blocks: 1,
            first_wrong: Some("block 3".into()),
            ..DiskCounted::default()
        });
        assert!(tally.is_wrong());
        let figures = tally.figures();
        assert_eq!(figures["first_wrong"], json!("block 3"));
        assert_eq!(figures["stall_p99_us"], Value::Null);
    }
}
