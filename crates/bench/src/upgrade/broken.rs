// SPDX-License-Identifier: Apache-2.0
//! Programs that a daemon is told to be replaced by and that fail, each in its own way.
//!
//! They are this program under other names: a daemon runs the program of an upgrade with the word `successor`, and
//! [`act`] then fails as the name of the file says that it was started from. Each speaks the hand-over messages up to
//! the point at which it fails, so the daemon cannot tell it from a real one before.

use pagetide_handover::{
    Channel, HandoverError,
    message::{Message, Ready, Refused, VERSION},
};
use pagetide_sys::kept_signals::KeptSignals;
use rustix::process::Signal;
use std::{fs, io, os::fd::AsFd as _, path::PathBuf, time::Duration};

/// Longest wait for a message of the daemon.
const PATIENCE: Duration = Duration::from_secs(120);

/// A way to fail.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Way {
    /// At once.
    Ends,
    /// At once, by a signal.
    Crashes,
    /// Without a word.
    Hangs,
    /// With a reason.
    Refuses,
    /// What it says is no message.
    Nonsense,
    /// It says what is not expected.
    AnotherWord,
    /// It has read what is offered.
    HangsAfterOffer,
    /// It has said that it is ready.
    EndsWhenReady,
    /// The same.
    HangsWhenReady,
    /// It has everything.
    EndsAfterGo,
    /// The same.
    CrashesAfterGo,
    /// The same.
    RefusesAfterGo,
    /// The same.
    NonsenseAfterGo,
    /// The same.
    AnotherWordAfterGo,
    /// It does not fail, but knows nothing of VMs: once the file beside it says `now` it takes over, and writes
    /// there the signal that comes next. While that says `not ready`, it is not.
    ServesUntilASignal,
}

impl Way {
    /// Those that fail before the daemon has stopped its work.
    pub const BEFORE: [Self; 7] = [
        Self::Refuses,
        Self::Ends,
        Self::Crashes,
        Self::Nonsense,
        Self::AnotherWord,
        Self::Hangs,
        Self::HangsAfterOffer,
    ];
    /// Those that fail after that.
    pub const AFTER: [Self; 7] = [
        Self::EndsAfterGo,
        Self::RefusesAfterGo,
        Self::CrashesAfterGo,
        Self::NonsenseAfterGo,
        Self::AnotherWordAfterGo,
        Self::EndsWhenReady,
        Self::HangsWhenReady,
    ];

    /// Its name, and that of its file.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ends => "ends",
            Self::Crashes => "crashes",
            Self::Hangs => "hangs",
            Self::Refuses => "refuses",
            Self::Nonsense => "nonsense",
            Self::AnotherWord => "another-word",
            Self::HangsAfterOffer => "hangs-after-offer",
            Self::EndsWhenReady => "ends-when-ready",
            Self::HangsWhenReady => "hangs-when-ready",
            Self::EndsAfterGo => "ends-after-go",
            Self::CrashesAfterGo => "crashes-after-go",
            Self::RefusesAfterGo => "refuses-after-go",
            Self::NonsenseAfterGo => "nonsense-after-go",
            Self::AnotherWordAfterGo => "another-word-after-go",
            Self::ServesUntilASignal => "serves-until-a-signal",
        }
    }

    fn named(name: &str) -> Option<Self> {
        let all = Self::BEFORE.into_iter().chain(Self::AFTER);
        let mut all = all.chain([Self::ServesUntilASignal]);
        all.find(|way| way.name() == name)
    }
}

/// Why such a program could not even fail as it should.
#[derive(Debug, thiserror::Error)]
pub enum BrokenError {
    /// Its name is none of them, or it was started by hand.
    #[error("this is a part of benches and tests, and not started by hand")]
    ByHand,
    /// The daemon said something else.
    #[error("the daemon: {0}")]
    Daemon(#[from] HandoverError),
    /// The kernel's.
    #[error(transparent)]
    Kernel(#[from] io::Error),
}

/// Fails as the name of its file says.
///
/// # Errors
/// [`BrokenError`]; one that is to fail otherwise does not return.
pub fn act() -> Result<(), BrokenError> {
    let file = std::env::current_exe()?;
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    let way = Way::named(&name).ok_or(BrokenError::ByHand)?;
    let stdin = io::stdin().as_fd().try_clone_to_owned()?;
    let channel = Channel::of(stdin).map_err(|_| BrokenError::ByHand)?;
    match way {
        Way::Ends => end(),
        Way::Crashes => std::process::abort(),
        Way::Hangs => hang(),
        _ => {}
    }
    expect(&channel, "offer")?;
    match way {
        Way::HangsAfterOffer => hang(),
        Way::Refuses | Way::Nonsense | Way::AnotherWord => fail(&channel, way)?,
        _ => {}
    }
    let told = file.with_extension("told");
    if way == Way::ServesUntilASignal {
        while fs::read_to_string(&told)? == "not ready" {
            std::thread::yield_now();
        }
    }
    let ready = Message::Ready(Ready {
        version: VERSION,
        program: "broken".into(),
        pid: std::process::id(),
    });
    channel.send(&ready, &[], PATIENCE)?;
    match way {
        Way::EndsWhenReady => end(),
        Way::HangsWhenReady => hang(),
        _ => {}
    }
    expect(&channel, "go")?;
    // A test that has put a file there wants this moment to last.
    while fs::read_to_string(&told).is_ok_and(|told| told != "now") {
        std::thread::yield_now();
    }
    match way {
        Way::EndsAfterGo => end(),
        Way::CrashesAfterGo => std::process::abort(),
        Way::ServesUntilASignal => serve(&channel, &told),
        way => fail(&channel, way),
    }
}

fn end() -> ! {
    std::process::exit(3)
}

fn hang() -> ! {
    loop {
        std::thread::park();
    }
}

fn expect(channel: &Channel, wanted: &'static str) -> Result<(), BrokenError> {
    match channel.receive(PATIENCE)?.0 {
        message if message.name() == wanted => Ok(()),
        other => Err(other.instead_of(wanted).into()),
    }
}

/// Says something instead of what is expected, and nothing more.
fn fail(channel: &Channel, way: Way) -> Result<(), BrokenError> {
    match way {
        Way::Nonsense | Way::NonsenseAfterGo => channel.send_text(b"{}", &[], PATIENCE)?,
        Way::AnotherWord | Way::AnotherWordAfterGo => {
            channel.send(&Message::Commit, &[], PATIENCE)?;
        }
        _ => {
            let refused = Message::Refused(Refused {
                reason: "it is broken".into(),
            });
            channel.send(&refused, &[], PATIENCE)?;
        }
    }
    hang()
}

fn serve(channel: &Channel, file: &PathBuf) -> Result<(), BrokenError> {
    let kept = KeptSignals::of(&[Signal::TERM, Signal::USR2])?;
    channel.send(&Message::Serving, &[], PATIENCE)?;
    expect(channel, "commit")?;
    loop {
        if let Some(signal) = kept.next()? {
            fs::write(file, format!("{signal:?}"))?;
            return Ok(());
        }
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_way_is_found_by_its_name() {
        let all: Vec<Way> = Way::BEFORE.into_iter().chain(Way::AFTER).collect();
        let names: BTreeSet<&str> = all.iter().map(|way| way.name()).collect();
        assert_eq!(names.len(), all.len());
        assert!(all.iter().all(|way| Way::named(way.name()) == Some(*way)));
        assert_eq!(Way::named("pagetide-lab"), None);
    }
}
