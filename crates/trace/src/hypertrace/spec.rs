// SPDX-License-Identifier: Apache-2.0
//! The settings of a hyper-trace, from a TOML file or a command line.

use std::num::NonZeroU32;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::event::SourceId;
use crate::parquet::{REQUESTS_PER_PACKET, TraceMeta};
use crate::tenant::{TenantShape, Workload};
use pagetide_access_log::TraceError;

/// Most tenants of a hyper-trace: five hundred times the paper's, and as many domains as the simulator
/// supports.
pub const MAX_TENANTS: u32 = (1 << 19) - 1;
/// Most packets of a turn.
pub const MAX_BURST_PACKETS: u32 = 1 << 20;
/// Largest weight. In RR a tenant of weight 1 waits for this many rounds.
pub const MAX_WEIGHT: u32 = 1 << 16;
/// Most address spaces of a tenant.
pub const MAX_SPACES: u32 = 1 << 10;
/// Most requests of a recorded tenant's packet.
pub const MAX_REQUESTS_PER_PACKET: u32 = 1 << 10;

/// Whose turn it is (IV-B).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// One after the other: RR. The order is imposed, so events have no times.
    #[default]
    Rr,
    /// A random tenant each turn, by seed: RAND. Events have no times.
    Rand,
    /// By the tenants' own times; a turn is one packet. Not in the paper: for tenants with
    /// [`crate::Timing`] or logs with times.
    Time,
}

impl Order {
    /// Its name in files and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rr => "rr",
            Self::Rand => "rand",
            Self::Time => "time",
        }
    }
}

/// When a hyper-trace ends, unless a number of packets ends it before.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// When a tenant has its turn and no packets left: the paper, "in order to avoid the edge effect when
    /// only a subset of all tenants is active" (V-A).
    #[default]
    FirstRunsOut,
    /// The same, but the others of that round still have their turn: what the
    /// authors' program does in RR. Only RR has rounds.
    RoundFinished,
    /// When no tenant has packets left: what the authors' program does in RAND.
    AllRunOut,
}

/// Lengths of tenants, between two figures that both occur: one tenant has the least, one the most, each
/// other one a random length between (Table III).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Lengths {
    /// Packets of the shortest tenant.
    pub min_packets: u64,
    /// Packets of the longest.
    pub max_packets: u64,
}

impl Lengths {
    /// Table III, in packets of three requests; `None` for a workload that is not in it.
    #[must_use]
    #[doc(alias = "Table III")]
    pub const fn of_paper(workload: Workload) -> Option<Self> {
        let (min, max) = match workload {
            Workload::Seq => return None,
            Workload::Iperf3 => (68_079, 108_510),
            Workload::Mediastream => (5_520, 73_657),
            Workload::Websearch => (43_362, 108_513),
        };
        Some(Self {
            min_packets: min / 3,
            max_packets: max / 3,
        })
    }
}

/// The source id of tenant number `i`, counted from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub enum SourceRule {
    /// `first + step * i`: no two tenants share one.
    Unique {
        /// Id of tenant 0.
        #[serde(default = "first_id")]
        first: u32,
        /// Distance from one tenant to the next; at least 1.
        #[serde(default = "id_step")]
        step: u32,
        /// Most bits of an id: 16 in PCIe, and in the authors' format; at most 32.
        #[serde(default = "id_bits")]
        id_bits: u32,
    },
    /// `128 * (i / n) + 8 * (2 + i % n)` with `n` devices a log: the rule of the authors' trace
    /// constructor, under which ids of neighbouring logs collide if `n` is above 16, and which exists to
    /// study that.
    Log {
        /// Devices in one log: 24 in the paper's runs, 12 for websearch.
        devices_per_log: u32,
    },
}

/// Device 2, function 0 of bus 0: the first that the authors' emulated machine assigns.
const fn first_id() -> u32 {
    16
}

/// Distance from one device to the next.
const fn id_step() -> u32 {
    8
}

const fn id_bits() -> u32 {
    16
}

impl Default for SourceRule {
    fn default() -> Self {
        Self::Unique {
            first: first_id(),
            step: id_step(),
            id_bits: id_bits(),
        }
    }
}

impl SourceRule {
    /// The source of tenant `tenant`, or `None` if 32 bits cannot hold it.
    #[must_use]
    pub fn source(self, tenant: u32) -> Option<SourceId> {
        let i = u64::from(tenant);
        let id = match self {
            Self::Unique { first, step, .. } => u64::from(first) + u64::from(step) * i,
            Self::Log { devices_per_log } => {
                let n = u64::from(devices_per_log);
                128 * i.checked_div(n)? + 8 * (2 + i % n)
            }
        };
        u32::try_from(id).ok().map(SourceId)
    }

    /// Its name in files: `unique`, or `log24` for 24 devices a log.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Unique { .. } => "unique".to_owned(),
            Self::Log { devices_per_log } => format!("log{devices_per_log}"),
        }
    }

    /// The rule of that name, the default one for `unique`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        if name == "unique" {
            return Some(Self::default());
        }
        match name.strip_prefix("log")?.parse() {
            Ok(devices_per_log) => Some(Self::Log { devices_per_log }),
            Err(_) => None,
        }
    }

    fn look_at(self, tenants: u32) -> Result<(), TraceError> {
        match self {
            Self::Unique { step: 0, .. } => {
                asked("sources.unique.step = 0: two tenants would share an id".to_owned())
            }
            Self::Unique {
                id_bits: 0 | 33.., ..
            } => asked("sources.unique.id_bits: between 1 and 32".to_owned()),
            Self::Unique {
                first,
                step,
                id_bits,
            } => {
                let last = u64::from(first) + u64::from(step) * u64::from(tenants - 1);
                if last >> id_bits == 0 {
                    return Ok(());
                }
                asked(format!(
                    "{tenants} tenants with ids from {first} in steps of {step} need ids up to {last}, \
                     which {id_bits} bits do not hold: take a smaller step, or more id_bits"
                ))
            }
            Self::Log { devices_per_log: 0 } => {
                asked("sources.log.devices_per_log = 0: a log has at least one device".to_owned())
            }
            Self::Log { .. } => match self.source(tenants - 1) {
                Some(_) => Ok(()),
                None => asked(format!("{tenants} tenants need ids of more than 32 bits")),
            },
        }
    }
}

/// Whether the trace has joins and leaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Membership {
    /// Requests alone, as in the authors' traces.
    #[default]
    Silent,
    /// A join right before a tenant's first packet, and a leave right after its
    /// last; of tenants that the end of the trace cuts off, at that end.
    Announced,
}

/// The kind of tenants.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Input {
    /// Generated by a recipe.
    Synthetic(TenantShape),
    /// Read from logs.
    Recorded(RecordedInput),
}

/// Tenants from logs: the sources of the logs in order, each one tenant.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RecordedInput {
    /// The logs, of any supported format.
    pub logs: Vec<PathBuf>,
    /// Consecutive requests of a source that are one packet (IV-C: 3).
    #[serde(default = "three")]
    pub requests_per_packet: u32,
    /// What to do if there are fewer sources than tenants.
    #[serde(default)]
    pub reuse: Reuse,
    /// Percentage of each source's requests, from its first on, that is left out: a log begins with the start of
    /// the driver, which maps most of its pages then.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub skip_percent: u32,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks like this")]
const fn is_zero(number: &u32) -> bool {
    *number == 0
}

impl RecordedInput {
    /// Requests that are left out of a source's `requests`.
    pub(crate) fn skipped(&self, requests: u64) -> u64 {
        let skipped = u128::from(requests) * u128::from(self.skip_percent) / 100;
        u64::try_from(skipped).unwrap_or(requests)
    }
}

const fn three() -> u32 {
    3
}

/// Whether one recorded source may be several tenants.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reuse {
    /// No: more tenants than sources are an error.
    #[default]
    Never,
    /// Yes, starting again from the first source after the last. Such tenants run in lockstep, which real
    /// ones do not.
    Wrap,
}

/// The settings of a hyper-trace.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HyperSpec {
    /// How many tenants.
    pub tenants: u32,
    /// The kind of tenants.
    pub input: Input,
    /// Seed of every random choice.
    #[serde(default = "one")]
    pub seed: u64,
    /// Whose turn it is.
    #[serde(default)]
    pub order: Order,
    /// Packets of one turn: 1 in RR1 and RAND1, 4 in RR4.
    #[serde(default = "one_packet")]
    pub burst_packets: u32,
    /// Packets of the whole trace, at most.
    #[serde(default)]
    pub packets: Option<u64>,
    /// When it ends otherwise.
    #[serde(default)]
    pub end: End,
    /// Lengths of the tenants. Without it synthetic ones are endless and recorded ones as they are; with it
    /// recorded ones are cut.
    #[serde(default)]
    pub lengths: Option<Lengths>,
    /// Bandwidth of the tenants in proportion: that of tenant `i` is entry `i` modulo the length. None: all
    /// equal. In RR a tenant skips rounds, in RAND it is chosen less often; its bursts stay whole.
    #[serde(default)]
    pub weights: Vec<u32>,
    /// The tenants' source ids.
    #[serde(default)]
    pub sources: SourceRule,
    /// Whether joins and leaves are recorded.
    #[serde(default)]
    pub membership: Membership,
    /// Address spaces of each synthetic tenant, a domain each, which its packets use in turn: processes that
    /// share a function, told apart by PASID. Recorded tenants have what the log has.
    #[serde(default = "one_space", skip_serializing_if = "is_one_space")]
    #[doc(alias = "PASID")]
    pub spaces: u32,
}

const fn one() -> u64 {
    1
}

const fn one_space() -> u32 {
    1
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde asks like this")]
const fn is_one_space(spaces: &u32) -> bool {
    *spaces == 1
}

const fn one_packet() -> u32 {
    1
}

impl HyperSpec {
    /// `tenants` tenants of `shape`, RR1, endless unless [`HyperSpec::packets`]
    /// or [`HyperSpec::lengths`] is set.
    #[must_use]
    pub fn synthetic(shape: TenantShape, tenants: u32) -> Self {
        Self::new(Input::Synthetic(shape), tenants)
    }

    /// `tenants` tenants of `input`, RR1, with every other setting at its default.
    #[must_use]
    pub fn new(input: Input, tenants: u32) -> Self {
        Self {
            tenants,
            input,
            seed: one(),
            order: Order::default(),
            burst_packets: one_packet(),
            packets: None,
            end: End::default(),
            lengths: None,
            weights: Vec::new(),
            sources: SourceRule::default(),
            membership: Membership::default(),
            spaces: one_space(),
        }
    }

    /// Checks every setting that can be checked without the logs.
    ///
    /// # Errors
    /// [`TraceError::Asked`] with what is wrong and what would be right.
    pub fn look_at_settings(&self) -> Result<(), TraceError> {
        within("tenants", u64::from(self.tenants), u64::from(MAX_TENANTS))?;
        within(
            "burst_packets",
            u64::from(self.burst_packets),
            u64::from(MAX_BURST_PACKETS),
        )?;
        if let Some(packets) = self.packets {
            within("packets", packets, u64::MAX)?;
        }
        self.look_at_spaces()?;
        self.look_at_end()?;
        self.look_at_order()?;
        self.sources.look_at(self.tenants)?;
        match &self.input {
            Input::Synthetic(shape) => shape.layout().map(drop),
            Input::Recorded(input) => {
                if input.skip_percent >= 100 {
                    return asked(format!(
                        "skip_percent = {}: at most 99, so that something is left",
                        input.skip_percent
                    ));
                }
                within(
                    "requests_per_packet",
                    u64::from(input.requests_per_packet),
                    u64::from(MAX_REQUESTS_PER_PACKET),
                )
            }
        }
    }

    fn look_at_spaces(&self) -> Result<(), TraceError> {
        within("spaces", u64::from(self.spaces), u64::from(MAX_SPACES))?;
        if self.spaces == 1 {
            return Ok(());
        }
        if matches!(self.input, Input::Recorded(_)) {
            return asked(format!(
                "spaces = {}: recorded tenants have the address spaces of their log; leave it out",
                self.spaces
            ));
        }
        let domains = u64::from(self.tenants) * u64::from(self.spaces);
        if domains > u64::from(MAX_TENANTS) {
            return asked(format!(
                "{} tenants with {} address spaces each are {domains} domains; there are {MAX_TENANTS}",
                self.tenants, self.spaces
            ));
        }
        Ok(())
    }

    fn look_at_end(&self) -> Result<(), TraceError> {
        if let Some(lengths) = self.lengths {
            within("lengths.min_packets", lengths.min_packets, u64::MAX)?;
            if lengths.min_packets > lengths.max_packets {
                return asked(format!(
                    "lengths: min_packets = {} is above max_packets = {}",
                    lengths.min_packets, lengths.max_packets
                ));
            }
        } else if self.packets.is_none() && matches!(self.input, Input::Synthetic(_)) {
            return asked("synthetic tenants never run out: give packets, or lengths".to_owned());
        }
        if self.end == End::RoundFinished && self.order != Order::Rr {
            return asked(format!(
                "end = \"round-finished\" is for order = \"rr\"; order = \"{}\" has no rounds",
                self.order.name()
            ));
        }
        Ok(())
    }

    fn look_at_order(&self) -> Result<(), TraceError> {
        for &weight in &self.weights {
            within("weights", u64::from(weight), u64::from(MAX_WEIGHT))?;
        }
        if self.weights.len() > self.tenants as usize {
            return asked(format!(
                "{} weights for {} tenants",
                self.weights.len(),
                self.tenants
            ));
        }
        if self.order != Order::Time {
            return Ok(());
        }
        if self.burst_packets != 1 || !self.weights.is_empty() {
            return asked(
                "order = \"time\" follows the tenants' own times: burst_packets is 1 and there are no weights"
                    .to_owned(),
            );
        }
        match &self.input {
            Input::Synthetic(shape) if shape.timing.is_none() => asked(
                "order = \"time\" needs tenants with times: give input.synthetic.timing".to_owned(),
            ),
            _ => Ok(()),
        }
    }

    /// The metadata of a file of this trace: requests a packet, and all these settings.
    ///
    /// # Errors
    /// [`TraceError::Asked`] if the settings cannot be written as JSON, or a packet has no request.
    pub fn meta(&self) -> Result<TraceMeta, TraceError> {
        let requests_per_packet = match &self.input {
            Input::Synthetic(_) => Some(REQUESTS_PER_PACKET),
            Input::Recorded(input) => NonZeroU32::new(input.requests_per_packet),
        };
        let Some(requests_per_packet) = requests_per_packet else {
            return asked("requests_per_packet = 0: a packet has at least one request".to_owned());
        };
        let settings = serde_json::to_value(self)
            .map_err(|error| TraceError::Asked(format!("the settings are not JSON: {error}")))?;
        Ok(TraceMeta {
            requests_per_packet,
            origin: serde_json::json!({ "hyper_trace": settings }),
        })
    }

    /// Weight of tenant `tenant`.
    pub(crate) fn weight(&self, tenant: u32) -> u32 {
        match self.weights.len() {
            0 => 1,
            n => self.weights[tenant as usize % n],
        }
    }
}

/// Refuses a count of 0 or above `max`.
fn within(name: &str, count: u64, max: u64) -> Result<(), TraceError> {
    if (1..=max).contains(&count) {
        return Ok(());
    }
    asked(match max {
        u64::MAX => format!("{name} = {count}: at least 1"),
        _ => format!("{name} = {count}: between 1 and {max}"),
    })
}

fn asked<T>(sentence: String) -> Result<T, TraceError> {
    Err(TraceError::Asked(sentence))
}
