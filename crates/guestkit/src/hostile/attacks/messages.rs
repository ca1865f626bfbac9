// SPDX-License-Identifier: Apache-2.0
//! Messages that come too early, twice, cut short, too long, or with wrong descriptors.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::super::front::{
    Front, GPA, Io, RAM_BYTES, SLOT_BYTES, SLOTS, Setup, T_IN, VA, event, greet,
};
use super::super::peer::{DESCRIPTORS_MAX, Failure, PATIENCE, Peer};
use super::super::wire::{
    self, F_EVENT_IDX, F_INDIRECT, F_PROTOCOL, F_VERSION_1, Inflight, Message, PROTOCOL, Region,
    RingAddresses, VERSION, request,
};
use super::super::{Attack, Held, Seen, Target, seen};

const ANY: [Seen; 4] = [Seen::Served, Seen::Refused, Seen::HungUp, Seen::Stopped];
const NO: [Seen; 2] = [Seen::Refused, Seen::HungUp];
const HUNG_UP: [Seen; 1] = [Seen::HungUp];
/// Time for a back end that need not answer.
const SHORT: Duration = Duration::from_millis(20);

/// How many descriptors a message is to have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wants {
    Nothing,
    Event,
    Ram,
}

/// One valid message of each request.
fn all_messages() -> Vec<(&'static str, Message, Wants)> {
    let mut all = Vec::new();
    let mut put = |wants, messages: Vec<(&'static str, Message)>| {
        all.extend(
            messages
                .into_iter()
                .map(|(name, message)| (name, message, wants)),
        );
    };
    put(Wants::Nothing, without_descriptors());
    let event = |number| Message::words64(number, &[0]);
    put(
        Wants::Event,
        vec![
            ("set-log-fd", Message::new(request::SET_LOG_FD)),
            ("set-vring-kick", event(request::SET_VRING_KICK)),
            ("set-vring-call", event(request::SET_VRING_CALL)),
            ("set-vring-err", event(request::SET_VRING_ERR)),
        ],
    );
    let log = Message::words64(request::SET_LOG_BASE, &[4096, 0]);
    let more = wire::mem_region(request::ADD_MEM_REG, &all_of_it());
    let inflight = inflight().message(request::SET_INFLIGHT_FD);
    put(
        Wants::Ram,
        vec![
            ("set-mem-table", wire::mem_table(1, &[all_of_it()])),
            ("set-log-base", log),
            ("set-inflight-fd", inflight),
            ("add-mem-reg", more),
        ],
    );
    all
}

fn all_of_it() -> Region {
    Region {
        gpa: GPA,
        bytes: RAM_BYTES,
        va: VA,
        offset: 0,
    }
}

fn inflight() -> Inflight {
    Inflight {
        bytes: 4096,
        offset: 0,
        queues: 1,
        size: 128,
    }
}

fn without_descriptors() -> Vec<(&'static str, Message)> {
    let ring = RingAddresses {
        descriptors: VA,
        used: VA + 0x2000,
        avail: VA + 0x1000,
    };
    let state = |number, value| Message::words32(number, &[0, value]);
    let word = |number, value| Message::words64(number, &[value]);
    let features = F_PROTOCOL | F_VERSION_1;
    let gone = wire::mem_region(request::REM_MEM_REG, &all_of_it());
    let inflight = inflight().message(request::GET_INFLIGHT_FD);
    let get_config = wire::config(request::GET_CONFIG, 0, 60, 60);
    let set_config = wire::config(request::SET_CONFIG, 0, 8, 8);
    let protocol = word(request::SET_PROTOCOL_FEATURES, PROTOCOL);
    let mut all: Vec<_> = [
        ("get-features", request::GET_FEATURES),
        ("set-owner", request::SET_OWNER),
        ("reset-owner", request::RESET_OWNER),
        ("get-protocol-features", request::GET_PROTOCOL_FEATURES),
        ("get-queue-num", request::GET_QUEUE_NUM),
        ("reset-device", request::RESET_DEVICE),
        ("get-max-mem-slots", request::GET_MAX_MEM_SLOTS),
    ]
    .into_iter()
    .map(|(name, number)| (name, Message::new(number)))
    .collect();
    all.extend([
        ("set-features", word(request::SET_FEATURES, features)),
        ("set-vring-num", state(request::SET_VRING_NUM, 128)),
        ("set-vring-addr", wire::vring_addr(0, ring)),
        ("set-vring-base", state(request::SET_VRING_BASE, 0)),
        ("get-vring-base", state(request::GET_VRING_BASE, 0)),
        ("set-vring-enable", state(request::SET_VRING_ENABLE, 1)),
        ("set-protocol-features", protocol),
        ("get-config", get_config),
        ("set-config", set_config),
        ("get-inflight-fd", inflight),
        ("rem-mem-reg", gone),
    ]);
    all
}

/// Requests for features that this back end does not offer.
const STRANGE: [(&str, u32); 20] = [
    ("zero", 0),
    ("send-rarp", 19),
    ("net-set-mtu", 20),
    ("set-backend-req-fd", 21),
    ("iotlb", 22),
    ("set-vring-endian", 23),
    ("create-crypto-session", 26),
    ("close-crypto-session", 27),
    ("postcopy-advise", 28),
    ("postcopy-listen", 29),
    ("postcopy-end", 30),
    ("gpu-set-socket", 33),
    ("vring-kick", 35),
    ("set-status", 39),
    ("get-status", 40),
    ("get-shared-object", 41),
    ("set-device-state-fd", 42),
    ("check-device-state", 43),
    ("beyond-the-last", 46),
    ("highest", u32::MAX),
];

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let mut all = Vec::new();
    for (name, message, wants) in all_messages() {
        all.extend(of_message(name, &message, wants));
    }
    for (name, number) in STRANGE {
        for (how, room) in [("", 0), ("-with-body", 24)] {
            all.push(Attack::new(
                format!("strange-{name}{how}"),
                &ANY,
                move |t| {
                    let message = Message::new(number).with_body(vec![0; room]).acked();
                    while_running(t, &message, Wants::Event)
                },
            ));
        }
    }
    all.extend(headers());
    all.extend(values());
    all
}

fn of_message(name: &str, message: &Message, wants: Wants) -> Vec<Attack> {
    let case = |how: &str,
                message: Message,
                wants,
                run: fn(&Target, &Message, Wants) -> Result<Held, Failure>| {
        Attack::new(format!("{name}-{how}"), &ANY, move |target| {
            run(target, &message, wants)
        })
    };
    let size = u32::try_from(message.body.len()).unwrap_or(u32::MAX);
    let longer = [&message.body[..], &[0; 8]].concat();
    let shorter = message.body[..message.body.len() / 2].to_vec();
    let m = || message.clone();
    let unwanted = match wants {
        Wants::Nothing => Wants::Event,
        _ => Wants::Nothing,
    };
    vec![
        case("first", m(), wants, first),
        case("twice-while-running", m().acked(), wants, while_running),
        case(
            "of-size-zero",
            m().with_body(Vec::new()),
            wants,
            while_running,
        ),
        case("too-short", m().with_body(shorter), wants, while_running),
        case("too-long", m().with_body(longer), wants, while_running),
        case(
            "shorter-than-it-says",
            m().with_size(size + 64),
            wants,
            while_running,
        ),
        case("with-wrong-descriptors", m(), unwanted, while_running),
        case("cut-at-each-byte", m(), wants, cut),
        case("with-33-descriptors", m(), wants, crowded),
    ]
}

fn headers() -> Vec<Attack> {
    let plain = || Message::new(request::GET_FEATURES);
    let case = |name: &'static str, message: Message| {
        Attack::new(name, &ANY, move |t| {
            while_running(t, &message, Wants::Nothing)
        })
    };
    vec![
        case("header-version-0", plain().with_flags(0)),
        case("header-version-2", plain().with_flags(2)),
        case("header-version-3", plain().with_flags(3)),
        case("header-is-reply", plain().with_flags(VERSION | wire::REPLY)),
        case("header-all-flags", plain().with_flags(u32::MAX)),
        case("header-size-max", plain().with_size(u32::MAX)),
        case("header-size-just-too-large", plain().with_size(0x1001)),
        case(
            "header-of-ones",
            plain().with_flags(u32::MAX).with_size(u32::MAX),
        ),
        Attack::new("header-half-and-held", &ANY, |t| held_after(t, 5)),
        Attack::new("header-whole-and-held", &ANY, |t| held_after(t, 12)),
        Attack::new("body-half-and-held", &ANY, |t| held_after(t, 16)),
        Attack::new("message-byte-by-byte", &[Seen::Served], byte_by_byte),
        Attack::new("descriptors-253-at-once", &ANY, |t| many_descriptors(t, 0)),
        Attack::new("descriptors-253-over-and-over", &ANY, |t| {
            many_descriptors(t, 20)
        }),
        Attack::new("noise", &HUNG_UP, noise),
    ]
}

/// A message while the ring runs, which requests an acknowledgement.
fn told(name: String, expected: &[Seen], message: Message, wants: Wants) -> Attack {
    let message = message.acked();
    Attack::new(name, expected, move |target| {
        while_running(target, &message, wants)
    })
}

fn values() -> Vec<Attack> {
    let mut all = of_other_queues();
    all.extend(of_ring());
    all.extend(of_features());
    all.extend(of_configuration());
    let plain = Wants::Nothing;
    let empty = wire::mem_table(0, &[]);
    let twice = Message::words32(request::SET_VRING_ENABLE, &[0, 2]);
    all.push(told(
        "mem-table-empty-while-running".into(),
        &ANY,
        empty,
        plain,
    ));
    all.push(told("vring-enable-2".into(), &NO, twice, plain));
    all
}

fn of_other_queues() -> Vec<Attack> {
    let mut all = Vec::new();
    let per_ring = [
        ("set-vring-num", request::SET_VRING_NUM, 128),
        ("set-vring-base", request::SET_VRING_BASE, 0),
        ("get-vring-base", request::GET_VRING_BASE, 0),
        ("set-vring-enable", request::SET_VRING_ENABLE, 1),
    ];
    for index in [64, 255, 65_536, 1 << 31, u32::MAX] {
        for (name, number, value) in per_ring {
            let message = Message::words32(number, &[index, value]);
            let name = format!("{name}-of-queue-{index}");
            all.push(told(name, &NO, message, Wants::Nothing));
        }
    }
    for (name, number) in [
        ("set-vring-kick", request::SET_VRING_KICK),
        ("set-vring-call", request::SET_VRING_CALL),
        ("set-vring-err", request::SET_VRING_ERR),
    ] {
        for (how, expected, word) in [
            ("of-queue-64", &NO[..], 64),
            ("of-queue-255", &NO, 255),
            ("with-other-bits", &ANY, 0xffff_ffff_ffff_fe00),
        ] {
            let message = Message::words64(number, &[word]);
            let name = format!("{name}-{how}");
            all.push(told(name, expected, message, Wants::Event));
        }
    }
    all
}

fn of_ring() -> Vec<Attack> {
    let mut all = Vec::new();
    for entries in [0, 3, 127, 2048, 32_768, 65_536, 65_536 + 128, u32::MAX] {
        let message = Message::words32(request::SET_VRING_NUM, &[0, entries]);
        let name = format!("vring-num-{entries}");
        all.push(told(name, &NO, message.clone(), Wants::Nothing));
        let name = format!("vring-num-{entries}-before-the-ring-runs");
        all.push(Attack::new(name, &NO, move |target| {
            let peer = Peer::connect(&target.socket)?;
            greet(&peer, 0)?;
            let seen = seen(peer.tell(message.clone(), &[]))?;
            Ok(Held::nothing(seen).and(peer))
        }));
    }
    for base in [65_536, u32::MAX] {
        let message = Message::words32(request::SET_VRING_BASE, &[0, base]);
        let name = format!("vring-base-{base}");
        all.push(told(name, &NO, message, Wants::Nothing));
    }
    all
}

fn of_features() -> Vec<Attack> {
    let mut all = Vec::new();
    let other = F_PROTOCOL | F_VERSION_1 | F_EVENT_IDX | F_INDIRECT;
    for (name, value) in [
        ("not-offered", 1 << 63),
        ("all", u64::MAX),
        ("none", 0),
        ("event-idx", other),
    ] {
        for (kind, number) in [
            ("features", request::SET_FEATURES),
            ("protocol-features", request::SET_PROTOCOL_FEATURES),
        ] {
            let message = Message::words64(number, &[value]);
            let name = format!("{kind}-{name}-while-running");
            all.push(told(name, &ANY, message, Wants::Nothing));
        }
    }
    all
}

fn of_configuration() -> Vec<Attack> {
    let mut all = Vec::new();
    for (offset, size) in [
        (0, 257),
        (256, 1),
        (250, 8),
        (u32::MAX, 8),
        (0, u32::MAX),
        (u32::MAX, u32::MAX),
        (0, 0),
    ] {
        let message = wire::config(request::GET_CONFIG, offset, size, 8);
        let name = format!("get-config-{size}-at-{offset}");
        all.push(told(name, &ANY, message, Wants::Nothing));
    }
    for regions in [0, 2, 33, 509, u32::MAX] {
        let message = wire::mem_table(regions, &[all_of_it()]);
        let name = format!("mem-table-that-says-{regions}");
        all.push(told(name, &ANY, message, Wants::Ram));
    }
    all
}

fn send(front: &Front, message: &Message, wants: Wants) -> Result<(), Failure> {
    let event = event()?;
    let fds: &[BorrowedFd<'_>] = match wants {
        Wants::Nothing => &[],
        Wants::Event => &[event.as_fd()],
        Wants::Ram => &[front.ram.file().as_fd()],
    };
    front.peer.send(message, fds)
}

/// A message on a new connection, without even SET_OWNER before it.
fn first(target: &Target, message: &Message, wants: Wants) -> Result<Held, Failure> {
    let peer = Peer::connect(&target.socket)?;
    let ram = super::super::front::Ram::new(RAM_BYTES)?;
    let event = event()?;
    let fds: &[BorrowedFd<'_>] = match wants {
        Wants::Nothing => &[],
        Wants::Event => &[event.as_fd()],
        Wants::Ram => &[ram.file().as_fd()],
    };
    peer.send(message, fds)?;
    let seen = still_there(&peer)?;
    Ok(Held::nothing(seen).and(peer))
}

/// Whether it hung up, or answers a request that is always permitted.
fn still_there(peer: &Peer) -> Result<Seen, Failure> {
    match peer.wait_for_hang_up(SHORT) {
        Ok(()) => Ok(Seen::HungUp),
        Err(Failure::Silent { .. }) => Ok(Seen::Served),
        Err(other) => Err(other),
    }
}

/// Sends the message while requests are in flight.
fn while_running(target: &Target, message: &Message, wants: Wants) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    for slot in 0..SLOTS {
        front.post(
            slot,
            Io::of_slot(slot, T_IN, 64 * u64::from(slot), SLOT_BYTES),
        )?;
    }
    front.kick()?;
    match send(&front, message, wants) {
        Ok(()) | Err(Failure::HungUp { .. }) => {}
        Err(other) => return Err(other),
    }
    // With other protocol features there may be no more acknowledgements.
    let asked =
        message.flags & wire::NEED_REPLY != 0 && message.request != request::SET_PROTOCOL_FEATURES;
    let answer = if asked {
        front.peer.reply().map(|reply| reply.word())
    } else {
        Ok(None)
    };
    let seen = match answer {
        Err(failure) => seen(Err::<(), _>(failure))?,
        Ok(Some(word)) if word != 0 => Seen::Refused,
        Ok(_) => still_there(&front.peer)?,
    };
    Ok(Held::nothing(seen).and(front))
}

/// Ends the connection after 1, 2, 3 and so on bytes of the message.
fn cut(target: &Target, message: &Message, wants: Wants) -> Result<Held, Failure> {
    let bytes = message.bytes();
    let event = event()?;
    let fds: &[BorrowedFd<'_>] = match wants {
        Wants::Nothing => &[],
        _ => &[event.as_fd()],
    };
    for end in 1..bytes.len() {
        let peer = Peer::connect(&target.socket)?;
        match peer.send_bytes(&bytes[..end], fds) {
            // The previous connection may still exist: then this one is closed at once.
            Ok(()) | Err(Failure::HungUp { .. }) => {}
            Err(other) => return Err(other),
        }
    }
    Ok(Held::nothing(Seen::Served))
}

fn crowded(target: &Target, message: &Message, _: Wants) -> Result<Held, Failure> {
    let front = Front::start(&target.socket)?;
    let fds = vec![front.ram.file().as_fd(); 33];
    front.peer.send(message, &fds)?;
    let seen = still_there(&front.peer)?;
    Ok(Held::nothing(seen).and(front))
}

/// Sends the first `bytes` of a message and no more.
fn held_after(target: &Target, bytes: usize) -> Result<Held, Failure> {
    let front = Front::start(&target.socket)?;
    let message = Message::words64(request::SET_FEATURES, &[F_PROTOCOL]).bytes();
    front.peer.send_bytes(&message[..bytes], &[])?;
    let seen = still_there(&front.peer)?;
    Ok(Held::nothing(seen).and(front))
}

fn byte_by_byte(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    for byte in Message::new(request::GET_FEATURES).bytes() {
        front.peer.send_bytes(&[byte], &[])?;
    }
    let seen = match front.peer.reply() {
        Ok(_) => seen(front.check(64, &[3; 4096]))?,
        // It may reject a header that comes in parts.
        Err(Failure::HungUp { .. }) => Seen::HungUp,
        Err(other) => return Err(other),
    };
    Ok(Held::nothing(seen).and(front))
}

fn many_descriptors(target: &Target, again: u64) -> Result<Held, Failure> {
    let mut outcome = Seen::Served;
    for _ in 0..=again {
        let setup = Setup::new()?;
        let peer = Peer::connect(&target.socket)?;
        match greet(&peer, 0) {
            Ok(()) => {}
            // The previous connection still exists.
            Err(Failure::HungUp { .. }) => continue,
            Err(other) => return Err(other),
        }
        let fds = vec![setup.kick.as_fd(); DESCRIPTORS_MAX];
        peer.send(&Message::new(request::GET_FEATURES), &fds)?;
        outcome = still_there(&peer)?;
    }
    Ok(Held::nothing(outcome))
}

fn noise(target: &Target) -> Result<Held, Failure> {
    for seed in 1..50 {
        let peer = Peer::connect(&target.socket)?;
        let bytes = super::super::victim::content(seed, seed, 512);
        match peer.send_bytes(&bytes, &[]) {
            Ok(()) | Err(Failure::HungUp { .. }) => {}
            Err(other) => return Err(other),
        }
        peer.wait_for_hang_up(PATIENCE)?;
    }
    Ok(Held::nothing(Seen::HungUp))
}
