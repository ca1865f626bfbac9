// SPDX-License-Identifier: Apache-2.0
//! In-flight regions that are not what was handed out, or change under the device.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals};

use super::super::changing::Restless;
use super::super::descriptors::{KINDS, Kind};
use super::super::front::{Front, Io, RING_SIZE, Ram, Setup, T_IN, greet};
use super::super::peer::{Failure, Peer, failed, wrong};
use super::super::wire::{Inflight, request};
use super::super::{Attack, Held, Seen, Target, seen};

const NO: [Seen; 2] = [Seen::Refused, Seen::HungUp];
const YES: [Seen; 1] = [Seen::Served];
const EITHER: [Seen; 2] = [Seen::Served, Seen::Stopped];
const SEALED_OR_NOT_TAKEN: [Seen; 3] = [Seen::Served, Seen::Refused, Seen::HungUp];
const ANY: [Seen; 4] = [Seen::Served, Seen::Refused, Seen::HungUp, Seen::Stopped];
const BYTES: u64 = 1 << 20;

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let mut all: Vec<Attack> = KINDS
        .into_iter()
        .filter(|kind| *kind != Kind::OwnSocket)
        .map(|kind| {
            let name = format!("inflight-is-{}", kind.name());
            Attack::new(name, &NO, move |target| {
                let bait = kind.open(target)?;
                let held = told(target, usual(), bait.fd)?;
                Ok(held.and(bait.beside))
            })
        })
        .collect();
    for (name, region) in wrong_shapes() {
        all.push(Attack::new(
            format!("inflight-{name}"),
            &NO,
            move |target| told(target, region, sealed(BYTES, SealFlags::SHRINK)?),
        ));
    }
    for (name, queues, size) in [
        ("of-no-queue", 0, 128),
        ("of-no-entry", 1, 0),
        ("of-all-queues", u16::MAX, 128),
        ("of-all-entries", 1, u16::MAX),
        ("of-everything", u16::MAX, u16::MAX),
    ] {
        all.push(Attack::new(
            format!("inflight-asked-for-{name}"),
            &NO,
            move |target| asked_for(target, queues, size),
        ));
    }
    all.extend([
        Attack::new("inflight-unsealed", &SEALED_OR_NOT_TAKEN, unsealed),
        Attack::new("inflight-unsealable-and-shrunk", &ANY, unsealable),
        Attack::new("inflight-sealed-against-writes", &NO, |target| {
            told(
                target,
                usual(),
                sealed(BYTES, SealFlags::SHRINK | SealFlags::WRITE)?,
            )
        }),
        Attack::new("inflight-that-cannot-be-shrunk", &YES, cannot_be_shrunk),
        Attack::new("inflight-of-noise", &EITHER, |target| filled(target, None)),
        Attack::new("inflight-of-ones", &EITHER, |target| {
            filled(target, Some(0xff))
        }),
        Attack::new("inflight-that-names-every-chain", &EITHER, every_chain),
        Attack::new("inflight-changing", &EITHER, changing),
        Attack::new(
            "inflight-far-into-a-sparse-file",
            &[Seen::Served, Seen::Refused, Seen::HungUp],
            far,
        ),
        Attack::new("inflight-with-holes-punched", &EITHER, punched),
    ]);
    all
}

fn usual() -> Inflight {
    Inflight {
        bytes: BYTES,
        offset: 0,
        queues: 1,
        size: RING_SIZE,
    }
}

fn wrong_shapes() -> [(&'static str, Inflight); 9] {
    let one = usual();
    [
        ("at-odd-offset", Inflight { offset: 4, ..one }),
        (
            "beyond-its-file",
            Inflight {
                offset: BYTES,
                ..one
            },
        ),
        (
            "wrapping",
            Inflight {
                offset: u64::MAX - 7,
                ..one
            },
        ),
        ("too-short", Inflight { bytes: 64, ..one }),
        ("empty", Inflight { bytes: 0, ..one }),
        ("of-no-queue", Inflight { queues: 0, ..one }),
        (
            "of-too-many-queues",
            Inflight {
                queues: u16::MAX,
                ..one
            },
        ),
        ("of-no-entry", Inflight { size: 0, ..one }),
        // The ring is longer: refused when the ring starts.
        (
            "of-fewer-entries-than-the-ring",
            Inflight {
                size: RING_SIZE / 2,
                ..one
            },
        ),
    ]
}

fn sealed(bytes: u64, seals: SealFlags) -> Result<OwnedFd, Failure> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = Ram::memfd(bytes, flags)?;
    fcntl_add_seals(file.file(), seals).map_err(failed("sealing"))?;
    let copy = file.file().try_clone().map_err(failed("copying"))?;
    Ok(copy.into())
}

/// Hands it over and starts a ring with it.
fn told(target: &Target, region: Inflight, file: OwnedFd) -> Result<Held, Failure> {
    let mut setup = Setup::new()?;
    setup.inflight = Some((region, file));
    match setup.start(&target.socket) {
        Ok(mut front) => {
            let seen = seen(front.check(64, &[4; 4096]))?;
            Ok(Held::nothing(seen).and(front))
        }
        Err(failure) => Ok(Held::nothing(seen(Err::<(), _>(failure))?)),
    }
}

/// A region that is not sealed is sealed by the device, or refused.
fn unsealed(target: &Target) -> Result<Held, Failure> {
    let file = sealed(BYTES, SealFlags::empty())?;
    let ram = copy_of(&file)?;
    let held = told(target, usual(), file)?;
    if held.seen == Seen::Served && ram.resize(0).is_ok() {
        ram.resize(BYTES)?;
        let what = "it can be shrunk".to_owned();
        return Err(wrong("an in-flight region that was taken", what));
    }
    Ok(held)
}

/// A region that cannot be sealed, shrunk while requests are in flight.
fn unsealable(target: &Target) -> Result<Held, Failure> {
    let ram = Ram::unsealable(BYTES)?;
    let file = ram.file().try_clone().map_err(failed("copying"))?;
    let mut setup = Setup::new()?;
    setup.inflight = Some((usual(), file.into()));
    let mut front = match setup.start(&target.socket) {
        Ok(front) => front,
        Err(failure) => return Ok(Held::nothing(seen(Err::<(), _>(failure))?)),
    };
    front.do_io(0, Io::of_slot(0, T_IN, 0, 4096))?;
    ram.resize(0)?;
    let seen = some_requests(&mut front)?;
    Ok(Held::nothing(seen).and(front))
}

fn asked_for(target: &Target, queues: u16, size: u16) -> Result<Held, Failure> {
    let peer = Peer::connect(&target.socket)?;
    greet(&peer, 0)?;
    let region = Inflight {
        bytes: 0,
        offset: 0,
        queues,
        size,
    };
    let outcome = peer.ask(&region.message(request::GET_INFLIGHT_FD), &[]);
    // The device refuses by not sending a region.
    let seen = match outcome {
        Ok(reply) if reply.descriptors.is_empty() => Seen::Refused,
        other => seen(other)?,
    };
    Ok(Held::nothing(seen).and(peer))
}

/// A region that the device itself made.
fn of_device(target: &Target) -> Result<(Inflight, OwnedFd, Peer), Failure> {
    let peer = Peer::connect(&target.socket)?;
    greet(&peer, 0)?;
    let mut reply = peer.ask(&usual().message(request::GET_INFLIGHT_FD), &[])?;
    let region = Inflight::parse(&reply.body);
    match (region, reply.descriptors.pop()) {
        (Some(region), Some(file)) => Ok((region, file, peer)),
        _ => Err(wrong("an in-flight region", "nothing came".to_owned())),
    }
}

fn copy_of(file: &OwnedFd) -> Result<Ram, Failure> {
    let copy = file.try_clone().map_err(failed("copying"))?;
    Ok(Ram::of(File::from(copy), BYTES))
}

fn cannot_be_shrunk(target: &Target) -> Result<Held, Failure> {
    let (region, file, peer) = of_device(target)?;
    let ram = copy_of(&file)?;
    let mut setup = Setup::new()?;
    setup.inflight = Some((region, file));
    let mut front = setup.start_on(peer)?;
    if ram.resize(0).is_ok() {
        let what = "it can be shrunk".to_owned();
        return Err(wrong("an in-flight region", what));
    }
    let seen = seen(front.check(64, &[4; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}

/// Starts a ring with the device's own region after `spoil`; the device may repeat the requests it
/// finds there.
fn spoilt(
    target: &Target,
    spoil: impl FnOnce(&Ram, &Inflight) -> Result<(), Failure>,
) -> Result<(Front, Ram), Failure> {
    let (region, file, peer) = of_device(target)?;
    let ram = copy_of(&file)?;
    spoil(&ram, &region)?;
    let mut setup = Setup::new()?;
    setup.inflight = Some((region, file));
    Ok((setup.start_on(peer)?, ram))
}

/// Requests of which some may be lost; no other tenant may lose any.
fn some_requests(front: &mut Front) -> Result<Seen, Failure> {
    for slot in 0..16 {
        front.post(slot, Io::of_slot(slot, T_IN, 8 * u64::from(slot), 4096))?;
        front.kick()?;
        match front.wait_within(std::time::Duration::from_millis(20)) {
            Ok(()) | Err(Failure::Silent { .. }) => {}
            other => return seen(other),
        }
    }
    Ok(Seen::Served)
}

fn filled(target: &Target, with: Option<u8>) -> Result<Held, Failure> {
    let (mut front, _) = spoilt(target, |ram, region| {
        let len = u32::try_from(region.bytes).unwrap_or(4096);
        let mut bytes = super::super::victim::content(1, 2, len);
        if let Some(with) = with {
            bytes.fill(with);
        }
        // A header that the device accepts.
        bytes[8..12].copy_from_slice(&[1, 0, 128, 0]);
        ram.put(region.offset, &bytes)
    })?;
    let seen = some_requests(&mut front)?;
    Ok(Held::nothing(seen).and(front))
}

fn every_chain(target: &Target) -> Result<Held, Failure> {
    let (mut front, _) = spoilt(target, |ram, region| {
        ram.put(region.offset + 8, &[1, 0, 128, 0, 0xff, 0xff, 0, 0])?;
        for entry in 0..u64::from(RING_SIZE) {
            let mut bytes = [0; 16];
            bytes[0] = 1;
            bytes[8..].copy_from_slice(&u64::MAX.to_le_bytes());
            ram.put(region.offset + 16 + 16 * entry, &bytes)?;
        }
        Ok(())
    })?;
    let seen = some_requests(&mut front)?;
    Ok(Held::nothing(seen).and(front))
}

fn changing(target: &Target) -> Result<Held, Failure> {
    let (mut front, ram) = spoilt(target, |_, _| Ok(()))?;
    let len = usize::from(RING_SIZE) * 16;
    let values = vec![vec![0xff; len], vec![0; len], vec![1; len]];
    let restless = Restless::flip(&ram, 0, values)?;
    let seen = some_requests(&mut front)?;
    Ok(Held::nothing(seen).and(restless).and(front))
}

fn punched(target: &Target) -> Result<Held, Failure> {
    use rustix::fs::{FallocateFlags, fallocate};
    let (mut front, ram) = spoilt(target, |_, _| Ok(()))?;
    let restless = Restless::start(move |_| {
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(ram.file(), how, 0, 4096).map_err(failed("fallocate"))
    })?;
    let seen = some_requests(&mut front)?;
    Ok(Held::nothing(seen).and(restless).and(front))
}

/// 4 KiB, 100 TiB into the file: only these may be mapped.
fn far(target: &Target) -> Result<Held, Failure> {
    let offset = 100 << 40;
    let file = sealed(offset + BYTES, SealFlags::SHRINK)?;
    let keep = file
        .as_fd()
        .try_clone_to_owned()
        .map_err(failed("copying"))?;
    let region = Inflight { offset, ..usual() };
    Ok(told(target, region, file)?.and(keep))
}
