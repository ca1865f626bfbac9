// SPDX-License-Identifier: Apache-2.0
//! State shared by all parts of a soak: its options, its errors, and the board of counters.

use crate::guest::GuestError;
use crate::image::ImageError;
use crate::product::ProductError;
use crate::programs::ProgramError;
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Name of the guest's VM.
pub(super) const NAME: &str = "soak";

/// Longest silence of the guest before the soak is aborted.
pub(super) const SILENCE_MAX: Duration = Duration::from_secs(120);

/// Between two lines of progress.
pub(super) const LINE_EVERY: Duration = Duration::from_secs(10);

/// The soak could not be completed.
#[derive(Debug, thiserror::Error)]
pub enum SoakError {
    /// This machine lacks something that a soak needs: it is skipped.
    #[error("{0}")]
    Missing(String),
    /// The guest's image could not be made.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A program for the guest is missing.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// The guest failed.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// The daemon failed.
    #[error("{source}\nthe end of the daemon's log:\n{log}")]
    Product {
        /// How.
        source: ProductError,
        /// End of its log.
        log: String,
    },
    /// A file could not be used.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A thread panicked.
    #[error("the thread of the {0} panicked")]
    Panicked(&'static str),
}

/// Where the guest's cold memory goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tiers {
    /// Into memory, as is the default.
    InMemory,
    /// Into memory, to a disk and to another host, which are taken away and given back.
    All,
}

/// How a soak is to run.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Minutes of deaths and calls, not counting boot and last verification.
    pub minutes: f64,
    /// Seed of everything random; not 0.
    pub seed: u64,
    /// Part of the names of the attacks that other tenants choose from; an empty one selects all.
    pub attacks: String,
    /// Where the guest's cold memory goes.
    pub tiers: Tiers,
}

/// State that the threads of a soak share.
#[derive(Debug, Default)]
pub(super) struct Board {
    pub(super) over: AtomicBool,
    /// A tier has not had a page yet, or has not failed in each way.
    pub(super) tier_is_awaited: AtomicBool,
    pub(super) kills: AtomicU64,
    pub(super) own_deaths: AtomicU64,
    pub(super) api_calls: AtomicU64,
    pub(super) api_surprises: AtomicU64,
    pub(super) attaches: AtomicU64,
    pub(super) attacks: AtomicU64,
    pub(super) attacks_by_name: Mutex<BTreeMap<String, u64>>,
    pub(super) failed_requests: AtomicU64,
    pub(super) longest_recovery_ms: AtomicU64,
}

impl Board {
    pub(super) fn is_over(&self) -> bool {
        self.over.load(Relaxed)
    }

    pub(super) fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Relaxed);
    }

    pub(super) fn count_attack(&self, name: &str) {
        Self::count(&self.attacks);
        let names = self.attacks_by_name.lock();
        *names
            .unwrap_or_else(PoisonError::into_inner)
            .entry(name.to_owned())
            .or_default() += 1;
    }

    /// Sleeps, but not beyond the end.
    pub(super) fn rest(&self, time: Duration) {
        const MOMENT: Duration = Duration::from_millis(50);
        let end = Instant::now() + time;
        while !self.is_over() && Instant::now() < end {
            thread::sleep(MOMENT.min(end.saturating_duration_since(Instant::now())));
        }
    }
}

pub(super) fn say(line: &str) {
    eprintln!("soak: {line}");
}

pub(super) fn file_error(path: &Path, source: io::Error) -> SoakError {
    SoakError::File {
        path: path.to_owned(),
        source,
    }
}
