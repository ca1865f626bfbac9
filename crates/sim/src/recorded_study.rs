// SPDX-License-Identifier: Apache-2.0
//! Recorded tenants in the model, beside made ones.
//!
//! | question | what is run |
//! |---|---|
//! | what translation costs recorded tenants | Base and HyperTRIO over copies of them, for 4, 64 and 1,024 tenants, by who mapped the memory |
//! | how many translations a tenant has in use | least entries of a fully associative DevTLB with the oracle that serve one tenant as well as many do (V-C) |
//!
//! The first half of each source's requests is left out, so that many tenants, each of which has only a part of its
//! log in a run, are seen at steady work and not at the start of their drivers.
//!
//! With more tenants than were recorded a recorded one is several, in lockstep: they ask for the same addresses at the
//! same time, each in an address space of its own.

use std::path::PathBuf;

use pagetide_trace::{
    FormatChoice, HyperSpec, HyperTrace, Input, RecordedInput, Recordings, Reuse, TenantShape,
    Workload, open,
};
use serde_json::{Map, Value, json};

use crate::config::{CacheConfig, Config, Flavour, Replacement};
use crate::error::SimError;
use crate::next_use::NextUses;
use crate::outcome::Outcome;
use crate::run::{TraceInput, run};
use crate::run_all::run_all;

/// Packets of a run, unless a tenant runs out before.
const PACKETS: u64 = 102_400;
/// Numbers of tenants.
const TENANTS: [u32; 3] = [4, 64, 1024];
/// Percentage of each log that is left out at its beginning. A driver's start maps, fills and unmaps what is used
/// later; with many tenants a run would see little else.
const SKIP_PERCENT: u32 = 50;
/// Requests of a packet (IV-C).
const REQUESTS_PER_PACKET: u32 = 3;
/// Entries that are many: what more of them would add is not looked for.
const MANY_ENTRIES: u32 = 4096;
/// The share of what many entries reach that is as good.
const AS_GOOD: f64 = 0.999;
/// Tenants that are made, for comparison.
const MADE: &str = "made";
/// Modes of recordings, in the order in which an active set is taken from them: the paper's tenants had theirs by
/// passthrough.
const MODES: [&str; 3] = ["passthrough", "strict", "lazy"];

/// Logs of one recording.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RecordedLogs {
    /// Who mapped the memory: `strict`, `lazy` or `passthrough`.
    pub mode: String,
    /// What the devices did.
    pub workload: String,
    /// The logs.
    pub logs: Vec<PathBuf>,
}

/// Tenants of a kind.
struct Tenants {
    mode: String,
    workload: String,
    /// None: they are made.
    recordings: Option<Recordings>,
}

/// One run.
struct Job {
    tenants_of: usize,
    tenants: u32,
    config: Config,
    /// Whether it is HyperTRIO.
    hypertrio: bool,
}

/// Runs the study on `threads` threads; `told` receives how many runs of how many are done.
///
/// # Errors
/// If a log is broken, or a run fails.
pub fn run_recorded_study(
    logs: &[RecordedLogs],
    threads: usize,
    told: &(dyn Fn(u64, u64) + Sync),
) -> Result<Map<String, Value>, SimError> {
    study(logs, PACKETS, threads, told)
}

fn study(
    logs: &[RecordedLogs],
    packets: u64,
    threads: usize,
    told: &(dyn Fn(u64, u64) + Sync),
) -> Result<Map<String, Value>, SimError> {
    let mut all = logs
        .iter()
        .map(Tenants::read)
        .collect::<Result<Vec<_>, _>>()?;
    all.push(Tenants {
        mode: MADE.to_owned(),
        workload: Workload::Iperf3.name().to_owned(),
        recordings: None,
    });
    let jobs = jobs(&all);
    let outcomes = run_all(&jobs, threads, told, |job| {
        all[job.tenants_of].run(job.tenants, packets, &job.config)
    })?;
    let mut figures = Map::new();
    for (job, outcome) in jobs.iter().zip(&outcomes) {
        tell(&mut figures, &all[job.tenants_of], job, outcome);
    }
    let by_mode = active_sets(&all, packets)?;
    figures.insert("active_set".to_owned(), Value::Object(taken(&by_mode)));
    figures.insert("active_set_by_mode".to_owned(), Value::Object(by_mode));
    figures.insert("packets_most".to_owned(), packets.into());
    figures.insert("skipped_percent".to_owned(), SKIP_PERCENT.into());
    Ok(figures)
}

/// Base and HyperTRIO for each number of tenants, of the tenants that stand for their mode.
fn jobs(all: &[Tenants]) -> Vec<Job> {
    let mut jobs = Vec::new();
    for (tenants_of, _) in stand_for_their_mode(all) {
        for tenants in TENANTS {
            for (hypertrio, config) in [
                (false, Config::base(Flavour::Paper)),
                (true, Config::hypertrio(Flavour::Paper)),
            ] {
                jobs.push(Job {
                    tenants_of,
                    tenants,
                    config,
                    hypertrio,
                });
            }
        }
    }
    jobs
}

/// The tenants of each mode: those that ran iperf3, as the paper's comparison has, else the first.
fn stand_for_their_mode(all: &[Tenants]) -> Vec<(usize, &Tenants)> {
    let iperf3 = Workload::Iperf3.name();
    all.iter()
        .enumerate()
        .filter(|(at, one)| {
            let mut same = all
                .iter()
                .enumerate()
                .filter(|(_, other)| other.mode == one.mode);
            let first = same.clone().next().map(|(first, _)| first);
            let stands = same.find(|(_, other)| other.workload == iperf3);
            stands.map(|(stands, _)| stands).or(first) == Some(*at)
        })
        .collect()
}

fn tell(figures: &mut Map<String, Value>, of: &Tenants, job: &Job, outcome: &Outcome) {
    let mode = figures.entry(of.mode.clone()).or_insert_with(|| json!({}));
    let mut put = |name: &str, value: f64| {
        let table = &mut mode[name];
        if table.is_null() {
            *table = json!({});
        }
        table[format!("tenants_{}", job.tenants)] = json!(value);
    };
    let hits = outcome.caches.devtlb.hit_rate();
    if job.hypertrio {
        put("hypertrio_link_share", outcome.link_share);
        put("devtlb_hit_share", hits);
    } else {
        put("base_link_share", outcome.link_share);
        put("base_devtlb_hit_share", hits);
    }
    mode["workload"] = json!(of.workload);
}

/// The active set of the first tenant of each recording, by workload and mode.
fn active_sets(all: &[Tenants], packets: u64) -> Result<Map<String, Value>, SimError> {
    let mut by_workload = Map::new();
    for tenants in all {
        let name = match tenants.mode.as_str() {
            MADE => format!("{}_{MADE}", tenants.workload),
            _ => tenants.workload.clone(),
        };
        let of = by_workload.entry(name).or_insert_with(|| json!({}));
        // The first recording of a mode counts, as for the link.
        if of.get(&tenants.mode).is_none() {
            of[&tenants.mode] = json!(tenants.active_set(packets)?);
        }
    }
    Ok(by_workload)
}

/// One active set for each workload: that of the first mode that has one.
fn taken(by_workload: &Map<String, Value>) -> Map<String, Value> {
    by_workload
        .iter()
        .filter_map(|(workload, by_mode)| {
            let first = MODES.iter().find_map(|mode| by_mode.get(mode));
            first.map(|entries| (workload.clone(), entries.clone()))
        })
        .collect()
}

impl Tenants {
    fn read(of: &RecordedLogs) -> Result<Self, SimError> {
        if !MODES.contains(&of.mode.as_str()) {
            return Err(SimError::Parameter {
                parameter: "mode",
                value: of.mode.clone(),
                reason: format!("a collection has one of {}", MODES.join(", ")),
            });
        }
        let mut recordings = Recordings::new()?;
        for log in &of.logs {
            recordings.add(&mut *open(log, FormatChoice::Detect)?)?;
        }
        Ok(Self {
            mode: of.mode.clone(),
            workload: of.workload.clone(),
            recordings: Some(recordings),
        })
    }

    fn trace(&self, tenants: u32, packets: u64) -> Result<HyperTrace, SimError> {
        let Some(recordings) = &self.recordings else {
            let mut spec = HyperSpec::synthetic(TenantShape::of(Workload::Iperf3), tenants);
            spec.packets = Some(packets);
            return Ok(HyperTrace::synthetic(&spec)?);
        };
        let input = RecordedInput {
            logs: Vec::new(),
            requests_per_packet: REQUESTS_PER_PACKET,
            reuse: Reuse::Wrap,
            skip_percent: SKIP_PERCENT,
        };
        let mut spec = HyperSpec::new(Input::Recorded(input), tenants);
        spec.packets = Some(packets);
        Ok(HyperTrace::recorded(&spec, recordings)?)
    }

    fn run(&self, tenants: u32, packets: u64, config: &Config) -> Result<Outcome, SimError> {
        let future = match config.needs_future() {
            true => Some(NextUses::of(&mut self.trace(tenants, packets)?)?),
            false => None,
        };
        let input = TraceInput {
            events: &mut self.trace(tenants, packets)?,
            next_uses: future.as_ref(),
        };
        run(config, input)
    }

    /// Least entries that serve one tenant as well as many do.
    fn active_set(&self, packets: u64) -> Result<u32, SimError> {
        let share = |entries| {
            let mut config = Config::base(Flavour::Paper);
            config.devtlb = CacheConfig::new(entries, entries, Replacement::Oracle);
            Ok::<f64, SimError>(self.run(1, packets, &config)?.link_share)
        };
        let enough = AS_GOOD * share(MANY_ENTRIES)?;
        least(MANY_ENTRIES, |entries| Ok(share(entries)? >= enough))
    }
}

/// The least number from 1 to `most` for which `enough` holds, if it holds for all above it and for `most`.
fn least(
    most: u32,
    mut enough: impl FnMut(u32) -> Result<bool, SimError>,
) -> Result<u32, SimError> {
    let (mut low, mut high) = (1, most);
    while low < high {
        let middle = low + (high - low) / 2;
        if enough(middle)? {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    Ok(low)
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    /// A log of `sources` devices that use `pages` pages each, in turn.
    fn log(sources: u64, pages: u64, requests: u64) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        for request in 0..requests {
            for source in 1..=sources {
                let iova = 0xff00_0000 + request % pages * 4096;
                writeln!(
                    file,
                    "1@0.0:vtd_iotlb_page_hit IOTLB page hit sid {:#x} iova {iova:#x} slpte {:#x} domain {source:#x}",
                    source * 8,
                    iova + 3,
                )
                .unwrap();
            }
        }
        file.flush().unwrap();
        file
    }

    fn recorded(mode: &str, workload: &str, log: &tempfile::NamedTempFile) -> RecordedLogs {
        RecordedLogs {
            mode: mode.to_owned(),
            workload: workload.to_owned(),
            logs: vec![log.path().to_owned()],
        }
    }

    #[test]
    fn active_set_is_the_pages_that_a_tenant_uses_in_turn() {
        let log = log(2, 7, 3000);
        let figures = study(&[recorded("strict", "fio", &log)], 1000, 2, &|_, _| ()).unwrap();
        assert_eq!(figures["active_set"]["fio"], json!(7));
        assert_eq!(figures["active_set_by_mode"]["fio"]["strict"], json!(7));
        // No workload ran iperf3 in that mode, so this one stands for it.
        assert_eq!(figures["strict"]["workload"], json!("fio"));
        for mode in ["strict", "made"] {
            for share in [
                "devtlb_hit_share",
                "base_link_share",
                "hypertrio_link_share",
            ] {
                for tenants in TENANTS {
                    let value = &figures[mode][share][format!("tenants_{tenants}")];
                    let value = value.as_f64().unwrap();
                    assert!((0.0..=1.0).contains(&value), "{mode} {share} {value}");
                }
            }
        }
        // A few pages of few tenants stay in the DevTLB.
        let hits = |tenants: &str| figures["strict"]["base_devtlb_hit_share"][tenants].as_f64();
        assert!(hits("tenants_4") > hits("tenants_1024"));
    }

    #[test]
    fn first_of_several_recordings_counts() {
        let (first, second) = (log(2, 7, 3000), log(2, 3, 3000));
        let twice = [&first, &second].map(|log| recorded("lazy", "media", log));
        let figures = study(&twice, 1000, 2, &|_, _| ()).unwrap();
        assert_eq!(figures["active_set_by_mode"]["media"]["lazy"], json!(7));
    }

    #[test]
    fn mode_that_is_none_is_refused() {
        let log = log(1, 1, 10);
        let refused = study(&[recorded(MADE, "fio", &log)], 10, 1, &|_, _| ()).unwrap_err();
        let sentence = "mode = made: a collection has one of passthrough, strict, lazy";
        assert_eq!(refused.to_string(), sentence);
    }

    #[test]
    fn iperf3_stands_for_its_mode() {
        let one = |mode: &str, workload: &str| Tenants {
            mode: mode.to_owned(),
            workload: workload.to_owned(),
            recordings: None,
        };
        let all = [
            one("strict", "fio"),
            one("strict", "iperf3"),
            one("lazy", "media"),
            one("lazy", "search"),
        ];
        let stand: Vec<usize> = stand_for_their_mode(&all)
            .iter()
            .map(|(at, _)| *at)
            .collect();
        assert_eq!(stand, [1, 2]);
    }

    #[test]
    fn least_number_is_found_at_every_place() {
        for wanted in 1..=17 {
            let found = least(17, |entries| Ok(entries >= wanted)).unwrap();
            assert_eq!(found, wanted);
        }
    }
}
