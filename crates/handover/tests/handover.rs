// SPDX-License-Identifier: Apache-2.0
//! Messages between versions, over a real socket, and damaged ones.

use pagetide_handover::{
    Channel, HandoverError, PACKET_DESCRIPTORS_MAX,
    message::{
        Addresses, DISKS, Device, Fd, FrontEnd, Go, Inflight, Message, Offer, POOLS, Ready,
        Refused, Region, Ring, VERSION,
    },
};
use pagetide_random::SplitMix64;
use serde::{Deserialize, Serialize};
use std::{
    fs::File,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    time::Duration,
};

/// Longer than anything takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);
/// A hand-over as version 1 wrote it, a message a line.
const RECORDED: &str = include_str!("fixtures/version-1.jsonl");

fn offer() -> Offer {
    Offer {
        version: 1,
        requires: vec![POOLS.into(), DISKS.into()],
        program: "0.1.0".into(),
        pid: 4711,
        settings: "state-dir = \"/dev/shm/pagetide\"\napi = \"api.sock\"\n".into(),
    }
}

fn go() -> Go {
    let ring = |kick, call| Ring {
        size: 256,
        base: 17,
        addresses: Some(Addresses {
            descriptors: 0x7000_0000_1000,
            avail: 0x7000_0000_2000,
            used: 0x7000_0000_3000,
        }),
        kick: Some(Fd(kick)),
        call: Some(Fd(call)),
        error: None,
        enabled: true,
    };
    Go {
        stopped_ns: 81_000_000_000,
        lock: Fd(0),
        api: Fd(1),
        vms: vec!["web".into()],
        devices: vec![
            Device {
                socket: "/run/vm/a.sock".into(),
                listener: Fd(2),
                front_end: Some(FrontEnd {
                    connection: Fd(3),
                    features: 0x1_7000_0000,
                    protocol_features: Some(0x920f),
                    memory: vec![Region {
                        gpa: 0,
                        bytes: 1 << 30,
                        frontend: 0x7000_0000_0000,
                        file_offset: 0,
                        file: Fd(4),
                    }],
                    inflight: Some(Inflight {
                        bytes: 8448,
                        file_offset: 0,
                        queues: 2,
                        queue_size: 256,
                        file: Fd(5),
                    }),
                    rings: vec![ring(6, 7), ring(8, 9)],
                }),
                nic: None,
            },
            Device {
                socket: "/run/vm/b.sock".into(),
                listener: Fd(10),
                front_end: None,
                nic: None,
            },
        ],
    }
}

fn recorded() -> Vec<Message> {
    vec![
        Message::Offer(offer()),
        Message::Ready(Ready {
            version: 1,
            program: "0.1.0".into(),
            pid: 4712,
        }),
        Message::Go(go()),
        Message::Serving,
        Message::Commit,
        Message::Refused(Refused {
            reason: "pool a.pool was made by another version".into(),
        }),
    ]
}

#[test]
fn recorded_hand_over_of_version_1_is_read_and_written_as_it_was() {
    let lines: Vec<&str> = RECORDED.lines().collect();
    let messages = recorded();
    assert_eq!(lines.len(), messages.len());
    for (line, message) in lines.iter().zip(&messages) {
        assert_eq!(
            &serde_json::from_str::<Message>(line).unwrap(),
            message,
            "{line}"
        );
        assert_eq!(&serde_json::to_string(message).unwrap(), line);
    }
    assert_eq!(
        VERSION, 1,
        "a later version keeps this test and adds its own fixture"
    );
}

/// Messages of a version that does not exist: each has a field that version 1 does not know.
mod version_2 {
    use super::*;

    #[derive(Serialize, Deserialize, Debug, PartialEq, Eq)]
    #[serde(tag = "kind", rename_all = "kebab-case")]
    pub enum Message {
        Offer(Offer),
        Go(Go),
    }

    #[derive(Serialize, Deserialize, Debug, PartialEq, Eq)]
    pub struct Offer {
        #[serde(flatten)]
        pub first: super::Offer,
        #[serde(default)]
        pub host: Option<String>,
    }

    #[derive(Serialize, Deserialize, Debug, PartialEq, Eq)]
    pub struct Go {
        #[serde(flatten)]
        pub first: super::Go,
        #[serde(default = "unlimited")]
        pub pace: u64,
    }

    pub fn unlimited() -> u64 {
        u64::MAX
    }
}

#[test]
fn version_2_with_a_field_more_goes_to_version_1_and_back() {
    let second = version_2::Message::Offer(version_2::Offer {
        first: Offer {
            version: 2,
            ..offer()
        },
        host: Some("a".into()),
    });
    let text = serde_json::to_string(&second).unwrap();
    let Message::Offer(read) = serde_json::from_str(&text).unwrap() else {
        panic!("{text}");
    };
    assert_eq!((read.version, read.unknown()), (2, None));
    assert_eq!(
        read,
        Offer {
            version: 2,
            ..offer()
        }
    );

    let second = version_2::Message::Go(version_2::Go {
        first: go(),
        pace: 7,
    });
    let text = serde_json::to_string(&second).unwrap();
    assert_eq!(
        serde_json::from_str::<Message>(&text).unwrap(),
        Message::Go(go())
    );

    let text = serde_json::to_string(&Message::Go(go())).unwrap();
    let read: version_2::Message = serde_json::from_str(&text).unwrap();
    let expected = version_2::Go {
        first: go(),
        pace: version_2::unlimited(),
    };
    assert_eq!(read, version_2::Message::Go(expected));
    let text = serde_json::to_string(&Message::Offer(offer())).unwrap();
    let read: version_2::Message = serde_json::from_str(&text).unwrap();
    let expected = version_2::Offer {
        first: offer(),
        host: None,
    };
    assert_eq!(read, version_2::Message::Offer(expected));
}

#[test]
fn requirement_that_is_not_known_is_named() {
    let mut offer = offer();
    assert_eq!(offer.unknown(), None);
    offer.requires.push("tiers".into());
    assert_eq!(offer.unknown(), Some("tiers"));
}

/// A file that tells which one it is.
fn files(count: usize) -> Vec<File> {
    let file = |number: usize| {
        use std::io::Write;
        let mut file = tempfile::tempfile().unwrap();
        write!(file, "{number}").unwrap();
        file
    };
    (0..count).map(file).collect()
}

fn content(file: File) -> String {
    use std::os::unix::fs::FileExt;
    let mut bytes = [0; 16];
    let len = file.read_at(&mut bytes, 0).unwrap();
    String::from_utf8_lossy(&bytes[..len]).into_owned()
}

#[test]
fn descriptors_arrive_under_the_numbers_that_the_message_gives_them() {
    let (ours, theirs) = Channel::pair().unwrap();
    let theirs = Channel::of(theirs).unwrap();
    let files = files(11);
    let fds: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    ours.send(&Message::Go(go()), &fds, PATIENCE).unwrap();
    let (message, mut came) = theirs.receive(PATIENCE).unwrap();
    assert_eq!(message, Message::Go(go()));
    assert_eq!(came.left(), 11);
    for number in [3, 10, 0] {
        let fd = came.take(Fd(number)).unwrap();
        assert!(
            !rustix::io::fcntl_getfd(&fd).unwrap().is_empty(),
            "not passed on by exec"
        );
        assert_eq!(content(fd.into()), number.to_string());
    }
    for number in [3, 11, u32::MAX] {
        let error = came.take(Fd(number)).unwrap_err();
        assert!(matches!(error, HandoverError::Descriptor { index } if index == number));
    }
}

#[test]
fn message_of_many_packets_passes_whole() {
    let (ours, theirs) = Channel::pair().unwrap();
    let theirs = Channel::of(theirs).unwrap();
    let count = 5 * PACKET_DESCRIPTORS_MAX + 3;
    let file = tempfile::tempfile().unwrap();
    let mut sent = go();
    for number in 0..u32::try_from(count - 11).unwrap() {
        sent.devices.push(Device {
            socket: PathBuf::from(format!("/{}/{number}", "x".repeat(900))),
            listener: Fd(11 + number),
            front_end: None,
            nic: None,
        });
    }
    let sent = Message::Go(sent);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            ours.send(&sent, &vec![file.as_fd(); count], PATIENCE)
                .unwrap()
        });
        let (message, came) = theirs.receive(PATIENCE).unwrap();
        assert!(message == sent);
        assert_eq!(came.left(), count);
    });
}

#[test]
fn silence_end_and_a_full_socket_are_told_apart() {
    let (ours, theirs) = Channel::pair().unwrap();
    let short = Duration::from_millis(20);
    let silent = ours.receive(short).unwrap_err();
    assert!(
        matches!(silent, HandoverError::TimedOut { waited_ms: 20 }),
        "{silent:?}"
    );
    let full = (0..100_000).find_map(|_| ours.send(&Message::Serving, &[], short).err());
    assert!(
        matches!(full, Some(HandoverError::TimedOut { .. })),
        "{full:?}"
    );
    drop(theirs);
    assert!(matches!(ours.receive(PATIENCE), Err(HandoverError::HungUp)));
    assert!(matches!(
        ours.send(&Message::Commit, &[], PATIENCE),
        Err(HandoverError::HungUp)
    ));
}

#[test]
fn end_that_is_no_such_socket_is_refused() {
    assert!(Channel::of(tempfile::tempfile().unwrap().into()).is_err());
    let (stream, _other) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(Channel::of(stream.into()).is_err());
}

/// Damaged text of each recorded message: a message or an error, in any case no panic, and what is read can be
/// written and read again.
#[test]
fn damaged_message_is_a_message_or_an_error() {
    let mut random = SplitMix64::new(17);
    let (mut read, mut refused) = (0_u32, 0_u32);
    for line in RECORDED.lines() {
        for _ in 0..3000 {
            let mut bytes = line.as_bytes().to_vec();
            for _ in 0..=random.below(4) {
                let at = usize::try_from(random.below(bytes.len().max(1) as u64)).unwrap();
                match random.below(4) {
                    _ if bytes.is_empty() => bytes.push(b'{'),
                    0 => bytes[at] = random.next_u64().to_le_bytes()[0],
                    1 => drop(bytes.remove(at)),
                    2 => bytes.insert(
                        at,
                        b"{}[],:\"0-9e"[usize::try_from(random.below(11)).unwrap()],
                    ),
                    _ => bytes.truncate(at.max(1)),
                }
            }
            match serde_json::from_slice::<Message>(&bytes) {
                Ok(message) => {
                    read += 1;
                    let again = serde_json::to_vec(&message).unwrap();
                    assert_eq!(serde_json::from_slice::<Message>(&again).unwrap(), message);
                }
                Err(_) => refused += 1,
            }
        }
    }
    assert!(
        read > 100 && refused > 1000,
        "{read} read, {refused} refused"
    );
}

#[test]
fn text_that_is_no_message_is_an_error_at_the_other_end() {
    for text in [
        "",
        "{}",
        "null",
        r#"{"kind":"stop"}"#,
        r#"{"kind":"go"}"#,
        "\u{0}",
    ] {
        let (ours, theirs) = Channel::pair().unwrap();
        let theirs = Channel::of(theirs).unwrap();
        ours.send_text(text.as_bytes(), &[], PATIENCE).unwrap();
        let error = theirs.receive(PATIENCE).unwrap_err();
        assert!(
            matches!(error, HandoverError::Content(_)),
            "{text:?}: {error:?}"
        );
    }
}
