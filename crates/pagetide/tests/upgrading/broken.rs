// SPDX-License-Identifier: Apache-2.0
//! Programs that a daemon is told to be replaced by and that fail, each in its own way.

use super::PATIENCE;
use pagetide_handover::{
    Channel,
    message::{Message, Ready, Refused},
};
use std::{fs, os::fd::AsFd as _};

/// Programs that fail before the daemon has stopped its work.
pub const BROKEN_BEFORE: [&str; 8] = [
    "ends",
    "hangs",
    "crashes",
    "refuses",
    "says nonsense",
    "says another thing",
    "hangs after the offer",
    "refuses",
];

/// Programs that fail after that.
pub const BROKEN_AFTER: [&str; 7] = [
    "ends when it is ready",
    "hangs when it is ready",
    "ends after go",
    "crashes after go",
    "refuses after go",
    "says nonsense after go",
    "says another thing after go",
];

/// Fails as the file that the environment names says; returns in a process that no daemon has started.
pub fn act() {
    let Some(file) = std::env::var_os("PAGETIDE_TEST_BROKEN") else {
        return;
    };
    // Stdin is the socket only if a daemon has started this process.
    let Ok(stdin) = std::io::stdin().as_fd().try_clone_to_owned() else {
        return;
    };
    let Ok(channel) = Channel::of(stdin) else {
        return;
    };
    be_broken(&fs::read_to_string(file).unwrap(), &channel);
}

fn hang() -> ! {
    loop {
        std::thread::park();
    }
}

fn be_broken(mode: &str, channel: &Channel) {
    let refused = Message::Refused(Refused {
        reason: "it does not like it".into(),
    });
    let ready = Message::Ready(Ready {
        version: 1,
        program: "9".into(),
        pid: 1,
    });
    let end = || std::process::exit(3);
    match mode {
        "ends" => end(),
        "hangs" => hang(),
        "crashes" => std::process::abort(),
        _ => {}
    }
    let offer = channel.receive(PATIENCE).unwrap().0;
    assert!(matches!(offer, Message::Offer(_)), "{offer:?}");
    match mode {
        "refuses" => channel.send(&refused, &[], PATIENCE).unwrap(),
        "says nonsense" => channel.send_text(b"{}", &[], PATIENCE).unwrap(),
        "says another thing" => channel.send(&Message::Commit, &[], PATIENCE).unwrap(),
        "hangs after the offer" => hang(),
        _ => {}
    }
    channel.send(&ready, &[], PATIENCE).unwrap();
    match mode {
        "ends when it is ready" => end(),
        "hangs when it is ready" => hang(),
        _ => {}
    }
    let go = channel.receive(PATIENCE).unwrap();
    assert!(matches!(go.0, Message::Go(_)), "{:?}", go.0);
    match mode {
        "ends after go" => end(),
        "crashes after go" => std::process::abort(),
        "refuses after go" => channel.send(&refused, &[], PATIENCE).unwrap(),
        "says nonsense after go" => channel.send_text(b"x", &[], PATIENCE).unwrap(),
        "says another thing after go" => channel.send(&ready, &[], PATIENCE).unwrap(),
        _ => {}
    }
    hang()
}
