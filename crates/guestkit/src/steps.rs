// SPDX-License-Identifier: Apache-2.0
//! The steps that tests of the product are made of, and the specs they share.
//!
//! A step that does not succeed panics with the last output of guest and daemon: the test fails.
//! Guests run one at a time, because they are emulated.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pagetide_guest::params::Params;
use pagetide_guest::wire::Progress;
use serde_json::Value;

use crate::guest::Guest;
use crate::product::Product;
use crate::qemu::{Disk, GuestSpec};
use crate::report::Report;
use crate::stage::{Skip, Stage};

/// Longest wait of a test for anything.
pub const PATIENCE: Duration = Duration::from_secs(400);
/// Disk of [`with_disk`].
pub const DISK_BYTES: u64 = 128 << 20;
/// Name of the VM in all steps.
pub const VM: &str = "vm";

static TURN: Mutex<()> = Mutex::new(());

/// A stage, and the turn to use it: guests run one at a time.
pub type Turn = (MutexGuard<'static, ()>, Stage);

/// The stage that `set` sets, or `None` after printing why not.
#[must_use]
pub fn take_turn(set: impl FnOnce() -> Result<Stage, Skip>) -> Option<Turn> {
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    match set() {
        Ok(stage) => Some((turn, stage)),
        Err(Skip(reason)) => {
            eprintln!("SKIPPED: {reason}");
            None
        }
    }
}

/// A guest that works on memory only.
#[must_use]
pub fn small() -> GuestSpec {
    let work = Params {
        mem_bytes: 96 << 20,
        pace_us: 2_000,
        ..Params::default()
    };
    GuestSpec {
        ram_bytes: 256 << 20,
        work,
        ..GuestSpec::default()
    }
}

/// A guest that works on memory and on a disk.
#[must_use]
pub fn with_disk(disk: Disk) -> GuestSpec {
    let work = Params {
        mem_bytes: 64 << 20,
        file_bytes: DISK_BYTES,
        ..small().work
    };
    GuestSpec {
        disk,
        work,
        ..small()
    }
}

/// A figure of a report.
///
/// # Panics
/// It is not there.
#[must_use]
pub fn number(report: &Value, name: &str) -> u64 {
    report[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no number {name} in {report}"))
}

/// Boots a guest and waits until it works.
///
/// # Panics
/// It does not.
#[must_use]
pub fn working_guest(stage: &mut Stage, spec: &GuestSpec) -> Guest {
    let mut guest = stage.boot(spec).expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    guest
}

/// Limits the attached guest to half of what is resident; returns the limit.
///
/// # Panics
/// The daemon refuses.
pub fn limit_to_half(stage: &Stage, guest: &Guest) -> u64 {
    let limit = guest.resident_bytes().expect("resident") / 2;
    stage.product.limit(VM, limit).expect("limit");
    limit
}

/// Attaches, limits to half of what is resident, and waits until it is so; returns the limit.
///
/// # Panics
/// It does not become so.
pub fn squeeze(stage: &Stage, guest: &Guest) -> u64 {
    stage.product.attach(guest.pid(), VM).expect("attach");
    squeeze_attached(stage, guest)
}

/// The same with a VM that is attached.
///
/// # Panics
/// It does not become so.
pub fn squeeze_attached(stage: &Stage, guest: &Guest) -> u64 {
    let limit = limit_to_half(stage, guest);
    let ceiling = Report::ceiling_bytes(limit);
    let below = || Ok(guest.resident_bytes().is_ok_and(|bytes| bytes <= ceiling));
    stage
        .until("resident below the limit", PATIENCE, below)
        .expect("squeezed");
    limit
}

/// Lets the guest work until it has compared this many more bytes, memory and disk together.
///
/// # Panics
/// It does not.
pub fn work(guest: &mut Guest, bytes: u64) {
    let verified = |p: &Progress| p.memory_bytes_verified + p.disk_bytes_verified;
    let goal = guest.progress().map_or(0, |p| verified(&p)) + bytes;
    guest
        .wait_for("more work", PATIENCE, |p| verified(p) >= goal)
        .expect("work goes on");
}

/// Detaches, and has the guest verify all and power off.
///
/// # Panics
/// An access past the leases was seen, the daemon fails, or the guest is unsound.
pub fn let_go(stage: &Stage, guest: &mut Guest) {
    let vm = stage.product.show(VM).expect("show");
    assert_eq!(number(&vm, "alias_faults"), 0, "{vm}");
    stage.product.detach(VM).expect("detach");
    sound_end(guest);
}

/// Has the guest verify all and power off.
///
/// # Panics
/// It finds an error, or does not end.
pub fn sound_end(guest: &mut Guest) {
    let last = guest.finish(PATIENCE).expect("a sound end");
    assert_eq!(
        (last.memory_errors, last.disk_errors),
        (0, 0),
        "{}",
        guest.log_tails()
    );
    assert_eq!(last.final_memory_bytes, last.memory_bytes);
    assert_eq!(last.final_disk_bytes, last.disk_bytes);
}

/// Runs a client that must be refused with exit status 2 and a sentence, which is returned.
///
/// # Panics
/// The client is not refused.
pub fn refused(product: &Product, words: &[&str]) -> String {
    let answer = product.client(words).expect("a client");
    assert_eq!(
        answer.status.code(),
        Some(2),
        "{words:?}: {}{}",
        answer.printed,
        answer.said
    );
    assert!(
        answer.said.trim().len() > 20,
        "{words:?} says only: {}",
        answer.said
    );
    eprintln!("{words:?}: {}", answer.said.trim());
    answer.said
}

/// Attempts an attach that must be refused with a sentence that contains `word`. The VM must be
/// unharmed and go on working.
///
/// # Panics
/// The attach is not refused like that, or the VM does not go on.
pub fn attach_refused(product: &Product, guest: &mut Guest, word: &str) {
    let said = refused(product, &["attach", "--pid", &guest.pid().to_string()]);
    assert!(said.contains(word), "no word of {word:?} in: {said}");
    work(guest, 32 << 20);
}
