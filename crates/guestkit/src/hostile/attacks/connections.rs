// SPDX-License-Identifier: Apache-2.0
//! Connections that send nothing, never read, or are far too many.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::super::descriptors::{Blocking, set_blocking};
use super::super::front::{Front, greet};
use super::super::peer::{Failure, PATIENCE, Peer};
use super::super::wire::{self, Inflight, Message, request};
use super::super::{Attack, Held, Seen, Target, seen};

const SERVED: [Seen; 1] = [Seen::Served];
const EITHER: [Seen; 2] = [Seen::Served, Seen::HungUp];
/// Connections of one attack.
const MANY: usize = 1000;

/// See the module.
pub fn attacks() -> Vec<Attack> {
    vec![
        Attack::new("connects-and-says-nothing", &EITHER, |target| {
            let peer = Peer::connect(&target.socket)?;
            Ok(Held::nothing(Seen::Served).and(peer))
        }),
        Attack::new("connects-a-thousand-times", &EITHER, thousand),
        Attack::new("connects-and-leaves", &SERVED, churn),
        Attack::new("connects-beside-a-front-end", &SERVED, beside),
        Attack::new("never-reads-features", &EITHER, |t| {
            never_reads(t, &Message::new(request::GET_FEATURES))
        }),
        Attack::new("never-reads-configuration", &EITHER, |t| {
            never_reads(t, &wire::config(request::GET_CONFIG, 0, 60, 60))
        }),
        Attack::new("never-reads-inflight-regions", &EITHER, |t| {
            never_reads(t, &inflight(64, 1024))
        }),
        Attack::new("never-reads-acknowledgements", &EITHER, |t| {
            never_reads(t, &Message::new(request::SET_OWNER).acked())
        }),
        Attack::new("inflight-regions-by-the-hundred", &SERVED, many_regions),
        Attack::new("reads-half-of-each-reply", &EITHER, half_closed),
    ]
}

fn inflight(queues: u16, size: u16) -> Message {
    let region = Inflight {
        bytes: 0,
        offset: 0,
        queues,
        size,
    };
    region.message(request::GET_INFLIGHT_FD)
}

fn thousand(target: &Target) -> Result<Held, Failure> {
    let mut peers = Vec::new();
    for _ in 0..MANY {
        peers.push(Peer::connect(&target.socket)?);
    }
    Ok(Held::nothing(Seen::Served).and(peers))
}

fn churn(target: &Target) -> Result<Held, Failure> {
    for number in 0..MANY {
        let peer = Peer::connect(&target.socket)?;
        if number % 4 == 0 {
            match greet(&peer, 0) {
                Ok(()) | Err(Failure::HungUp { .. }) => {}
                Err(other) => return Err(other),
            }
        }
    }
    Ok(Held::nothing(Seen::Served))
}

/// Further connections are refused while one is served, and the served one does not notice.
fn beside(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    for _ in 0..50 {
        Peer::connect(&target.socket)?.wait_for_hang_up(PATIENCE)?;
    }
    let seen = seen(front.check(64, &[2; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}

/// Sends requests until no more can be sent, because the answers fill the other direction.
fn never_reads(target: &Target, message: &Message) -> Result<Held, Failure> {
    let front = Front::start(&target.socket)?;
    set_blocking(front.peer.as_fd(), Blocking::No)?;
    let full_since = |since: Instant| since.elapsed() > Duration::from_millis(300);
    let mut last_sent = Instant::now();
    let deadline = Instant::now() + PATIENCE;
    while !full_since(last_sent) && Instant::now() < deadline {
        match front.peer.send(message, &[]) {
            Ok(()) => last_sent = Instant::now(),
            Err(Failure::Silent { .. }) => std::thread::yield_now(),
            Err(Failure::HungUp { .. }) => return Ok(Held::nothing(Seen::HungUp).and(front)),
            Err(other) => return Err(other),
        }
    }
    Ok(Held::nothing(Seen::Served).and(front))
}

fn many_regions(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    let mut replies = Vec::new();
    for _ in 0..200 {
        replies.push(front.peer.ask(&inflight(64, 1024), &[])?);
    }
    let seen = seen(front.check(64, &[2; 4096]))?;
    Ok(Held::nothing(seen).and(replies).and(front))
}

/// Shuts its reading side: a back end that answers gets SIGPIPE or EPIPE.
fn half_closed(target: &Target) -> Result<Held, Failure> {
    let front = Front::start(&target.socket)?;
    rustix::net::shutdown(&front.peer, rustix::net::Shutdown::Read)
        .map_err(super::super::peer::failed("shutdown"))?;
    let mut seen = Seen::Served;
    for _ in 0..100 {
        match front.peer.send(&Message::new(request::GET_FEATURES), &[]) {
            Ok(()) => {}
            Err(Failure::HungUp { .. }) => seen = Seen::HungUp,
            Err(other) => return Err(other),
        }
    }
    Ok(Held::nothing(seen).and(front))
}
