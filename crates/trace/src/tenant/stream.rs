// SPDX-License-Identifier: Apache-2.0
//! The endless stream of one synthetic tenant, a packet at a time.

use std::sync::Arc;

use pagetide_addr::Iova;

use super::random_stream::RandomStream;
use super::shape::{Layout, PageChoice, RunLengths, Span, Stagger, TenantShape, ThirdPage, Unmap};
use crate::event::{Event, EventKind, IommuDomain, SourceId, TraceAccess};
use pagetide_access_log::TraceError;

/// Picoseconds of a second: the unit of a tenant's clock, since a packet's share of a second is seldom
/// whole nanoseconds.
const PS_PER_SECOND: u64 = 1_000_000_000_000;

/// One synthetic tenant. It never ends; the reader decides how much to take.
#[derive(Clone, Debug)]
pub struct SyntheticTenant {
    layout: Arc<Layout>,
    random: RandomStream,
    source: SourceId,
    domain: IommuDomain,
    init_left: u64,
    init_page: u32,
    /// First page of the window.
    head: u32,
    /// Packets until the window moves on.
    head_left: u32,
    /// The window's page in use, counted from `head`.
    slot: u32,
    /// Packets left of the run on it, if runs are fixed.
    run_left: u32,
    /// A page that the window has left and that is unmapped before the next packet.
    left_page: Option<u32>,
    clock: Option<Clock>,
}

/// When the next packet comes.
#[derive(Clone, Copy, Debug)]
struct Clock {
    due_ps: u64,
    next_ns: u64,
}

impl SyntheticTenant {
    /// Tenant number `tenant` of `seed`, starting with `init_packets` packets to the init pages (see
    /// [`TenantShape::init_packets`]).
    ///
    /// # Errors
    /// [`TraceError::Asked`] if the recipe's figures are not valid for a tenant.
    pub fn new(
        shape: &TenantShape,
        seed: u64,
        tenant: u32,
        init_packets: u64,
    ) -> Result<Self, TraceError> {
        let layout = Arc::new(shape.layout()?);
        Ok(Self::of(layout, seed, tenant, init_packets))
    }

    /// As [`SyntheticTenant::new`], of a layout that many tenants share.
    pub(crate) fn of(layout: Arc<Layout>, seed: u64, tenant: u32, init_packets: u64) -> Self {
        let mut random = RandomStream::new(seed, u64::from(tenant));
        let (uses, run) = (layout.shape.uses_per_page, layout.run_packets);
        let (head, into) = match layout.shape.stagger {
            Stagger::Random => (random.below(layout.data.pages), random.below(uses)),
            Stagger::None => (0, 0),
        };
        let packet = u64::from(head) * u64::from(uses) + u64::from(into);
        #[expect(clippy::cast_possible_truncation, reason = "remainders of u32")]
        let (turn, in_run) = (
            (packet / u64::from(run) % u64::from(layout.live_pages)) as u32,
            (packet % u64::from(run)) as u32,
        );
        let slot = match layout.choice {
            PageChoice::Cyclic => turn,
            PageChoice::Random => random.below(layout.live_pages),
        };
        let mut tenant = Self {
            random,
            source: SourceId(tenant),
            domain: IommuDomain(tenant),
            init_left: if layout.init.pages == 0 {
                0
            } else {
                init_packets
            },
            init_page: 0,
            head,
            head_left: uses - into,
            slot,
            run_left: run - in_run,
            left_page: None,
            clock: None,
            layout,
        };
        tenant.start_clock();
        tenant
    }

    /// The same tenant under other ids; by default both are its number.
    #[must_use]
    pub fn named(self, source: SourceId, domain: IommuDomain) -> Self {
        Self {
            source,
            domain,
            ..self
        }
    }

    /// When the next packet comes, if the recipe has times.
    #[must_use]
    pub fn next_time_ns(&self) -> Option<u64> {
        self.clock.map(|clock| clock.next_ns)
    }

    /// Appends the events of the next packet to `out`: three requests, preceded by the invalidation of a
    /// page that was left.
    pub fn next_packet(&mut self, out: &mut Vec<Event>) {
        let time_ns = self.next_time_ns();
        if let Some(page) = self.left_page.take() {
            let span = self.layout.data;
            let mut event = self.event(span, page, TraceAccess::Unknown, time_ns);
            event.kind = EventKind::InvalidatePages;
            out.push(event);
        }
        if self.init_left > 0 {
            self.init_packet(time_ns, out);
        } else {
            self.data_packet(time_ns, out);
        }
        self.tick();
    }

    fn init_packet(&mut self, time_ns: Option<u64>, out: &mut Vec<Event>) {
        let (span, access) = (self.layout.init, self.layout.shape.init.access.into());
        self.init_left -= 1;
        for _ in 0..3 {
            out.push(self.event(span, self.init_page, access, time_ns));
            self.init_page += 1;
            if self.init_page == span.pages {
                self.init_page = 0;
            }
        }
    }

    fn data_packet(&mut self, time_ns: Option<u64>, out: &mut Vec<Event>) {
        let layout = &*self.layout;
        let shape = &layout.shape;
        let mut page = self.head + self.slot;
        if page >= layout.data.pages {
            page -= layout.data.pages;
        }
        let ring = self.event(layout.ring, 0, shape.ring.access.into(), time_ns);
        let data = self.event(layout.data, page, shape.data.access.into(), time_ns);
        let third = match shape.third {
            ThirdPage::Mailbox => {
                self.event(layout.mailbox, 0, shape.mailbox.access.into(), time_ns)
            }
            ThirdPage::Ring => ring,
            ThirdPage::Data => data,
        };
        out.extend_from_slice(&[ring, data, third]);
        self.move_on();
    }

    /// Moves the window, and the place in it, after a packet.
    fn move_on(&mut self) {
        let layout = &*self.layout;
        let ends = match layout.runs {
            RunLengths::Fixed => {
                self.run_left -= 1;
                self.run_left == 0
            }
            // A run that ends with equal probability after each packet is geometric.
            RunLengths::Geometric => self.random.once_in(layout.run_packets),
        };
        if ends {
            self.run_left = layout.run_packets;
            self.slot = match layout.choice {
                PageChoice::Random => self.random.below(layout.live_pages),
                PageChoice::Cyclic if self.slot + 1 == layout.live_pages => 0,
                PageChoice::Cyclic => self.slot + 1,
            };
        }
        self.head_left -= 1;
        if self.head_left == 0 {
            self.head_left = layout.shape.uses_per_page;
            if layout.shape.unmap == Unmap::WhenLeft {
                self.left_page = Some(self.head);
            }
            self.head += 1;
            if self.head == layout.data.pages {
                self.head = 0;
            }
        }
    }

    fn event(&self, span: Span, page: u32, access: TraceAccess, time_ns: Option<u64>) -> Event {
        Event {
            time_ns,
            source: self.source,
            domain: self.domain,
            iova: Iova(span.page(page)),
            page_size: Some(span.size),
            access,
            kind: EventKind::Translate,
        }
    }

    fn start_clock(&mut self) {
        let Some(timing) = self.layout.shape.timing else {
            return;
        };
        let due_ps = match self.layout.shape.stagger {
            Stagger::Random => self
                .random
                .below_u64(PS_PER_SECOND / timing.packets_per_second),
            Stagger::None => 0,
        };
        let late_ns = self.random.below_u64(timing.jitter_ns);
        self.clock = Some(Clock {
            due_ps,
            next_ns: (due_ps / 1000).saturating_add(late_ns),
        });
    }

    fn tick(&mut self) {
        let (Some(clock), Some(timing)) = (&mut self.clock, self.layout.shape.timing) else {
            return;
        };
        clock.due_ps = clock
            .due_ps
            .saturating_add(PS_PER_SECOND / timing.packets_per_second);
        let late_ns = self.random.below_u64(timing.jitter_ns);
        clock.next_ns = clock
            .next_ns
            .max((clock.due_ps / 1000).saturating_add(late_ns));
    }
}
