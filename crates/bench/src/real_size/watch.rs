// SPDX-License-Identifier: Apache-2.0
//! A thread that polls the VM all the time, and the time of the answers.

use crate::daemon::{Daemon, VM};
use crate::harness::rounds::progress;
use hyper::Method;
use pagetide_daemon::client::{Client, ClientError, vm_path};
use pagetide_sys::cpu::{self, Urgency};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

/// Between an answer and the next request.
const PAUSE: Duration = Duration::from_millis(2);

/// The results of one phase.
#[derive(Clone, Copy, PartialEq, Default, Debug)]
pub(super) struct Seen {
    /// The longest answer.
    pub longest: Duration,
    /// Number of answers.
    pub answers: u64,
}

#[derive(Default)]
struct Shared {
    phase: Mutex<&'static str>,
    ends: AtomicBool,
}

/// A polling thread.
pub(super) struct Watch {
    shared: Arc<Shared>,
    thread: JoinHandle<Result<BTreeMap<&'static str, Seen>, String>>,
}

impl Watch {
    /// Starts to poll `daemon`.
    pub(super) fn start(daemon: &Daemon) -> Self {
        let shared = Arc::new(Shared::default());
        let (client, told) = (daemon.client(), Arc::clone(&shared));
        Self {
            shared,
            thread: std::thread::spawn(move || watch(&client, &told)),
        }
    }

    /// Starts the phase `name`.
    pub(super) fn phase(&self, name: &'static str) {
        *self
            .shared
            .phase
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = name;
    }

    /// Ends; returns the results of each phase.
    pub(super) fn end(self) -> Result<BTreeMap<&'static str, Seen>, String> {
        self.shared.ends.store(true, Relaxed);
        self.thread
            .join()
            .map_err(|_| "the thread that asks has panicked".to_owned())?
    }
}

fn watch(client: &Client, shared: &Shared) -> Result<BTreeMap<&'static str, Seen>, String> {
    // The daemon's time is measured, not that of a client without a CPU.
    if let Err(error) = cpu::set_urgency(Urgency::Eager) {
        progress(
            "real-size",
            format_args!("polls may wait for a CPU, too: {error}"),
        );
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| error.to_string())?;
    let mut seen: BTreeMap<&'static str, Seen> = BTreeMap::new();
    while !shared.ends.load(Relaxed) {
        let phase = *shared.phase.lock().unwrap_or_else(PoisonError::into_inner);
        let begun = Instant::now();
        let path = vm_path(VM);
        match runtime.block_on(client.ask::<serde_json::Value>(Method::GET, &path)) {
            // Before the attach there is no VM, and that is an answer, too.
            Ok(_) | Err(ClientError::Refused(_)) => {}
            Err(error) => return Err(error.to_string()),
        }
        let of_phase = seen.entry(phase).or_default();
        of_phase.longest = of_phase.longest.max(begun.elapsed());
        of_phase.answers += 1;
        std::thread::sleep(PAUSE);
    }
    Ok(seen)
}
