// SPDX-License-Identifier: Apache-2.0
//! Policies of one's own through the public interface: written again they give what the built-in ones give, and
//! what they may not do ends the run with an error.

use std::collections::VecDeque;

use pagetide_addr::Iova;
use pagetide_random::SplitMix64;
use pagetide_sim::config::{Config, Flavour, Replacement};
use pagetide_sim::policy::{
    Entries, OwnPolicies, Page, Prefetcher, ReplacementPolicy, SourcePredictor, Step,
};
use pagetide_sim::{Outcome, SimError, TraceInput, run, run_own};
use pagetide_trace::{Event, EventKind, Events, IommuDomain, PageSize, SourceId};

/// Requests of some sources for some pages, and invalidations.
fn events(seed: u64) -> Vec<Event> {
    let mut random = SplitMix64::new(seed);
    (0..6000)
        .map(|_| {
            let source = u32::try_from(random.below(40)).unwrap();
            let mut event = Event::translate(
                SourceId(source << 3),
                IommuDomain(source),
                Iova(random.below(30) << 21),
                Some(PageSize::SIZE_2M),
            );
            if random.below(50) == 0 {
                event.kind = EventKind::InvalidatePages;
            }
            event
        })
        .collect()
}

fn input<'a>(events: &'a mut Events<'_>) -> TraceInput<'a> {
    TraceInput {
        events,
        next_uses: None,
    }
}

fn config(flavour: Flavour) -> Config {
    let mut config = Config::hypertrio(flavour);
    for cache in [&mut config.devtlb, &mut config.l2, &mut config.l3] {
        cache.replacement = Replacement::Lru;
    }
    config
}

/// Least recently used, by ticks as marks.
#[derive(Debug, Default)]
struct OwnLru(u64);

impl ReplacementPolicy for OwnLru {
    fn used(&mut self, entries: &mut Entries<'_>, at: usize, _next_use: u64) {
        self.0 += 1;
        entries.set_mark(at, self.0);
    }

    fn inserted(&mut self, entries: &mut Entries<'_>, at: usize, next_use: u64) {
        self.used(entries, at, next_use);
    }

    fn removed(&mut self, _entries: &mut Entries<'_>, _at: usize) {}

    fn moved(&mut self, _entries: &mut Entries<'_>, _from: usize, _to: usize) {}

    fn victim(&mut self, entries: &mut Entries<'_>, set: usize) -> usize {
        let all = entries.of_set(set);
        all.min_by_key(|at| entries.mark(*at)).unwrap()
    }
}

/// The predictor of the text: the successor as last seen.
#[derive(Debug, Default)]
struct OwnLatest {
    recent: VecDeque<u32>,
    successors: Vec<Option<u32>>,
}

impl SourcePredictor for OwnLatest {
    fn observe(&mut self, tenant: u32) -> Option<u32> {
        let at = tenant as usize;
        self.successors
            .resize(self.successors.len().max(at + 1), None);
        let predicted = self.successors[at];
        if self.recent.len() == 48
            && let Some(earlier) = self.recent.pop_front()
        {
            self.successors[earlier as usize] = Some(tenant);
        }
        self.recent.push_back(tenant);
        predicted
    }
}

/// The prefetch unit of the text around it.
#[derive(Debug, Default)]
struct OwnUnit {
    predictor: OwnLatest,
    histories: Vec<VecDeque<Page>>,
}

impl Prefetcher for OwnUnit {
    fn looked_up(&mut self, page: &Page, step: Step, guesses: &mut Vec<Page>) {
        let at = page.tenant as usize;
        self.histories
            .resize(self.histories.len().max(at + 1), VecDeque::new());
        self.histories[at].push_back(*page);
        if self.histories[at].len() > 2 {
            self.histories[at].pop_front();
        }
        let next = self.predictor.observe(page.tenant);
        if let Some(next) = next.filter(|_| step == Step::Miss) {
            guesses.extend(&self.histories[next as usize]);
        }
    }
}

fn with(config: &Config, events: &[Event], own: OwnPolicies) -> Result<Outcome, SimError> {
    run_own(config, input(&mut Events(events)), own)
}

#[test]
fn own_lru_gives_what_the_built_in_one_gives() {
    for flavour in [Flavour::Paper, Flavour::Hypersio] {
        let config = config(flavour);
        for seed in 0..4 {
            let events = events(seed);
            let built_in = run(&config, input(&mut Events(&events))).unwrap();
            let lru =
                || -> Option<Box<dyn ReplacementPolicy>> { Some(Box::new(OwnLru::default())) };
            let own = OwnPolicies {
                devtlb: lru(),
                levels: [None, lru(), lru(), None],
                ..OwnPolicies::default()
            };
            assert_eq!(with(&config, &events, own).unwrap(), built_in);
            assert!(built_in.caches.devtlb.evictions > 100);
        }
    }
}

#[test]
fn own_predictor_and_own_unit_give_what_the_built_in_ones_give() {
    let config = config(Flavour::Paper);
    let events = events(7);
    let built_in = run(&config, input(&mut Events(&events))).unwrap();
    assert!(built_in.prefetch.sent > 100);
    let predictor = OwnPolicies {
        predictor: Some(Box::new(OwnLatest::default())),
        ..OwnPolicies::default()
    };
    assert_eq!(with(&config, &events, predictor).unwrap(), built_in);
    let unit = OwnPolicies {
        prefetcher: Some(Box::new(OwnUnit::default())),
        ..OwnPolicies::default()
    };
    assert_eq!(with(&config, &events, unit).unwrap(), built_in);
}

/// What may not be done.
#[derive(Clone, Copy, Debug)]
enum Wrong {
    Victim(usize),
    Tenant(u32),
    Page(Page),
    Failure,
}

impl ReplacementPolicy for Wrong {
    fn used(&mut self, _entries: &mut Entries<'_>, _at: usize, _next_use: u64) {}
    fn inserted(&mut self, _entries: &mut Entries<'_>, _at: usize, _next_use: u64) {}
    fn removed(&mut self, _entries: &mut Entries<'_>, _at: usize) {}
    fn moved(&mut self, _entries: &mut Entries<'_>, _from: usize, _to: usize) {}

    fn victim(&mut self, entries: &mut Entries<'_>, set: usize) -> usize {
        match self {
            Self::Victim(at) => *at,
            // It has given up, so what it names is of no matter.
            Self::Failure => usize::MAX,
            _ => entries.of_set(set).start,
        }
    }

    fn failure(&mut self) -> Option<String> {
        matches!(self, Self::Failure).then(|| "it has had enough".to_owned())
    }
}

impl SourcePredictor for Wrong {
    fn observe(&mut self, tenant: u32) -> Option<u32> {
        match self {
            Self::Tenant(wrong) => Some(*wrong),
            _ => Some(tenant),
        }
    }
}

impl Prefetcher for Wrong {
    fn looked_up(&mut self, _page: &Page, _step: Step, guesses: &mut Vec<Page>) {
        if let Self::Page(page) = self {
            guesses.push(*page);
        }
    }
}

#[test]
fn policy_that_does_what_it_may_not_ends_the_run_with_an_error() {
    let events = events(3);
    let config = config(Flavour::Paper);
    let cache = |wrong| OwnPolicies {
        devtlb: Some(Box::new(wrong)),
        ..OwnPolicies::default()
    };
    let predictor = |wrong| OwnPolicies {
        predictor: Some(Box::new(wrong)),
        ..OwnPolicies::default()
    };
    let unit = |page| OwnPolicies {
        prefetcher: Some(Box::new(Wrong::Page(page))),
        ..OwnPolicies::default()
    };
    let page = Page {
        shift: 21,
        ..Page::default()
    };
    for (own, told) in [
        (
            cache(Wrong::Victim(64)),
            "policy of devtlb: it names entry 64 as the victim of set",
        ),
        (cache(Wrong::Victim(usize::MAX)), "as the victim of set"),
        (cache(Wrong::Failure), "policy of devtlb: it has had enough"),
        (
            predictor(Wrong::Tenant(40)),
            "policy of prefetch: it names tenant 40",
        ),
        (
            unit(Page { tenant: 99, ..page }),
            "no request can be for the page",
        ),
        (
            unit(Page { shift: 13, ..page }),
            "no request can be for the page",
        ),
        (
            unit(Page {
                iova: 1 << 60,
                ..page
            }),
            "no request can be for the page",
        ),
        (
            unit(Page {
                domain: u32::MAX,
                ..page
            }),
            "no request can be for the page",
        ),
    ] {
        let error = with(&config, &events, own).unwrap_err().to_string();
        assert!(error.contains(told), "{error}");
    }
}

#[test]
fn policy_of_a_part_that_is_not_there_or_there_more_than_once_is_refused() {
    let events = events(3);
    let mut config = config(Flavour::Paper);
    config.devices.count = 2;
    let own = OwnPolicies {
        devtlb: Some(Box::new(Wrong::Failure)),
        ..OwnPolicies::default()
    };
    let error = with(&config, &events, own).unwrap_err();
    assert!(error.to_string().contains("there are several"), "{error}");
    config.devices.count = 1;
    config.prefetch.enabled = false;
    let own = OwnPolicies {
        predictor: Some(Box::new(Wrong::Tenant(0))),
        ..OwnPolicies::default()
    };
    let error = with(&config, &events, own).unwrap_err();
    assert!(error.to_string().contains("no such part"), "{error}");
    let iotlb = OwnPolicies {
        iotlb: Some(Box::new(OwnLru::default())),
        ..OwnPolicies::default()
    };
    let error = with(&config, &events, iotlb).unwrap_err().to_string();
    assert!(
        error.starts_with("policy of iotlb: the configuration has no such part"),
        "{error}"
    );
}
