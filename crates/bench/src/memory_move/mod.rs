// SPDX-License-Identifier: Apache-2.0
//! `pagetide bench memory-move`: memory that moves between guests with network devices, beside guests whose memory is
//! pinned ('Page Fault Support for Network Controllers', 6.1, Table 5 and Fig 7). All sizes are the paper's over 8.
//!
//! **Table 5.** A host of 1 GiB; guests of 384 MiB that think so much is theirs, with memcached whose values are less than
//! half of it, at a fixed offered load each. Pinned, two fit: 3 × 384 is more than 1 GiB. With faults four run under the
//! host's budget.
//!
//! **Fig 7.** Two guests with memcached, and 125 MiB for values: their working sets are a tenth and nine tenths of
//! that, and change over in the middle. Pinned, each memcached has one half of the 125 MiB for ever. With faults each may
//! have all of it, and a budget of the two guests' own memory and 125 MiB moves it. What counts is hits a second, over both
//! halves.
//!
//! *Pinned* guests are not attached: nothing of them is ever evicted. Both sides have the same device. Values are 16 KiB,
//! as the paper's second part has 20 KB; the first one's are not stated.
//!
//! *Weak points.* Emulated guests are slow, so the offered load is a few hundred operations a second.

use super::{
    SizeOptions,
    guest_net::{Interface, NetGuest, NetGuestOptions, NetHost, Pings, Receives, in_own_network},
    harness::{
        figures::{median, median_ratio, rounded, to_f64},
        report::{BenchError, BenchReport, failed},
        rounds::{WarmUp, progress, rounds},
    },
    key_value::{Clients, Pace, Speaks, Until, WorkingSet, rate},
};
use hyper::Method;
use serde_json::{Value, json};
use std::{rc::Rc, time::Duration};

const NAME: &str = "memory-move";
const ROUNDS: usize = 2;
const SLICE_S: u64 = 20;
/// A guest.
const RAM_MIB: u64 = 384;
/// The host of Table 5.
const HOST_BYTES: u64 = 1 << 30;
/// Guests whose RAM fits into it.
const PINNED_MAX: usize = 2;
/// Guests that run with faults.
const GUESTS_MAX: usize = 4;
const VALUE_BYTES: usize = 16 << 10;
/// Values of a guest of Table 5.
const VALUES_MIB: u64 = 96;
/// For the values of both guests of Fig 7.
const SHARED_MIB: u64 = 125;
const CONNECTIONS: u64 = 4;
/// Between the requests of a connection: 200 a second and guest are offered.
const PACE: Duration = Duration::from_millis(20);
const RING: u16 = 256;

/// Whose memory may move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Memory {
    Faults,
    Pinned,
}

impl Memory {
    const fn name(self) -> &'static str {
        match self {
            Self::Faults => "npf",
            Self::Pinned => "pinning",
        }
    }
}

/// Guests of one kind, their clients, and the daemon.
struct Guests {
    // The guests before their daemon.
    clients: Vec<Clients>,
    guests: Vec<NetGuest>,
    host: Rc<NetHost>,
}

/// Operations, and of them hits, a second, of all guests together.
#[derive(Clone, Copy, Debug)]
struct Rates {
    per_s: f64,
    hits_per_s: f64,
}

/// Runs the bench.
///
/// # Errors
/// [`BenchError`].
pub fn run(sizes: &SizeOptions) -> Result<BenchReport, BenchError> {
    let slice = sizes.time(SLICE_S);
    let mut report = BenchReport::new(NAME);
    let rounds_of = sizes.pairs(ROUNDS);
    if sizes.includes("table-5") {
        table_5(&mut report, rounds_of, slice)?;
    }
    if sizes.includes("fig-7") {
        fig_7(&mut report, rounds_of, slice)?;
    }
    report
        .figures
        .insert("scale".into(), "the paper's sizes over 8".into());
    report.peers.insert(
        "paper".into(),
        "Table 5: 186, 311, 407, 484 k/s of one to four with faults, 185 and 310 pinned; Fig 7: pinned, one of the two always suffers".into(),
    );
    Ok(report)
}

fn table_5(report: &mut BenchReport, count: usize, slice: Duration) -> Result<(), BenchError> {
    let cells: Vec<(Memory, usize)> = (1..=GUESTS_MAX)
        .map(|guests| (Memory::Faults, guests))
        .chain((1..=PINNED_MAX).map(|guests| (Memory::Pinned, guests)))
        .collect();
    let mut rates: Vec<Vec<f64>> = vec![Vec::new(); cells.len()];
    for round in rounds(NAME, count, WarmUp::None) {
        for at in round.rotated(cells.len()) {
            let (memory, guests) = cells[at];
            let name = format!("{}_{guests}", memory.name());
            progress(NAME, format_args!("table 5, {name}"));
            let taps = u8::try_from(guests).unwrap_or(u8::MAX);
            let per_s = in_own_network(taps, || one_of_table_5(memory, taps, slice))?;
            rates[at].push(per_s);
        }
    }
    let of = |wanted: (Memory, usize)| {
        let at = cells.iter().position(|cell| *cell == wanted);
        at.map_or(&[][..], |at| &rates[at][..])
    };
    for ((memory, guests), rates) in cells.iter().zip(&rates) {
        let name = format!("table_5_{}_{guests}", memory.name());
        let per_s = rounded(median(rates.iter().copied()));
        report.figures.insert(name, json!({"per_s": per_s}));
    }
    let (npf, pinning) = (of((Memory::Faults, 2)), of((Memory::Pinned, 2)));
    let ratio = rounded(median_ratio(npf, pinning, |rate| *rate));
    report
        .ratios
        .insert("npf_over_pinning_2".into(), ratio.into());
    let most = rounded(median_ratio(
        of((Memory::Faults, GUESTS_MAX)),
        pinning,
        |rate| *rate,
    ));
    report
        .ratios
        .insert("npf_4_over_pinning_2".into(), most.into());
    report
        .figures
        .insert("pinned_guests_max".into(), PINNED_MAX.into());
    Ok(())
}

fn one_of_table_5(memory: Memory, count: u8, slice: Duration) -> Result<f64, BenchError> {
    let server = format!("memcached:{}", VALUES_MIB * 5 / 4);
    let mut guests = Guests::boot(memory, count, &server)?;
    if memory == Memory::Faults {
        guests.set_budget(HOST_BYTES).map_err(failed)?;
    }
    let all = vec![values(VALUES_MIB); usize::from(count)];
    guests.connect(&all).map_err(failed)?;
    for clients in &mut guests.clients {
        clients.set_pace(Pace::Every(PACE));
    }
    Ok(guests.run(slice).map_err(failed)?.per_s)
}

fn fig_7(report: &mut BenchReport, count: usize, slice: Duration) -> Result<(), BenchError> {
    let (mut npf, mut split) = (Vec::new(), Vec::new());
    for round in rounds(NAME, count, WarmUp::None) {
        for memory in round.turns([Memory::Faults, Memory::Pinned]) {
            progress(NAME, format_args!("figure 7, {}", memory.name()));
            let rates = in_own_network(2, || one_of_fig_7(memory, slice))?;
            match memory {
                Memory::Faults => npf.push(rates),
                Memory::Pinned => split.push(rates),
            }
        }
    }
    for (name, rates) in [("fig_7_npf", &npf), ("fig_7_split", &split)] {
        let of = |half: usize, figure: fn(&Rates) -> f64| {
            rounded(median(
                rates
                    .iter()
                    .map(|halves: &[Rates; 2]| figure(&halves[half])),
            ))
        };
        let cell = |half| {
            json!({
                "hits_per_s": of(half, |rates| rates.hits_per_s),
                "per_s": of(half, |rates| rates.per_s),
            })
        };
        let cells = json!({"before": cell(0), "after": cell(1)});
        report.figures.insert(name.into(), cells);
    }
    let hits = |halves: &[Rates; 2]| halves[0].hits_per_s + halves[1].hits_per_s;
    let ratio = rounded(median_ratio(&npf, &split, hits));
    report.ratios.insert("hits_over_split".into(), ratio.into());
    Ok(())
}

fn one_of_fig_7(memory: Memory, slice: Duration) -> Result<[Rates; 2], BenchError> {
    // A half each, or as much as both together may have.
    let mib = match memory {
        Memory::Pinned => SHARED_MIB / 2,
        Memory::Faults => SHARED_MIB,
    };
    let mut guests = Guests::boot(memory, 2, &format!("memcached:{mib}"))?;
    if memory == Memory::Faults {
        let own_bytes = guests.resident_bytes().map_err(failed)?;
        guests
            .set_budget(own_bytes + (SHARED_MIB << 20))
            .map_err(failed)?;
    }
    let (few, many) = (values(SHARED_MIB / 10), values(SHARED_MIB * 9 / 10));
    guests.connect(&[few, many]).map_err(failed)?;
    let before = guests.run(slice).map_err(failed)?;
    guests.clients[0].move_to(many.keys);
    guests.clients[1].move_to(few.keys);
    let after = guests.run(slice).map_err(failed)?;
    Ok([before, after])
}

const fn values(mib: u64) -> WorkingSet {
    WorkingSet {
        keys: (mib << 20) / VALUE_BYTES as u64,
        value_bytes: VALUE_BYTES,
    }
}

impl Guests {
    fn boot(memory: Memory, count: u8, server: &str) -> Result<Self, BenchError> {
        let host = NetHost::start()?;
        let mut guests = Vec::new();
        for number in 0..count {
            let guest = host.boot(
                number,
                &NetGuestOptions {
                    ram_mib: RAM_MIB,
                    ring: RING,
                    servers: &[server],
                    pings: Pings::None,
                    interface: Interface::Ours(Receives {
                        on_fault: "out-of-order",
                        wire: "none",
                    }),
                },
            )?;
            guest.listening(Speaks::Memcached.port()).map_err(failed)?;
            if memory == Memory::Faults {
                guest.attach().map_err(failed)?;
            }
            guests.push(guest);
        }
        Ok(Self {
            clients: Vec::new(),
            guests,
            host,
        })
    }

    fn set_budget(&self, bytes: u64) -> Result<(), String> {
        let body = json!({"budget_bytes": bytes});
        let daemon = self.host.daemon();
        let _set: Value = daemon.send_by(Method::PUT, "/v1/host/budget", &body)?;
        Ok(())
    }

    /// Of all that are attached.
    fn resident_bytes(&self) -> Result<u64, String> {
        let list: Value = self.host.daemon().ask(Method::GET, "/v1/vms")?;
        let vms = list["vms"].as_array().ok_or("the daemon lists no VMs")?;
        let each = vms.iter().map(|vm| vm["resident_bytes"].as_u64());
        each.sum::<Option<u64>>()
            .ok_or_else(|| "a VM does not tell what is resident".into())
    }

    /// Clients of each guest, with the values that they will ask for.
    fn connect(&mut self, sets: &[WorkingSet]) -> Result<(), String> {
        let port = Speaks::Memcached.port();
        for (guest, set) in self.guests.iter().zip(sets) {
            let address = guest.listening(port)?;
            let clients = Clients::connect(Speaks::Memcached, address, CONNECTIONS, *set)?;
            self.clients.push(clients);
        }
        Ok(())
    }

    /// All clients at a time.
    fn run(&mut self, time: Duration) -> Result<Rates, String> {
        let ran: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (self.clients.iter_mut())
                .map(|clients| scope.spawn(move || clients.run(Until::Time(time))))
                .collect();
            let joined = threads.into_iter().map(|thread| {
                let panicked = |_| Err("a client has panicked".to_owned());
                thread.join().unwrap_or_else(panicked)
            });
            joined.collect()
        });
        let mut rates = Rates {
            per_s: 0.0,
            hits_per_s: 0.0,
        };
        for done in ran {
            let done = done?;
            let hits = done.iter().filter(|operation| operation.hit).count();
            rates.per_s += rate(&done, time);
            rates.hits_per_s += to_f64(hits as u64) / time.as_secs_f64();
        }
        Ok(rates)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_the_papers_over_eight_and_two_guests_fit_where_four_do_not() {
        let ram = RAM_MIB << 20;
        assert!(PINNED_MAX as u64 * ram <= HOST_BYTES);
        assert!((PINNED_MAX as u64 + 1) * ram > HOST_BYTES);
        // The working sets of all four fit, with half as much again for the rest of each guest.
        assert!(GUESTS_MAX as u64 * (VALUES_MIB << 20) * 3 / 2 <= HOST_BYTES);
        assert_eq!(values(96).keys, 6144);
    }
}
