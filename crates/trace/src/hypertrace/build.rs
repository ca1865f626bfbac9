// SPDX-License-Identifier: Apache-2.0
//! A hyper-trace from beginning to end into a file.

use serde::Serialize;

use super::HyperTrace;
use crate::event::EventKind;
use crate::stream::{BATCH_EVENTS, EventSink, EventSource};
use pagetide_access_log::TraceError;

/// Progress of a build.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Progress {
    /// Packets made.
    pub packets: u64,
    /// Approximate number of packets in total.
    pub packets_expected: Option<u64>,
}

/// The result of a build.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Built {
    /// Tenants.
    pub tenants: usize,
    /// Packets.
    pub packets: u64,
    /// Translation requests.
    pub requests: u64,
    /// Events of every kind, including requests.
    pub events: u64,
}

/// Writes all of `trace` to `sink` and completes it; `progress` is called after each batch.
///
/// # Errors
/// If a log or the sink fails; the file is then incomplete.
pub fn build(
    trace: &mut HyperTrace,
    mut sink: Box<dyn EventSink + '_>,
    progress: &mut dyn FnMut(Progress),
) -> Result<Built, TraceError> {
    let mut built = Built {
        tenants: trace.tenants(),
        ..Built::default()
    };
    let mut batch = Vec::with_capacity(BATCH_EVENTS);
    loop {
        batch.clear();
        let events = trace.next_batch(&mut batch)?;
        if events == 0 {
            break;
        }
        sink.write(&batch)?;
        let requests = batch.iter().filter(|e| e.kind == EventKind::Translate);
        built.requests += requests.count() as u64;
        built.events += events as u64;
        progress(Progress {
            packets: trace.packets_made(),
            packets_expected: trace.packets_expected(),
        });
    }
    sink.finish()?;
    built.packets = trace.packets_made();
    Ok(built)
}
