// SPDX-License-Identifier: Apache-2.0
//! The paper's open questions, as settings.

use pagetide_trace::ThirdPage;

use crate::config::{Config, Flavour, PtbUnit, WalkCost};

/// One reading of the paper.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Setting {
    pub(super) cost: WalkCost,
    pub(super) unit: PtbUnit,
    pub(super) third: ThirdPage,
    names_unit: NamesUnit,
}

/// Whether the unit matters, and so is part of the name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum NamesUnit {
    Yes,
    No,
}

const COSTS: [WalkCost; 2] = [WalkCost::Nested, WalkCost::Short];
const THIRDS: [ThirdPage; 2] = [ThirdPage::Mailbox, ThirdPage::Ring];

impl Setting {
    /// Every reading.
    pub(super) fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for cost in COSTS {
            for unit in [PtbUnit::Requests, PtbUnit::Packets] {
                for third in THIRDS {
                    all.push(Self {
                        cost,
                        unit,
                        third,
                        names_unit: NamesUnit::Yes,
                    });
                }
            }
        }
        all
    }

    /// Readings for a PTB of one entry, where its unit makes no difference: one
    /// packet is in flight either way.
    pub(super) fn of_one_entry() -> Vec<Self> {
        Self::all()
            .into_iter()
            .filter(|setting| setting.unit == PtbUnit::Requests)
            .map(|setting| Self {
                names_unit: NamesUnit::No,
                ..setting
            })
            .collect()
    }

    /// Its name in a report.
    pub(super) fn name(self) -> String {
        let cost = match self.cost {
            WalkCost::Nested => "24 accesses a walk",
            WalkCost::Short => "short walk",
        };
        let third = self.third.name();
        match (self.names_unit, self.unit) {
            (NamesUnit::No, _) => format!("{cost}, third page {third}"),
            (NamesUnit::Yes, PtbUnit::Requests) => {
                format!("{cost}, PTB of requests, third page {third}")
            }
            (NamesUnit::Yes, PtbUnit::Packets) => {
                format!("{cost}, PTB of packets, third page {third}")
            }
        }
    }

    fn apply(self, mut config: Config) -> Config {
        config.walk.cost = self.cost;
        config.ptb.unit = self.unit;
        config
    }

    /// Table IV, Base.
    pub(super) fn base(self) -> Config {
        self.apply(Config::base(Flavour::Paper))
    }

    /// Base with HyperTRIO's partitions and a PTB of `entries` (V-D).
    pub(super) fn partitioned(self, entries: u32) -> Config {
        let mut config = self.hypertrio();
        config.ptb.entries = entries;
        config.prefetch.enabled = false;
        config
    }

    /// Table IV, HyperTRIO.
    pub(super) fn hypertrio(self) -> Config {
        self.apply(Config::hypertrio(Flavour::Paper))
    }
}
