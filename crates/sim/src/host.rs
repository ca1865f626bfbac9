// SPDX-License-Identifier: Apache-2.0
//! The host that maintains the history-length register
//! ([`crate::config::HistoryLength::Host`]; III: 'updated whenever bandwidth
//! allocation per tenant changes and/or when a tenant is added/removed').
//!
//! The register is the distance, in requests, from the source that triggers a prefetch to the source it is
//! for. If it is too short, the request comes before its translation; if it is too long, others have
//! displaced the entry from the small buffer. Just in time is
//!
//! ```text
//!   length = ceil(time of a prefetch / mean time between two requests), at least 1
//!
//!   e.g. 2 x 450 + 50 + 5 = 955 ns from the trigger to the buffer,
//!        61.68 ns / 3 = 20.56 ns between requests:  47
//! ```
//! Both times are from the host's last window, as counters of device and IOMMU would give them. A *window*
//! is 16 packets for each current tenant, and 1,024 at least. At its end the host checks whether
//!
//! - a tenant joined: by an event, or by its first request,
//! - a tenant left: by an event, or because it had no request in the window (so: none for 16 packets times
//!   the number of tenants),
//! - a tenant's bandwidth changed: its requests differ from those expected by its bandwidth at the last
//!   write by more than five standard deviations of a random order, so that chance alone triggers no write,
//! - the bandwidth of all changed, by more than a sixteenth,
//!
//! and only then rewrites the register, if its value differs. A host that has seen no prefetch end in the
//! window assumes the shortest one.

use crate::config::{Config, Flavour, HistoryLength};

/// Packets of each tenant in a window, on average.
const PACKETS_PER_TENANT: u64 = 16;
/// Packets of a window, at least.
const PACKETS_MIN: u64 = 1024;
/// Largest value of the register: 16 bits.
const LENGTH_MAX: u64 = 1 << 16;
/// Square of the standard deviations that count as a change.
const DEVIATIONS_SQUARED: u128 = 25;
/// A change of the total bandwidth by more than one part in this many counts.
const WHOLE_PARTS: u128 = 16;

/// The host's state of a tenant, by its dense number.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// Requests in this window.
    requests: u64,
    /// Requests in the window at whose end the register was last set.
    reference: u64,
    /// True while the tenant is present.
    here: bool,
}

/// One stretch of time.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    opened_ns: u64,
    requests: u64,
    prefetches: u64,
    prefetch_ns: u64,
}

/// The host.
#[derive(Debug)]
pub(crate) struct Host {
    length: u32,
    requests_per_packet: u64,
    shortest_prefetch_ns: u64,
    tenants: Vec<Seen>,
    here: u64,
    window: Window,
    /// Length and requests of the window at whose end the register was last set.
    reference_ns: u64,
    reference_requests: u64,
    /// A tenant has joined or left since.
    membership_changed: bool,
}

impl Host {
    /// A host, if `config` has one that writes the register.
    pub(crate) fn new(config: &Config) -> Option<Self> {
        let prefetch = &config.prefetch;
        let wanted = prefetch.enabled && prefetch.register == HistoryLength::Host;
        // The authors' program has no such register.
        if !wanted || config.flavour == Flavour::Hypersio {
            return None;
        }
        let latency = &config.latency;
        Some(Self {
            length: prefetch.history_length,
            requests_per_packet: config.link.requests_per_packet.into(),
            shortest_prefetch_ns: 2 * latency.pcie_ns
                + latency.history_accesses * latency.dram_ns
                + latency.walk_cache_hit_ns,
            tenants: Vec::new(),
            here: 0,
            window: Window::default(),
            reference_ns: 0,
            reference_requests: 0,
            membership_changed: false,
        })
    }

    /// A tenant joined.
    pub(crate) fn joined(&mut self) {
        self.membership_changed = true;
    }

    /// `tenant` left.
    pub(crate) fn left(&mut self, tenant: u32) {
        if let Some(seen) = self.tenants.get_mut(tenant as usize)
            && seen.here
        {
            *seen = Seen::default();
            self.here -= 1;
        }
        self.membership_changed = true;
    }

    /// A prefetch took `took_ns` from its trigger to the buffer.
    pub(crate) fn prefetch_ended(&mut self, took_ns: u64) {
        self.window.prefetches += 1;
        self.window.prefetch_ns += took_ns;
    }

    /// `tenant` issues a request. Returns the register's new value if it must be written.
    #[inline]
    pub(crate) fn requested(&mut self, now_ns: u64, tenant: u32) -> Option<u32> {
        let at = tenant as usize;
        if self.tenants.len() <= at {
            self.tenants.resize(at + 1, Seen::default());
        }
        let seen = &mut self.tenants[at];
        seen.requests += 1;
        if !seen.here {
            seen.here = true;
            self.here += 1;
            self.membership_changed = true;
        }
        self.window.requests += 1;
        let packets = (PACKETS_PER_TENANT * self.here).max(PACKETS_MIN);
        if self.window.requests < packets * self.requests_per_packet {
            return None;
        }
        self.close_window(now_ns)
    }

    #[cold]
    fn close_window(&mut self, now_ns: u64) -> Option<u32> {
        let window = self.window;
        let window_ns = (now_ns - window.opened_ns).max(1);
        let whole_changed = self.whole_changed(window_ns);
        let tenants_changed = self.tenants_changed(window_ns);
        let changed = self.membership_changed || whole_changed || tenants_changed;
        for seen in &mut self.tenants {
            if changed {
                seen.reference = seen.requests;
            }
            seen.requests = 0;
        }
        self.window = Window {
            opened_ns: now_ns,
            ..Window::default()
        };
        if !changed {
            return None;
        }
        self.membership_changed = false;
        self.reference_ns = window_ns;
        self.reference_requests = window.requests;
        let length = self.just_in_time(window, window_ns);
        if length == self.length {
            return None;
        }
        self.length = length;
        Some(length)
    }

    /// Requests that pass while a prefetch is on its way.
    fn just_in_time(&self, window: Window, window_ns: u64) -> u32 {
        // As fractions: (prefetch_ns / prefetches) / (window_ns / requests).
        let (prefetch_ns, prefetches) = match window.prefetches {
            0 => (self.shortest_prefetch_ns, 1),
            prefetches => (window.prefetch_ns, prefetches),
        };
        let above = u128::from(prefetch_ns) * u128::from(window.requests);
        let below = u128::from(prefetches) * u128::from(window_ns);
        let length = above.div_ceil(below).clamp(1, LENGTH_MAX.into());
        u32::try_from(length).unwrap_or(u32::MAX)
    }

    fn whole_changed(&self, window_ns: u64) -> bool {
        // Rates a / b and c / d differ by more than a part: |ad - cb| * parts > cb.
        let now = u128::from(self.window.requests) * u128::from(self.reference_ns);
        let then = u128::from(self.reference_requests) * u128::from(window_ns);
        now.abs_diff(then) * WHOLE_PARTS > then
    }

    /// Checks each tenant; notes those that have left.
    fn tenants_changed(&mut self, window_ns: u64) -> bool {
        let mut changed = false;
        for seen in &mut self.tenants {
            if !seen.here {
                continue;
            }
            if seen.requests == 0 {
                seen.here = false;
                self.here -= 1;
                changed = true;
                continue;
            }
            let expected = u128::from(seen.reference) * u128::from(window_ns)
                / u128::from(self.reference_ns.max(1));
            let requests = u128::from(seen.requests);
            // Requests come in packets, so their variance is that many times a count's.
            let variance = (requests + expected) * u128::from(self.requests_per_packet);
            changed |= requests.abs_diff(expected).pow(2) > DEVIATIONS_SQUARED * variance;
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A host that sees `tenants` in turn, a request each `gap_ns`, prefetches of 1000 ns.
    struct Scene {
        host: Host,
        now_ns: u64,
        written: Vec<u32>,
    }

    impl Scene {
        fn new() -> Self {
            let mut config = Config::hypertrio(Flavour::Paper);
            config.prefetch.register = HistoryLength::Host;
            config.prefetch.history_length = 48;
            Self {
                host: Host::new(&config).unwrap(),
                now_ns: 0,
                written: Vec::new(),
            }
        }

        /// `packets` packets of these tenants in turn.
        fn packets(&mut self, packets: u32, tenants: &[u32], gap_ns: u64) {
            for tenant in tenants.iter().cycle().take(packets as usize) {
                for _request in 0..3 {
                    self.now_ns += gap_ns;
                    self.host.prefetch_ended(1000);
                    self.written
                        .extend(self.host.requested(self.now_ns, *tenant));
                }
            }
        }
    }

    #[test]
    fn register_after_the_first_window_is_prefetch_time_over_gap_rounded_up() {
        let mut scene = Scene::new();
        scene.packets(1024, &[0, 1, 2, 3], 30);
        assert_eq!(scene.written, [34]);
    }

    #[test]
    fn register_in_a_steady_state_is_not_written_again() {
        let mut scene = Scene::new();
        scene.packets(1024 * 20, &[0, 1, 2, 3], 30);
        assert_eq!(scene.written, [34]);
    }

    #[test]
    fn register_is_written_when_a_tenant_joins() {
        let mut scene = Scene::new();
        scene.packets(2048, &[0, 1], 40);
        assert_eq!(scene.written, [25]);
        // Less than a sixteenth faster, so the new tenant alone is the reason.
        scene.packets(1024, &[0, 1], 38);
        assert_eq!(scene.written, [25]);
        scene.packets(1024, &[0, 1, 2], 38);
        assert_eq!(scene.written, [25, 27]);
    }

    #[test]
    fn register_is_written_when_a_tenant_is_seen_no_more() {
        let mut scene = Scene::new();
        scene.packets(2040, &[0, 1, 2], 40);
        scene.packets(1024, &[0, 1, 2], 38);
        assert_eq!(scene.written, [25]);
        scene.packets(3 * 1024, &[0, 1], 38);
        assert_eq!(scene.written, [25, 27]);
    }

    #[test]
    fn register_is_written_when_an_event_says_that_a_tenant_joins_or_leaves() {
        for leaves in [0, 1] {
            let mut scene = Scene::new();
            scene.packets(2048, &[0, 1], 40);
            match leaves {
                0 => scene.host.joined(),
                _ => scene.host.left(1),
            }
            scene.packets(1024, &[0, 1], 38);
            assert_eq!(scene.written, [25, 27]);
        }
    }

    #[test]
    fn register_is_written_when_shares_change_though_the_whole_does_not() {
        let mut scene = Scene::new();
        scene.packets(2048, &[0, 1], 40);
        scene.packets(1024, &[0, 1], 38);
        assert_eq!(scene.written, [25]);
        scene.packets(2048, &[0, 0, 0, 1], 38);
        assert_eq!(scene.written, [25, 27]);
    }

    #[test]
    fn register_is_written_when_the_whole_bandwidth_changes() {
        let mut scene = Scene::new();
        scene.packets(2048, &[0, 1], 40);
        scene.packets(2048, &[0, 1], 20);
        assert_eq!(scene.written, [25, 50]);
    }

    #[test]
    fn no_host_without_prefetching_or_with_a_fixed_register() {
        let mut config = Config::hypertrio(Flavour::Paper);
        assert!(Host::new(&config).is_none());
        config.prefetch.register = HistoryLength::Host;
        config.prefetch.enabled = false;
        assert!(Host::new(&config).is_none());
    }
}
