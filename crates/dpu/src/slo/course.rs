// SPDX-License-Identifier: Apache-2.0
//! The course of one chain through the DPU: when it was popped, what held it, when it was done.
//!
//! ```text
//!   (behind) popped ── parked ─────────────────────────────┐── submitted ── transferred ── done
//!                      │ waiting for the host │ handling │ resume │     disk          bounce
//!                      └──────── told by the response ───┘
//! ```
//! A chain may be parked more than once; the stages of all its parkings add up. Of several
//! outstanding page requests the slowest counts, because the chain waited for that one.
//!
//! Times are nanoseconds of the monotonic clock, read once for a whole batch of an engine: chains
//! popped together were all waiting at that moment, so it is right for each of them.

use pagetide_addr::{PageResponse, Tier};

/// Whether a chain's fault was injected.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Injected {
    /// Its pages were absent, or it did not fault.
    #[default]
    No,
    /// By fault injection.
    Yes,
}

/// The host's answer to a page request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Answered {
    waited_ns: u64,
    handling_ns: u64,
    tier: Tier,
}

/// See the module documentation. A zero time means: not, or not yet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct RequestTimeline {
    popped_ns: u64,
    /// Time in the ring while its queue was paused.
    behind_ns: u64,
    parked_at_ns: u64,
    /// The slowest response of the current parking.
    slowest: Answered,
    /// Total of all earlier parkings.
    parked_ns: u64,
    waited_ns: u64,
    handling_ns: u64,
    tier: Tier,
    submitted_ns: u64,
    transferred_ns: u64,
    pub injected: Injected,
}

/// How long a chain was held by each stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Stages {
    pub engine_ns: u64,
    pub behind_ns: u64,
    pub waiting_ns: u64,
    pub handling_ns: u64,
    pub tier: Tier,
    pub resume_ns: u64,
    pub disk_ns: u64,
    pub bounce_ns: u64,
}

impl RequestTimeline {
    /// A chain that was taken from its ring.
    pub fn popped(now_ns: u64) -> Self {
        Self {
            popped_ns: now_ns,
            ..Self::default()
        }
    }

    /// A chain that is taken from its ring now, and was there behind a faulting one since
    /// `since_ns`.
    pub fn popped_late(since_ns: u64, now_ns: u64) -> Self {
        Self {
            behind_ns: now_ns.saturating_sub(since_ns),
            ..Self::popped(since_ns.min(now_ns))
        }
    }

    /// True until the chain has been resumed.
    pub fn is_first_parking(&self) -> bool {
        self.parked_ns == 0
    }

    /// True while it is parked by an injected fault.
    pub fn is_held(&self) -> bool {
        self.injected == Injected::Yes && self.is_first_parking()
    }

    /// The chain waits for pages from now on.
    pub fn park(&mut self, now_ns: u64) {
        self.parked_at_ns = now_ns;
        self.slowest = Answered::default();
    }

    /// One of its page requests was answered.
    pub fn answered(&mut self, response: &PageResponse) {
        let told = Answered {
            waited_ns: response.waited_ns,
            handling_ns: response.handling_ns,
            tier: response.tier,
        };
        let all = |a: &Answered| a.waited_ns.saturating_add(a.handling_ns);
        if all(&told) >= all(&self.slowest) {
            self.slowest = told;
        }
    }

    /// All its page requests are answered and the chain is tried again; returns how long it was
    /// parked this time.
    pub fn resume(&mut self, now_ns: u64) -> u64 {
        let parked_ns = now_ns.saturating_sub(self.parked_at_ns);
        let waited_ns = self.slowest.waited_ns.min(parked_ns);
        let handling_ns = self.slowest.handling_ns.min(parked_ns - waited_ns);
        self.parked_ns += parked_ns;
        self.waited_ns += waited_ns;
        self.handling_ns += handling_ns;
        self.tier = self.tier.max(self.slowest.tier);
        parked_ns
    }

    /// Its I/O goes to the kernel.
    pub fn submit(&mut self, now_ns: u64) {
        self.submitted_ns = now_ns;
        // A chain that had arrived in a bounce buffer and could not be delivered starts again.
        self.transferred_ns = 0;
    }

    /// Its I/O is done; data in bounce buffers still has to be installed.
    pub fn transferred(&mut self, now_ns: u64) {
        self.transferred_ns = now_ns;
    }

    /// Time from the pop until `done_ns`.
    pub fn latency_ns(&self, done_ns: u64) -> u64 {
        done_ns.saturating_sub(self.popped_ns)
    }

    /// The stages that held it until `done_ns`.
    pub fn stages(&self, done_ns: u64) -> Stages {
        let total_ns = self.latency_ns(done_ns);
        let transferred_ns = match self.transferred_ns {
            0 => done_ns,
            at => at,
        };
        let disk_ns = match self.submitted_ns {
            0 => 0,
            at => transferred_ns.saturating_sub(at),
        };
        let bounce_ns = done_ns.saturating_sub(transferred_ns);
        let elsewhere_ns = self.behind_ns + self.parked_ns + disk_ns + bounce_ns;
        Stages {
            engine_ns: total_ns.saturating_sub(elsewhere_ns),
            behind_ns: self.behind_ns,
            waiting_ns: self.waited_ns,
            handling_ns: self.handling_ns,
            tier: self.tier,
            resume_ns: self.parked_ns - self.waited_ns - self.handling_ns,
            disk_ns,
            bounce_ns,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::{QueueId, RequestId, ResponseCode};

    fn response(waited_ns: u64, handling_ns: u64, tier: Tier) -> PageResponse {
        PageResponse {
            id: RequestId(1),
            queue: QueueId(0),
            code: ResponseCode::Success,
            tier,
            installed: 0,
            waited_ns,
            handling_ns,
        }
    }

    #[test]
    fn stages_of_a_chain_that_was_parked_twice_add_up_to_its_latency() {
        let mut course = RequestTimeline::popped(1_000);
        course.park(1_100);
        course.answered(&response(10, 20, Tier::Zero));
        course.answered(&response(100, 400, Tier::Compressed));
        course.answered(&response(50, 60, Tier::Uncompressed));
        assert_eq!(course.resume(1_700), 600);
        course.park(1_710);
        course.answered(&response(5, 5, Tier::Zero));
        assert_eq!(course.resume(1_730), 20);
        course.submit(1_740);
        let stages = course.stages(2_740);
        let expected = Stages {
            engine_ns: 120,
            behind_ns: 0,
            waiting_ns: 105,
            handling_ns: 405,
            tier: Tier::Compressed,
            resume_ns: 110,
            disk_ns: 1_000,
            bounce_ns: 0,
        };
        assert_eq!(stages, expected);
        assert_eq!(course.latency_ns(2_740), 1_740);
    }

    #[test]
    fn host_that_tells_impossible_times_cannot_make_stages_longer_than_the_parking() {
        let mut course = RequestTimeline::popped(0);
        course.park(10);
        course.answered(&response(u64::MAX, u64::MAX, Tier::Unknown));
        course.resume(30);
        let stages = course.stages(30);
        assert_eq!((stages.waiting_ns, stages.handling_ns), (20, 0));
        assert_eq!(stages.resume_ns, 0);
    }

    #[test]
    fn chain_that_stood_behind_a_faulting_one_counts_from_then() {
        let mut course = RequestTimeline::popped_late(1_000, 6_000);
        course.submit(6_000);
        let stages = course.stages(6_100);
        assert_eq!((stages.behind_ns, stages.disk_ns), (5_000, 100));
        assert_eq!((stages.engine_ns, course.latency_ns(6_100)), (0, 5_100));
    }

    #[test]
    fn chain_answered_without_io_was_with_the_engine_all_the_time() {
        let stages = RequestTimeline::popped(100).stages(150);
        assert_eq!((stages.engine_ns, stages.disk_ns), (50, 0));
    }
}
