// SPDX-License-Identifier: Apache-2.0
//! Kick, call and error descriptors that are no eventfds, or that block their writer.
//!
//! An eventfd's open file is shared: its creator may clear `O_NONBLOCK` at any time, so a back end
//! cannot rely on having set it.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

use super::super::changing::Restless;
use super::super::descriptors::{Blocking, KINDS, Kind, full_event, set_blocking};
use super::super::front::{Front, Io, Setup, T_IN, event, greet};
use super::super::peer::{Failure, Peer, failed};
use super::super::wire::{Message, NO_DESCRIPTOR, request};
use super::super::{Attack, Held, Seen, Target, seen};

/// Requests of an attack that goes on for a while.
const MANY: u16 = 64;
/// Time to wait for a device that may be stuck.
const SHORT: Duration = Duration::from_secs(1);

/// One of the three descriptors of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Kick,
    Call,
    Error,
}

impl Place {
    fn name(self) -> &'static str {
        match self {
            Self::Kick => "kick",
            Self::Call => "call",
            Self::Error => "error",
        }
    }

    fn put(self, setup: &mut Setup, fd: OwnedFd) {
        match self {
            Self::Kick => setup.kick = fd,
            Self::Call => setup.call = fd,
            Self::Error => setup.error = fd,
        }
    }
}

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let mut all = Vec::new();
    for place in [Place::Call, Place::Error, Place::Kick] {
        for kind in KINDS {
            let name = format!("{}-is-{}", place.name(), kind.name());
            let expected = [Seen::Refused, Seen::HungUp];
            all.push(Attack::new(name, &expected, move |target| {
                no_eventfd(target, place, kind)
            }));
        }
    }
    let goes_on = [Seen::Served, Seen::Stopped];
    let served = [Seen::Served];
    all.extend([
        Attack::new("call-full-and-blocking", &goes_on, call_full),
        Attack::new("call-made-blocking-later", &goes_on, call_made_blocking),
        Attack::new("call-full-swapped-often", &goes_on, call_swapped),
        Attack::new("call-full-eight-times", &goes_on, call_full_often),
        Attack::new("error-full-and-blocking", &[Seen::Stopped], error_full),
        Attack::new("call-closed-by-peer", &served, call_closed),
        Attack::new("call-is-semaphore", &served, call_semaphore),
        Attack::new("call-is-kick", &served, call_is_kick),
        Attack::new("kick-full", &served, kick_full),
        Attack::new("kick-stolen-and-blocking", &served, kick_stolen),
        Attack::new("kick-storm", &served, kick_storm),
        Attack::new(
            "kick-without-descriptor",
            &[Seen::Refused, Seen::HungUp],
            kick_none,
        ),
        Attack::new("call-without-descriptor", &served, call_none),
    ]);
    all
}

fn no_eventfd(target: &Target, place: Place, kind: Kind) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    let peer = Peer::connect(&target.socket)?;
    greet(&peer, 0)?;
    let bait = match kind {
        // The device would talk to itself.
        Kind::OwnSocket => peer.descriptor()?.into(),
        kind => kind.open(target)?,
    };
    let copy = bait.fd.try_clone().map_err(failed("copying"))?;
    place.put(&mut setup, copy);
    let held = |seen| Held::nothing(seen).and(bait);
    let mut front = match setup.start_on(peer) {
        Ok(front) => front,
        Err(failure) => return Ok(held(seen(Err::<(), _>(failure))?)),
    };
    // It was accepted: check what it does.
    front.post(0, Io::of_slot(0, T_IN, 0, 4096))?;
    if place == Place::Error {
        front.set_avail(front.offered().wrapping_add(1000))?;
    }
    if place != Place::Kick {
        front.kick()?;
    }
    let outcome = front.wait_within(SHORT);
    let seen = outcome.map_or(Seen::Stopped, |()| Seen::Served);
    Ok(held(seen).and(front))
}

fn many(front: &mut Front) -> Result<(), Failure> {
    for sector in 0..MANY {
        front.do_io(0, Io::of_slot(0, T_IN, u64::from(sector), 4096))?;
    }
    Ok(())
}

fn one(front: &mut Front) -> Result<Seen, Failure> {
    seen(front.do_io(0, Io::of_slot(0, T_IN, 0, 4096)))
}

fn call_full(target: &Target) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    setup.call = full_event(Blocking::Yes)?;
    let mut front = setup.start(&target.socket)?;
    // No thread reads from it.
    let full = std::mem::replace(&mut front.call, event()?);
    let seen = one(&mut front)?;
    Ok(Held::nothing(seen).and(front).and(full))
}

fn call_made_blocking(target: &Target) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    setup.call = full_event(Blocking::No)?;
    let mut front = setup.start(&target.socket)?;
    let full = std::mem::replace(&mut front.call, event()?);
    one(&mut front)?;
    set_blocking(full.as_fd(), Blocking::Yes)?;
    let seen = one(&mut front)?;
    Ok(Held::nothing(seen).and(front).and(full))
}

fn call_swapped(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    let full = full_event(Blocking::Yes)?;
    for _ in 0..MANY {
        let message = Message::words64(request::SET_VRING_CALL, &[0]);
        front.peer.tell(message, &[full.as_fd()])?;
    }
    let seen = one(&mut front)?;
    Ok(Held::nothing(seen).and(front).and(full))
}

fn call_full_often(target: &Target) -> Result<Held, Failure> {
    for _ in 0..8 {
        call_full(target)?;
    }
    call_full(target)
}

fn error_full(target: &Target) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    setup.error = full_event(Blocking::Yes)?;
    let mut front = setup.start(&target.socket)?;
    one_without_error(&mut front)?;
    front.set_avail(front.offered().wrapping_add(1000))?;
    front.kick()?;
    // Its error descriptor is readable from the beginning: the device's state comes from `dpu
    // list`.
    Ok(Held::nothing(Seen::Stopped).and(front))
}

/// A request of a front end whose error descriptor means nothing.
fn one_without_error(front: &mut Front) -> Result<(), Failure> {
    front.error = event()?;
    front.do_io(0, Io::of_slot(0, T_IN, 0, 4096))
}

fn call_closed(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    front.call = event()?;
    many(&mut front)?;
    Ok(Held::nothing(one(&mut front)?).and(front))
}

fn call_semaphore(target: &Target) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    let flags = EventfdFlags::SEMAPHORE | EventfdFlags::CLOEXEC;
    setup.call = eventfd(0, flags).map_err(failed("eventfd"))?;
    let mut front = setup.start(&target.socket)?;
    many(&mut front)?;
    Ok(Held::nothing(one(&mut front)?).and(front))
}

fn call_is_kick(target: &Target) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    setup.call = setup.kick.try_clone().map_err(failed("copying"))?;
    let mut front = setup.start(&target.socket)?;
    many(&mut front)?;
    Ok(Held::nothing(one(&mut front)?).and(front))
}

fn kick_full(target: &Target) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    setup.kick = full_event(Blocking::No)?;
    let mut front = setup.start(&target.socket)?;
    let seen = one(&mut front)?;
    Ok(Held::nothing(seen).and(front))
}

/// Reads kicks away from a descriptor that blocks its readers: no thread may wait there.
fn kick_stolen(target: &Target) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    setup.kick = eventfd(0, EventfdFlags::CLOEXEC).map_err(failed("eventfd"))?;
    let kick = setup.kick.try_clone().map_err(failed("copying"))?;
    let mut front = setup.start(&target.socket)?;
    let thief = Restless::start(move |_| {
        rustix::io::write(&kick, &1_u64.to_ne_bytes()).map_err(failed("a kick"))?;
        if super::super::peer::is_ready(kick.as_fd(), Duration::ZERO) {
            let flags = rustix::io::ReadWriteFlags::NOWAIT;
            let mut word = [0; 8];
            let mut into = [std::io::IoSliceMut::new(&mut word)];
            // Whether the thief or the device reads first, the thief goes on.
            match rustix::io::preadv2(&kick, &mut into, u64::MAX, flags) {
                Ok(_) | Err(rustix::io::Errno::AGAIN) => {}
                Err(error) => return Err(failed("a kick")(error)),
            }
        }
        Ok(())
    })?;
    many(&mut front)?;
    let seen = one(&mut front)?;
    Ok(Held::nothing(seen).and(thief).and(front))
}

fn kick_storm(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    let kick = front.kick.try_clone().map_err(failed("copying"))?;
    let storm = Restless::start(
        move |_| match rustix::io::write(&kick, &1_u64.to_ne_bytes()) {
            Ok(_) | Err(rustix::io::Errno::AGAIN) => Ok(()),
            Err(error) => Err(failed("a kick")(error)),
        },
    )?;
    many(&mut front)?;
    let seen = one(&mut front)?;
    Ok(Held::nothing(seen).and(storm).and(front))
}

fn kick_none(target: &Target) -> Result<Held, Failure> {
    let front = Front::start(&target.socket)?;
    let message = Message::words64(request::SET_VRING_KICK, &[NO_DESCRIPTOR]);
    let seen = seen(front.peer.tell(message, &[]))?;
    Ok(Held::nothing(seen).and(front))
}

fn call_none(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    let message = Message::words64(request::SET_VRING_CALL, &[NO_DESCRIPTOR]);
    front.peer.tell(message, &[])?;
    many(&mut front)?;
    Ok(Held::nothing(one(&mut front)?).and(front))
}
