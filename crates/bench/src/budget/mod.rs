// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench budget`: a hundred days of fifty VMs under one budget, in virtual time.
//!
//! The machine that the daemon drives (`pagetide_policy::budget`) decides for VMs of different sizes, weights,
//! floors and ceilings, whose demands follow the day, with bursts and idle hours. VMs come and go, weights are
//! changed, and the daemon is started anew now and then, with what was set and nothing else
//! (`pagetide_policy::budget::simulate` says what is modelled, and what is not). Everything is determined by
//! the seed: `--seeds N` runs the seeds 1 to N.
//!
//! | part | step | answers |
//! |---|---|---|
//! | days | 10 s | is the budget kept, is every floor, is a VM starved, what is done |
//! | fine | 0.5 s, as the daemon's; a hundredth of the time | the same |
//! | equals | 0.5 s, a day | how much two equal VMs that want more than there is take from each other |
//! | changes | 0.5 s | how soon every VM has its fair share after a change |
//!
//! A VM is *starved* if for five minutes it has, and is promised, less than seven eighths of what it uses, or of
//! its share by weight if that is less. Whether others have more does not matter: they do, or memory is wasted.
//!
//! The peer is the same days under a fixed split of the budget, by weight among the VMs that are there.

use super::{
    harness::{
        figures::{median, rounded, thousandths, to_f64},
        report::{BenchError, BenchReport},
        rounds::progress,
    },
    options::SizeOptions,
};
use pagetide_policy::budget::{
    Bytes, Permille,
    simulate::{self, Figures, Recipe, STARVED_AFTER, Settled, Traded},
};
use serde_json::{Map, Value, json};
use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

const NAME: &str = "budget";
/// Default number of seeds.
const SEEDS: u64 = 2;
/// Default length.
const DAYS: u64 = 100;
/// Default number of VMs.
const VMS: u32 = 50;
const DAY: Duration = Duration::from_secs(86_400);
/// As the daemon's.
const FINE_STEP: Duration = Duration::from_millis(500);
/// The time in fine steps, of the whole.
const FINE_SHARE: u32 = 100;
/// Names of the states against the watermarks, the lowest first.
const WATER: [&str; 4] = ["below_min", "below_low", "between", "above_high"];

/// What came of one seed.
struct Seed {
    days: Figures,
    fine: Figures,
    equals: Traded,
    changes: Vec<Settled>,
}

impl Seed {
    fn run(recipe: &Recipe) -> Self {
        Self {
            days: simulate::run(recipe),
            fine: simulate::run_budget(&Recipe {
                time: recipe.time / FINE_SHARE,
                step: FINE_STEP,
                ..*recipe
            }),
            equals: simulate::equals(recipe.seed, DAY),
            changes: simulate::changes(recipe.seed),
        }
    }

    /// Both lengths of steps: what must hold holds in each.
    fn both(&self) -> [&Figures; 2] {
        [&self.days, &self.fine]
    }
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(options: &SizeOptions) -> Result<BenchReport, BenchError> {
    let count = options.seeds.unwrap_or(SEEDS);
    let recipe = Recipe {
        vms: options.vms.unwrap_or(VMS),
        time: DAY * u32::try_from(options.days.unwrap_or(DAYS)).unwrap_or(u32::MAX),
        ..Recipe::default()
    };
    let (next, done) = (AtomicU64::new(1), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed > count {
                        return;
                    }
                    progress(NAME, format_args!("seed {seed} of {count}"));
                    let outcome = Seed::run(&Recipe { seed, ..recipe });
                    let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
                    done.push((seed, outcome));
                }
            });
        }
    });
    let mut seeds = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    seeds.sort_by_key(|(seed, _)| *seed);
    let seeds: Vec<Seed> = seeds.into_iter().map(|(_, outcome)| outcome).collect();
    Ok(report(&recipe, &seeds))
}

fn report(recipe: &Recipe, seeds: &[Seed]) -> BenchReport {
    let mut report = BenchReport::new(NAME);
    let figures = &mut report.figures;
    figures.insert("seeds".into(), seeds.len().into());
    figures.insert(
        "days".into(),
        (recipe.time.as_secs() / DAY.as_secs()).into(),
    );
    figures.insert("vms".into(), recipe.vms.into());
    promises(seeds, figures);
    events(seeds, figures);
    figures.insert("water_share".into(), water(seeds));
    figures.insert("cold_share".into(), cold(seeds));
    trades(seeds, figures);
    figures.insert("fair_after_s".into(), fair_after(seeds));
    let of = |figure: fn(&Figures) -> Permille| {
        median(
            seeds
                .iter()
                .map(|seed| to_f64(figure(&seed.days).0.into()) / 1e3),
        )
    };
    let (done, split) = (of(|days| days.done), of(|days| days.done_split));
    figures.insert("done_share".into(), thousandths(done));
    figures.insert(
        "done_worst_share".into(),
        thousandths(of(|days| days.done_worst)),
    );
    report
        .peers
        .insert("split_done_share".into(), thousandths(split));
    report
        .ratios
        .insert("done_over_split".into(), thousandths(done / split));
    report
}

/// What must hold in every seed: the worst of it.
fn promises(seeds: &[Seed], figures: &mut Map<String, Value>) {
    let both = || seeds.iter().flat_map(Seed::both);
    let most = |figure: fn(&Figures) -> Bytes| both().map(figure).max().unwrap_or_default().0;
    let all = |figure: fn(&Figures) -> u64| both().map(figure).sum::<u64>();
    let starved = both().map(|days| days.starved_longest).max();
    for (name, value) in [
        (
            "over_beyond_fills_max_bytes",
            most(|days| days.over_beyond_fill_max),
        ),
        ("over_max_bytes", most(|days| days.over_max)),
        (
            "promised_beyond_budget_max_bytes",
            most(|days| days.promised_max.less(days.budget)),
        ),
        (
            "floors_broken",
            all(|days| days.floors_broken + days.floors_short),
        ),
        ("starved_vms", all(|days| days.starved)),
        ("starved_longest_s", starved.unwrap_or_default().as_secs()),
        ("starved_after_s", STARVED_AFTER.as_secs()),
    ] {
        figures.insert(name.into(), value.into());
    }
}

fn events(seeds: &[Seed], figures: &mut Map<String, Value>) {
    let all =
        |figure: fn(&Figures) -> u64| seeds.iter().map(|seed| figure(&seed.days)).sum::<u64>();
    for (name, value) in [
        ("steps", all(|days| days.steps)),
        ("vms_that_came", all(|days| days.came)),
        ("vms_refused", all(|days| days.refused)),
        ("restarts", all(|days| days.restarts)),
    ] {
        figures.insert(name.into(), value.into());
    }
    let evicted = median(
        seeds
            .iter()
            .map(|seed| to_f64(seed.days.evicted.0) / to_f64(seed.days.budget.0)),
    );
    figures.insert("evicted_over_budget".into(), thousandths(evicted));
}

/// Shares of the time by state against the watermarks (Taiji Fig 15a).
fn water(seeds: &[Seed]) -> Value {
    let steps: u64 = seeds.iter().map(|seed| seed.days.steps).sum();
    let share = |state: usize| {
        let there: u64 = seeds.iter().map(|seed| seed.days.water_steps[state]).sum();
        rounded(to_f64(there) / to_f64(steps.max(1)))
    };
    let named = WATER
        .iter()
        .zip(0..)
        .map(|(name, state)| ((*name).to_owned(), share(state).into()));
    Value::Object(named.collect())
}

/// Percentiles over time of the cold share of what VMs have touched (Taiji Fig 15b).
fn cold(seeds: &[Seed]) -> Value {
    let mut steps = vec![0; 101];
    for seed in seeds {
        for (sum, steps) in steps.iter_mut().zip(&seed.days.cold_steps) {
            *sum += steps;
        }
    }
    let all: u64 = steps.iter().sum();
    let at = |permille: u64| {
        let mut below = 0;
        let percent = steps.iter().position(|steps| {
            below += steps;
            below * 1000 >= all * permille
        });
        rounded(to_f64(percent.unwrap_or(0) as u64) / 100.0)
    };
    json!({ "least": at(0).max(at(1)), "p10": at(100), "p50": at(500), "p90": at(900) })
}

fn trades(seeds: &[Seed], figures: &mut Map<String, Value>) {
    let lowered = seeds.iter().map(|seed| seed.equals.lowered.0).max();
    let budget = seeds.first().map_or(0, |seed| seed.equals.budget.0);
    let least = seeds.iter().map(|seed| seed.equals.least.0).min();
    figures.insert("traded_bytes_per_day".into(), lowered.into());
    figures.insert("traded_budget_bytes".into(), budget.into());
    let least = to_f64(least.unwrap_or_default().into()) / 1e3;
    figures.insert("equal_least_share".into(), thousandths(least));
}

/// The longest over the seeds; null if it never came to that.
fn fair_after(seeds: &[Seed]) -> Value {
    let Some(first) = seeds.first() else {
        return Value::Null;
    };
    let of = |index: usize| {
        let times: Option<Vec<Duration>> =
            seeds.iter().map(|seed| seed.changes[index].after).collect();
        times.and_then(|times| times.into_iter().max())
    };
    let named = first.changes.iter().enumerate().map(|(index, settled)| {
        let after = of(index).map(|time| rounded(time.as_secs_f64()));
        (settled.change.to_owned(), json!(after))
    });
    Value::Object(named.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(cold: usize) -> Figures {
        let mut cold_steps = vec![0; 101];
        cold_steps[cold] = 10;
        Figures {
            steps: 10,
            budget: Bytes(100),
            water_steps: vec![1, 2, 3, 4],
            cold_steps,
            done: Permille(980),
            done_split: Permille(700),
            ..Figures::default()
        }
    }

    fn seed(cold: usize, after: Option<Duration>) -> Seed {
        Seed {
            days: figures(cold),
            fine: Figures {
                over_beyond_fill_max: Bytes(cold as u64),
                floors_broken: 1,
                ..figures(cold)
            },
            equals: Traded {
                budget: Bytes(1000),
                lowered: Bytes(7),
                least: Permille(950),
            },
            changes: vec![Settled {
                change: "join",
                after,
            }],
        }
    }

    #[test]
    fn report_has_the_worst_of_all_seeds() {
        let times = [Some(Duration::from_secs(3)), Some(Duration::from_secs(9))];
        let seeds = [seed(30, times[0]), seed(60, times[1])];
        let report = report(&Recipe::default(), &seeds);
        let figures = &report.figures;
        assert_eq!(figures["over_beyond_fills_max_bytes"], json!(60));
        assert_eq!(figures["floors_broken"], json!(2));
        assert_eq!(figures["fair_after_s"]["join"], json!(9.0));
        assert_eq!(figures["water_share"]["above_high"], json!(0.4));
        assert_eq!(figures["cold_share"]["p10"], json!(0.3));
        assert_eq!(figures["cold_share"]["p90"], json!(0.6));
        assert_eq!(report.ratios["done_over_split"], json!(1.4));
        let never = [seed(30, times[0]), seed(30, None)];
        assert_eq!(fair_after(&never)["join"], Value::Null);
    }
}
