// SPDX-License-Identifier: Apache-2.0
//! The new program: what it does from its start until it is the daemon.
//!
//! It changes nothing before *Go*, and nothing before *Commit* that a daemon may not do which is killed at the next
//! instant. Requests of the API wait in the backlog of its socket until then.

use super::{
    Parts, own_program,
    prepare::SEND_WAIT,
    report::{UpgradeReport, UpgradeState},
};
use crate::{
    dpu::Owed,
    host,
    run::{self, Started, check_host, name_process},
    settings::{RunSettings, Settings, from_text},
    signals,
};
use pagetide_handover::{
    Channel, HandoverError,
    message::{Go, Message, Offer, Ready, Refused, VERSION},
};
use pagetide_report::outcome::CommandError;
use pagetide_sys::{clock::now_ns, hurry::Hurry, inherited};
use std::{
    path::Path,
    time::{Duration, Instant},
};

/// How long the daemon may take to say what it wants.
const OFFER_WAIT: Duration = Duration::from_secs(10);
/// How long it may take to stop its work: I/O of disks under way is waited for.
const GO_WAIT: Duration = Duration::from_secs(600);
/// The part of the time for everything, from *Go* to *Serving*, in which the new program waits for what others still
/// hold. The rest is for the recovery.
const WAIT_SHARE: (u32, u32) = (4, 5);
/// Between two looks whether the old program has decided; it does so at once.
const COMMIT_LOOK: Duration = Duration::from_secs(10);

/// Succeeds the daemon that has started this process.
///
/// # Errors
/// It cannot, and the old program goes on; or as for `pagetide run`.
pub(crate) fn run() -> Result<(), CommandError> {
    let by_hand = |error: &dyn std::fmt::Display| {
        CommandError::refused(format!(
            "this is a part of `pagetide upgrade`, and not started by hand ({error})"
        ))
    };
    signals::keep().map_err(|error| by_hand(&error))?;
    let stdin = inherited::take_stdin().map_err(|error| by_hand(&error))?;
    let channel = Channel::of(stdin).map_err(|error| by_hand(&error))?;
    name_process();
    let offer = match channel.receive(OFFER_WAIT).map_err(CommandError::failed)? {
        (Message::Offer(offer), _) => offer,
        (other, _) => return Err(CommandError::failed(other.instead_of("offer"))),
    };
    let settings = match examine(&offer) {
        Ok(settings) => settings,
        Err(error) => return refuse(&channel, error),
    };
    // Before VMs and disks wait for this process.
    let hurry = Hurry::begin();
    let ready = Message::Ready(Ready {
        version: VERSION,
        program: env!("CARGO_PKG_VERSION").to_owned(),
        pid: std::process::id(),
    });
    channel
        .send(&ready, &[], SEND_WAIT)
        .map_err(CommandError::failed)?;
    let (go, fds) = match channel.receive(GO_WAIT) {
        Ok((Message::Go(go), fds)) => (go, fds),
        Ok((other, _)) => return Err(CommandError::failed(other.instead_of("go"))),
        Err(error) => {
            tracing::info!(%error, "the old program does not hand over; this one ends");
            return Err(CommandError::failed(error));
        }
    };
    let parts = Parts::from_message(&go, fds);
    take_over(&channel, &settings, &go, parts, hurry)
}

/// Whether this program can take over, before anything is stopped.
fn examine(offer: &Offer) -> Result<RunSettings, CommandError> {
    if let Some(unknown) = offer.unknown() {
        return Err(CommandError::refused(format!(
            "pagetide {} hands over '{unknown}', which this program (pagetide {}) does not know",
            offer.program,
            env!("CARGO_PKG_VERSION")
        )));
    }
    let given = from_text(Path::new("of the running daemon"), &offer.settings);
    let given = given.map_err(CommandError::refused)?;
    let settings = RunSettings::merge(given, Default::default());
    run::start_log(&settings)?;
    check_host()?;
    host::examine(&settings)?;
    Ok(settings)
}

fn take_over(
    channel: &Channel,
    settings: &RunSettings,
    go: &Go,
    parts: Result<Parts, HandoverError>,
    hurry: Hurry,
) -> Result<(), CommandError> {
    let parts = match parts {
        Ok(parts) => parts,
        Err(error) => return refuse(channel, CommandError::failed(error)),
    };
    // What is waited for is given up early enough to tell the old program, which goes on then.
    let serving_wait = Duration::from_millis(settings.upgrade_serving_ms.into());
    let owed = Owed::before(Instant::now() + serving_wait * WAIT_SHARE.0 / WAIT_SHARE.1);
    let mut started = match Started::from_parts(settings, parts, owed) {
        Ok(started) => started,
        Err(error) => return refuse(channel, error),
    };
    let pause_us = now_ns().saturating_sub(go.stopped_ns) / 1000;
    match channel.send(&Message::Serving, &[], SEND_WAIT) {
        // Then nobody is there to decide, which the wait finds too.
        Ok(()) | Err(HandoverError::HungUp) => {}
        Err(error) => return Err(CommandError::failed(error)),
    }
    await_commit(channel)?;
    started.admit();
    drop(hurry);
    let own = own_program();
    let report = UpgradeReport {
        successor: Some(std::process::id()),
        program: Some(own.display().to_string()),
        pause_us: Some(pause_us),
        ..UpgradeReport::none().ended(UpgradeState::Done, None)
    };
    tracing::info!(pause_us, "taken over");
    started.serve(settings, &own, report)
}

/// Waits for the decision of the old program: it commits, or it kills this process. If it has died, nobody else
/// goes on, so this process does.
fn await_commit(channel: &Channel) -> Result<(), CommandError> {
    loop {
        match channel.receive(COMMIT_LOOK) {
            Ok((Message::Commit, _)) => return Ok(()),
            Ok((other, _)) => return Err(CommandError::failed(other.instead_of("commit"))),
            Err(HandoverError::TimedOut { .. }) => {
                tracing::warn!("the old program has not decided yet");
            }
            Err(HandoverError::HungUp) => {
                tracing::warn!("the old program has ended without a word; this one goes on");
                return Ok(());
            }
            Err(error) => return Err(CommandError::failed(error)),
        }
    }
}

/// Tells the old program why this one cannot take over.
fn refuse(channel: &Channel, error: CommandError) -> Result<(), CommandError> {
    let refused = Message::Refused(Refused {
        reason: error.to_string(),
    });
    if let Err(unheard) = channel.send(&refused, &[], SEND_WAIT) {
        tracing::debug!(%unheard, "the old program does not hear the refusal");
    }
    Err(error)
}
