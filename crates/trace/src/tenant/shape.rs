// SPDX-License-Identifier: Apache-2.0
//! The recipe of a synthetic tenant: every figure of HyperTRIO IV-D by name,
//! with the paper's value as default.

use serde::{Deserialize, Serialize};

use crate::event::{IOVA_BITS, PageSize, TraceAccess};
use pagetide_access_log::TraceError;

/// Where the data pages end if no first address is given: 32 pages of 2 MiB then
/// lie from `0xbc000000` on (IV-D).
const DATA_END: u64 = 0xc000_0000;
/// Most pages of one group; far more than any driver maps at a time.
pub const MAX_GROUP_PAGES: u32 = 1 << 20;

/// The workload of the paper (V-A) that a tenant imitates. The paper gives their active sets (V-C: 8, 32
/// and 36 pages, ring and mailbox included); how a tenant moves among its live pages is our reading, and
/// each figure can be set.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Workload {
    /// One live page at a time, used 1500 packets in a row: IV-D taken literally.
    Seq,
    /// 6 live pages in turn, 16 packets each.
    #[default]
    Iperf3,
    /// 30 live pages at random, 16 packets each on average.
    Mediastream,
    /// 34 live pages at random, 4 packets each on average.
    Websearch,
}

impl Workload {
    /// Every workload.
    pub const ALL: [Self; 4] = [Self::Seq, Self::Iperf3, Self::Mediastream, Self::Websearch];

    /// Its name in files and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Seq => "seq",
            Self::Iperf3 => "iperf3",
            Self::Mediastream => "mediastream",
            Self::Websearch => "websearch",
        }
    }

    /// The workload of that name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|w| w.name() == name)
    }

    const fn live_pages(self) -> u32 {
        match self {
            Self::Seq => 1,
            Self::Iperf3 => 6,
            Self::Mediastream => 30,
            Self::Websearch => 34,
        }
    }

    const fn data_pages(self) -> u32 {
        match self {
            Self::Seq | Self::Iperf3 | Self::Mediastream => 32,
            Self::Websearch => 34,
        }
    }

    const fn run_packets(self) -> u32 {
        match self {
            Self::Seq => 1,
            Self::Iperf3 | Self::Mediastream => 16,
            Self::Websearch => 4,
        }
    }

    const fn choice(self) -> PageChoice {
        match self {
            Self::Seq | Self::Iperf3 => PageChoice::Cyclic,
            Self::Mediastream | Self::Websearch => PageChoice::Random,
        }
    }

    const fn runs(self) -> RunLengths {
        match self {
            Self::Seq | Self::Iperf3 => RunLengths::Fixed,
            Self::Mediastream | Self::Websearch => RunLengths::Geometric,
        }
    }
}

/// How the next live page is chosen when a run of packets ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PageChoice {
    /// The next one, in turn.
    Cyclic,
    /// Any of them, all alike.
    Random,
}

/// How long a run of packets on one page is.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RunLengths {
    /// Always `run_packets`.
    Fixed,
    /// Geometrically distributed with the mean `run_packets`.
    Geometric,
}

/// The page of a packet's third request (the notification, IV-C).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ThirdPage {
    /// A page of its own.
    #[default]
    Mailbox,
    /// The ring's page once more.
    Ring,
    /// The packet's data page once more.
    Data,
}

impl ThirdPage {
    /// Its name in files and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mailbox => "mailbox",
            Self::Ring => "ring",
            Self::Data => "data",
        }
    }
}

/// Where in their period tenants start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stagger {
    /// Each at its own random place.
    #[default]
    Random,
    /// All at the beginning.
    None,
}

/// Whether pages are unmapped when the window leaves them.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Unmap {
    /// Never: the trace has no invalidations, as the authors' have none.
    #[default]
    Never,
    /// An invalidation of the page follows its last packet ("until the driver unmaps it", IV-D).
    WhenLeft,
}

/// The access of a group's requests, as written in a recipe.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GroupAccess {
    /// Not recorded.
    #[default]
    Unknown,
    /// DMA from memory.
    Read,
    /// DMA to memory.
    Write,
}

impl From<GroupAccess> for TraceAccess {
    fn from(access: GroupAccess) -> Self {
        match access {
            GroupAccess::Unknown => Self::Unknown,
            GroupAccess::Read => Self::Read,
            GroupAccess::Write => Self::Write,
        }
    }
}

/// One page that every packet touches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SinglePage {
    /// Its address.
    pub iova: u64,
    /// Its size: 4096, 2097152 or 1073741824.
    pub page_bytes: u64,
    /// Access of its requests.
    #[serde(default)]
    pub access: GroupAccess,
}

/// The data buffers: the second group of IV-D.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DataPages {
    /// Address of the first; by default such that the last ends at `0xc0000000`.
    pub iova: Option<u64>,
    /// Number of pages in the period; by default 32, websearch 34.
    pub pages: Option<u32>,
    /// Size of each.
    pub page_bytes: u64,
    /// Access of their requests.
    pub access: GroupAccess,
}

impl Default for DataPages {
    fn default() -> Self {
        Self {
            iova: None,
            pages: None,
            page_bytes: PageSize::SIZE_2M.bytes(),
            access: GroupAccess::Write,
        }
    }
}

/// Pages used only when the tenant starts: the third group of IV-D.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InitPages {
    /// Address of the first.
    pub iova: u64,
    /// How many; 0 for none.
    pub pages: u32,
    /// Size of each.
    pub page_bytes: u64,
    /// Share of the tenant's packets, at its beginning, that go to them (paper:
    /// below 7,000 of 4.6 million requests).
    pub share: f64,
    /// Most uses of each page, whatever the share (paper: below 100).
    pub uses_max: u32,
    /// Access of their requests.
    pub access: GroupAccess,
}

impl Default for InitPages {
    fn default() -> Self {
        Self {
            iova: 0xfffb_a000,
            pages: 70,
            page_bytes: PageSize::SIZE_4K.bytes(),
            share: 0.0015,
            uses_max: 99,
            access: GroupAccess::Unknown,
        }
    }
}

/// When packets come; without it a trace knows only their order.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Timing {
    /// Packets a second, on average.
    pub packets_per_second: u64,
    /// Each packet is late by a random time below this, but never before the one before it.
    #[serde(default)]
    pub jitter_ns: u64,
}

/// The recipe of a synthetic tenant. `TenantShape::default()` is iperf3; a value of `None` means the
/// workload's own.
///
/// Every packet is three requests: ring page, data page, third page. A window of `live_pages` data pages is
/// in use; it moves on by one page every `uses_per_page` packets, so that over a period each page is used
/// about that often, whatever the window's size. Within the window, packets come in runs on one page.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TenantShape {
    /// Source of the figures that are not given here.
    pub workload: Workload,
    /// The page of the ring's descriptors (paper: 2 MiB at `0x34800000`).
    pub ring: SinglePage,
    /// The data pages.
    pub data: DataPages,
    /// The page of notifications; the paper names none, this is where an x86 device's interrupts go.
    pub mailbox: SinglePage,
    /// The pages used only at the start.
    pub init: InitPages,
    /// What the third request touches.
    pub third: ThirdPage,
    /// Packets until the window moves on by a page (paper: around 1500).
    pub uses_per_page: u32,
    /// Data pages in use at one time.
    pub live_pages: Option<u32>,
    /// How the next page is chosen.
    pub choice: Option<PageChoice>,
    /// Packets in a row on one page, exactly or on average.
    pub run_packets: Option<u32>,
    /// Whether that is exact.
    pub runs: Option<RunLengths>,
    /// Where tenants begin.
    pub stagger: Stagger,
    /// Whether left pages are unmapped.
    pub unmap: Unmap,
    /// When packets come.
    pub timing: Option<Timing>,
}

impl Default for TenantShape {
    fn default() -> Self {
        Self {
            workload: Workload::Iperf3,
            ring: SinglePage {
                iova: 0x3480_0000,
                page_bytes: PageSize::SIZE_2M.bytes(),
                access: GroupAccess::Read,
            },
            data: DataPages::default(),
            mailbox: SinglePage {
                iova: 0xfee0_0000,
                page_bytes: PageSize::SIZE_4K.bytes(),
                access: GroupAccess::Write,
            },
            init: InitPages::default(),
            third: ThirdPage::Mailbox,
            uses_per_page: 1500,
            live_pages: None,
            choice: None,
            run_packets: None,
            runs: None,
            stagger: Stagger::Random,
            unmap: Unmap::Never,
            timing: None,
        }
    }
}

impl TenantShape {
    /// The defaults of `workload`.
    #[must_use]
    pub fn of(workload: Workload) -> Self {
        Self {
            workload,
            ..Self::default()
        }
    }

    /// Pages in use at one time when the tenant runs: ring, live data pages, and the mailbox if it is used.
    #[must_use]
    pub fn active_pages(&self) -> u32 {
        let mailbox = u32::from(self.third == ThirdPage::Mailbox);
        1 + mailbox + self.live_pages.unwrap_or(self.workload.live_pages())
    }

    /// Packets at the start of a tenant of `packets` that go to the init pages.
    #[must_use]
    pub fn init_packets(&self, packets: u64) -> u64 {
        let most = u64::from(self.init.pages) * u64::from(self.init.uses_max) / 3;
        #[expect(
            clippy::cast_precision_loss,
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a share in 0..=1 of a count; one packet more or less past 2^53 is nothing"
        )]
        let share = (packets as f64 * self.init.share).round() as u64;
        share.min(most)
    }

    /// The same with every default filled in and every figure checked.
    ///
    /// # Errors
    /// [`TraceError::Asked`] if the figures are not valid for a tenant.
    pub(crate) fn layout(&self) -> Result<Layout, TraceError> {
        let pages = self.data.pages.unwrap_or(self.workload.data_pages());
        let data_size = page_size("data", self.data.page_bytes)?;
        let data_iova = match self.data.iova {
            Some(iova) => iova,
            None => u64::from(pages)
                .checked_mul(data_size.bytes())
                .and_then(|bytes| DATA_END.checked_sub(bytes))
                .ok_or_else(|| {
                    asked(format!(
                        "data.pages = {pages} of {data_size} do not fit below {DATA_END:#x}; give data.iova"
                    ))
                })?,
        };
        let single = |name, page: SinglePage| Span::new(name, page.iova, 1, page.page_bytes);
        let layout = Layout {
            ring: single("ring", self.ring)?,
            data: Span::new("data", data_iova, pages, data_size.bytes())?,
            mailbox: single("mailbox", self.mailbox)?,
            init: Span::new(
                "init",
                self.init.iova,
                self.init.pages,
                self.init.page_bytes,
            )?,
            live_pages: self.live_pages.unwrap_or(self.workload.live_pages()),
            choice: self.choice.unwrap_or(self.workload.choice()),
            run_packets: self.run_packets.unwrap_or(self.workload.run_packets()),
            runs: self.runs.unwrap_or(self.workload.runs()),
            shape: *self,
        };
        layout.look_at_figures()?;
        Ok(layout)
    }
}

/// A run of pages.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Span {
    pub(crate) iova: u64,
    pub(crate) pages: u32,
    pub(crate) size: PageSize,
}

impl Span {
    fn new(name: &str, iova: u64, pages: u32, page_bytes: u64) -> Result<Self, TraceError> {
        let size = page_size(name, page_bytes)?;
        if pages > MAX_GROUP_PAGES {
            return Err(asked(format!(
                "{name}.pages = {pages}: at most {MAX_GROUP_PAGES}"
            )));
        }
        if !iova.is_multiple_of(size.bytes()) {
            return Err(asked(format!(
                "{name}.iova = {iova:#x} is not a multiple of its page size, {size}"
            )));
        }
        let span = Self { iova, pages, size };
        if span.end().is_none_or(|end| end > 1 << IOVA_BITS) {
            return Err(asked(format!(
                "{name}: {pages} pages of {size} from {iova:#x} pass the end of the address space, 2^{IOVA_BITS}"
            )));
        }
        Ok(span)
    }

    fn end(&self) -> Option<u64> {
        let bytes = u64::from(self.pages).checked_mul(self.size.bytes())?;
        self.iova.checked_add(bytes)
    }

    /// Address of page `page`, which is below `pages`.
    pub(crate) fn page(&self, page: u32) -> u64 {
        debug_assert!(page < self.pages);
        self.iova + (u64::from(page) << self.size.shift())
    }

    fn overlaps(&self, other: &Self) -> bool {
        let (Some(end), Some(other_end)) = (self.end(), other.end()) else {
            return true;
        };
        self.pages > 0 && other.pages > 0 && self.iova < other_end && other.iova < end
    }
}

/// A [`TenantShape`] with every figure resolved.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    pub(crate) ring: Span,
    pub(crate) data: Span,
    pub(crate) mailbox: Span,
    pub(crate) init: Span,
    pub(crate) live_pages: u32,
    pub(crate) choice: PageChoice,
    pub(crate) run_packets: u32,
    pub(crate) runs: RunLengths,
    pub(crate) shape: TenantShape,
}

impl Layout {
    fn look_at_figures(&self) -> Result<(), TraceError> {
        let pages = self.data.pages;
        if self.live_pages == 0 || self.live_pages > pages {
            return Err(asked(format!(
                "live_pages = {}: between 1 and the number of data pages, {pages}",
                self.live_pages
            )));
        }
        if self.run_packets == 0 {
            return Err(asked("run_packets = 0: a run has at least one packet"));
        }
        if self.shape.uses_per_page == 0 {
            return Err(asked("uses_per_page = 0: a page is used at least once"));
        }
        let share = self.shape.init.share;
        if !(0.0..=1.0).contains(&share) {
            return Err(asked(format!("init.share = {share}: between 0 and 1")));
        }
        if let Some(timing) = self.shape.timing
            && !(1..=1_000_000_000_000).contains(&timing.packets_per_second)
        {
            return Err(asked(format!(
                "timing.packets_per_second = {}: between 1 and 10^12",
                timing.packets_per_second
            )));
        }
        self.look_at_overlaps()
    }

    /// Two groups at one address would be one page of two sizes.
    fn look_at_overlaps(&self) -> Result<(), TraceError> {
        let spans = [
            ("ring", self.ring),
            ("data", self.data),
            ("mailbox", self.mailbox),
            ("init", self.init),
        ];
        for (i, (name, span)) in spans.iter().enumerate() {
            for (other_name, other) in &spans[i + 1..] {
                if span.overlaps(other) {
                    return Err(asked(format!(
                        "the {name} pages at {:#x} and the {other_name} pages at {:#x} overlap",
                        span.iova, other.iova
                    )));
                }
            }
        }
        Ok(())
    }
}

fn page_size(name: &str, bytes: u64) -> Result<PageSize, TraceError> {
    PageSize::from_bytes(bytes)
        .filter(|size| size.level().is_some())
        .ok_or_else(|| {
            asked(format!(
                "{name}.page_bytes = {bytes}: 4096, 2097152 or 1073741824"
            ))
        })
}

fn asked(sentence: impl Into<String>) -> TraceError {
    TraceError::Asked(sentence.into())
}
