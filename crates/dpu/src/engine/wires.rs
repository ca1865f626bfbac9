// SPDX-License-Identifier: Apache-2.0
//! What is wired for the posted chains of a queue, besides its rings.
//!
//! | [`Keeping`] | wired from | to |
//! |---|---|---|
//! | `ToUse` | the kind's order ([`Wire`](crate::kind::posted::PostedOrder::Wire)) | the use of the chain |
//! | `Cache` | likewise | beyond it, as long as the cache has room ([`PinDownCache`]) |
//! | `Everything` | the start of the queue | its end; all memory of the device ([`Everything`]) |

use super::pin_down::{PinDownCache, Use};
use crate::{
    kind::work::Keeping,
    memory::{DeviceMemory, Span},
    page_demand::PartNo,
};
use pagetide_addr::{DomainId, FilePage, FileRange, PAGE_BYTES};
use pagetide_vpri::DmaDomain;
use std::{
    collections::{BTreeMap, VecDeque},
    rc::Rc,
    sync::{Arc, Mutex, PoisonError},
};

/// Most bytes of posted chains that are wired of a queue to their use: 1,024 buffers of a page.
const TO_USE_BYTES_MAX: u64 = 4 << 20;
/// Most wires that an engine unwires in one step: some hundred microseconds.
const STEPS_MAX: u64 = 1024;
/// Parts of memory whose pages are requested at a time: few, since others need the same host.
const ASKED_MAX: usize = 4;

type Wire = (Arc<DmaDomain>, FileRange);
type CachedPage = (DomainId, FilePage);

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct PostedWires {
    how: How,
    bytes: u64,
    /// Bytes wired, and no longer wired, that are not counted yet.
    news: (u64, u64),
}

#[derive(Debug)]
enum How {
    ToUse(BTreeMap<u64, Vec<Wire>>),
    Cache {
        cache: PinDownCache<CachedPage, Wire>,
        /// Pages in use, by chain.
        used: BTreeMap<u64, Vec<CachedPage>>,
    },
    Everything(Everything),
}

impl Default for How {
    fn default() -> Self {
        Self::ToUse(BTreeMap::new())
    }
}

impl PostedWires {
    /// Nothing wired yet.
    pub fn new(keeping: Keeping) -> Self {
        let how = match keeping {
            Keeping::ToUse => How::default(),
            Keeping::Cache { bytes } => How::Cache {
                cache: PinDownCache::new(bytes / PAGE_BYTES),
                used: BTreeMap::new(),
            },
            Keeping::Everything => How::Everything(Everything::default()),
        };
        Self {
            how,
            bytes: 0,
            news: (0, 0),
        }
    }

    /// Wires the pages of a chain, which are leased, as far as the bound allows.
    pub fn wire(&mut self, memory: &DeviceMemory, chain: u64, spans: &[Span]) {
        let (bytes, news) = (&mut self.bytes, &mut self.news);
        match &mut self.how {
            How::ToUse(chains) => {
                for span in spans {
                    let (domain, pages) = (memory.port(*span).domain(), span.pages());
                    if *bytes + pages.bytes() > TO_USE_BYTES_MAX || !domain.attributes().wire(pages)
                    {
                        return;
                    }
                    *bytes += pages.bytes();
                    news.0 += pages.bytes();
                    let wires = chains.entry(chain).or_default();
                    wires.push((domain.clone(), pages));
                }
            }
            How::Cache { cache, used } => {
                for span in spans {
                    let domain = memory.port(*span).domain();
                    for page in span.pages().iter() {
                        let pin = || {
                            let is_wired = domain.attributes().wire(page.single());
                            is_wired.then(|| {
                                news.0 += PAGE_BYTES;
                                (domain.clone(), page.single())
                            })
                        };
                        let mut gone = 0;
                        let unpin = |wire| gone += unwire(wire);
                        let name = (domain.id(), page);
                        if cache.begin_use(name, pin, unpin) == Use::Pinned {
                            used.entry(chain).or_default().push(name);
                        }
                        news.1 += gone;
                    }
                }
            }
            How::Everything(_) => {}
        }
    }

    /// A chain is used.
    pub fn used(&mut self, chain: u64) {
        match &mut self.how {
            How::ToUse(chains) if !chains.is_empty() => {
                for wire in chains.remove(&chain).into_iter().flatten() {
                    let gone = unwire(wire);
                    self.bytes -= gone;
                    self.news.1 += gone;
                }
            }
            How::Cache { cache, used } => {
                for page in used.remove(&chain).into_iter().flatten() {
                    cache.end_use(page);
                }
            }
            How::ToUse(_) | How::Everything(_) => {}
        }
    }

    /// Unwires all that is wired; if that is much, on a thread of its own, since others need the engine.
    pub fn unwire_all(&mut self) {
        let gone = match &mut self.how {
            How::ToUse(chains) => {
                let wires = std::mem::take(chains).into_values().flatten();
                wires.map(unwire).sum()
            }
            How::Cache { cache, used } => {
                used.clear();
                let mut all = cache.take_all();
                let bytes = all.len() * PAGE_BYTES;
                apart(all.len(), move || all.clear(drop_wire));
                bytes
            }
            How::Everything(everything) => {
                let wires = everything.end();
                let bytes = wires.iter().map(|(_, pages)| pages.bytes()).sum();
                apart(wires.len() as u64, move || {
                    wires.into_iter().for_each(drop_wire);
                });
                bytes
            }
        };
        self.bytes = 0;
        self.news.1 += gone;
    }

    /// Bytes that were wired, and that are no longer, since the last call.
    pub fn take_news(&mut self) -> (u64, u64) {
        std::mem::take(&mut self.news)
    }

    /// The next part of `memory` whose pages are to be requested, if all of it is to be wired. Parts that are
    /// present are wired; so many are tried at most.
    pub fn wire_more(&mut self, memory: &Rc<DeviceMemory>, tries: usize) -> Option<Part> {
        let How::Everything(everything) = &mut self.how else {
            return None;
        };
        everything.begin(memory);
        let asked = everything.wire_more(tries);
        self.news.1 += everything.forget(tries);
        self.news.0 += std::mem::take(&mut everything.wired_bytes);
        asked
    }

    /// True if there are parts of memory to be wired without waiting for an answer.
    pub fn has_more(&self, memory: &Rc<DeviceMemory>) -> bool {
        match &self.how {
            How::Everything(everything) => everything.has_more(memory),
            How::ToUse(_) | How::Cache { .. } => false,
        }
    }

    /// The pages of a part were requested, and that was the answer.
    pub fn part_answered(&mut self, part: PartNo, answer: PartAnswer) {
        if let How::Everything(everything) = &mut self.how {
            everything.answered(part, answer);
            self.news.0 += std::mem::take(&mut everything.wired_bytes);
        }
    }
}

fn unwire((domain, pages): Wire) -> u64 {
    domain.attributes().unwire(pages);
    pages.bytes()
}

fn drop_wire(wire: Wire) {
    unwire(wire);
}

/// Does what takes `steps` steps, on a thread of its own if they are many.
fn apart(steps: u64, work: impl FnOnce() + Send + 'static) {
    if steps <= STEPS_MAX {
        return work();
    }
    // If there is no thread to be had, it is done here all the same.
    let work = Arc::new(Mutex::new(Some(work)));
    let theirs = Arc::clone(&work);
    let thread = std::thread::Builder::new().name("unwire".to_owned());
    if let Err(error) = thread.spawn(move || do_once(&theirs)) {
        tracing::warn!(%error, "an engine unwires many pages itself: there is no thread for it");
        do_once(&work);
    }
}

fn do_once(work: &Mutex<Option<impl FnOnce()>>) {
    let mut work = work.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(work) = work.take() {
        work();
    }
}

/// A part of memory whose pages are to be requested: at most a section.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    pub number: PartNo,
    pub domain: DomainId,
    pub pages: FileRange,
}

/// How the request for the pages of a part ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PartAnswer {
    /// They were present.
    Present,
    /// Some of them cannot be had.
    Lost,
}

/// All memory of a device, part by part (*static pinning*).
///
/// ```text
///   parts ── wired at once, if present
///         └─ requested (few at a time) ── answered ─► tried again
///                                      └─ lost ─────► each half of it by itself; a page that is lost, never
/// ```
/// A part that was present and is evicted before it is wired is requested again. A few parts are tried at a time,
/// since others need the engine: also when the device gets other memory, of which it may have had most before. What
/// was wired then stays so until all parts of the new memory have been tried.
#[derive(Debug, Default)]
pub(crate) struct Everything {
    memory: Option<Rc<DeviceMemory>>,
    /// How many there were before it.
    number: u32,
    /// Parts to be tried.
    left: VecDeque<Wire>,
    /// Parts that were requested, by number: at most [`ASKED_MAX`].
    asked: BTreeMap<u32, Wire>,
    /// How many were.
    requests: u32,
    wired: Vec<Wire>,
    /// What is still wired of the memory before.
    former: Vec<Wire>,
    /// Not told yet.
    wired_bytes: u64,
}

impl Everything {
    /// Begins with `memory`, if that is another one than before.
    fn begin(&mut self, memory: &Rc<DeviceMemory>) {
        if self.is_of(memory) {
            return;
        }
        self.former.append(&mut self.wired);
        self.memory = Some(memory.clone());
        self.number += 1;
        // Answers to what was asked before are no longer for any part.
        self.asked.clear();
        self.left.clear();
        for (domain, range) in memory.parts() {
            let sections = range.by_section();
            (self.left).extend(sections.map(|(_, pages)| (domain.clone(), pages)));
        }
    }

    /// Unwires up to `tries` parts of the memory before, once all parts have been tried; bytes that this was.
    fn forget(&mut self, tries: usize) -> u64 {
        if !self.left.is_empty() {
            return 0;
        }
        let from = self.former.len().saturating_sub(tries);
        self.former.drain(from..).map(unwire).sum()
    }

    fn is_of(&self, memory: &Rc<DeviceMemory>) -> bool {
        (self.memory.as_ref()).is_some_and(|known| Rc::ptr_eq(known, memory))
    }

    fn has_more(&self, memory: &Rc<DeviceMemory>) -> bool {
        let is_due = match self.left.is_empty() {
            true => !self.former.is_empty(),
            false => self.asked.len() < ASKED_MAX,
        };
        is_due || !self.is_of(memory)
    }

    fn wire_more(&mut self, tries: usize) -> Option<Part> {
        for _ in 0..tries {
            if self.asked.len() >= ASKED_MAX {
                return None;
            }
            let (domain, pages) = self.left.pop_front()?;
            if domain.attributes().wire(pages) {
                self.wired_bytes += pages.bytes();
                self.wired.push((domain, pages));
                continue;
            }
            self.requests = self.requests.wrapping_add(1);
            let asked = Part {
                number: PartNo {
                    memory: self.number,
                    part: self.requests,
                },
                domain: domain.id(),
                pages,
            };
            self.asked.insert(self.requests, (domain, pages));
            return Some(asked);
        }
        None
    }

    fn answered(&mut self, PartNo { memory, part }: PartNo, answer: PartAnswer) {
        if memory != self.number {
            return;
        }
        let Some((domain, pages)) = self.asked.remove(&part) else {
            return;
        };
        match answer {
            PartAnswer::Present => self.left.push_front((domain, pages)),
            PartAnswer::Lost => {
                let half = pages.len() / 2;
                if half > 0 {
                    let middle = pages.start.plus(half);
                    // First of all, so that few halves wait at a time, however much is lost.
                    self.left
                        .push_front((domain.clone(), middle.run(pages.len() - half)));
                    self.left.push_front((domain, pages.start.run(half)));
                }
            }
        }
    }

    /// All that is wired, for the caller to unwire.
    fn end(&mut self) -> Vec<Wire> {
        let Self {
            mut wired, former, ..
        } = std::mem::take(self);
        wired.extend(former);
        wired
    }
}
