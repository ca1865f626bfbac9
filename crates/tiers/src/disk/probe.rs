// SPDX-License-Identifier: Apache-2.0
//! Probes: while a tier does not work, a block is written now and then and read back. Enough of them in a row that
//! are done in time bring the tier back ([`crate::health`]).

use super::engine::Engine;
use super::io::{Io, Tag};
use super::request::Start;
use crate::health::Symptom;
use pagetide_sys::file_ring::{Buffer, Completed, Operation, Transfer};
use std::time::Instant;

/// Where probes write: behind the header, in the segment that nobody gets.
const PROBE_OFFSET: u64 = 4096;
const PROBE_BYTES: usize = 4096;

impl<I: Io> Engine<I> {
    pub(super) fn probe_if_due(&mut self, now: Instant) {
        let due = self.shared.probe_due().is_some_and(|due| due <= now);
        if !due || self.probe.is_some() {
            return;
        }
        self.probes = self.probes.wrapping_add(1);
        let mut buffer = Buffer::zeroed(PROBE_BYTES);
        buffer.fill(self.probes);
        self.probe = Some((now, self.probes));
        self.start_probe(Operation::Write, buffer, Tag::ProbeWrite, now);
    }

    fn start_probe(&mut self, operation: Operation, buffer: Buffer, tag: Tag, now: Instant) {
        let probe = Transfer {
            operation,
            offset: PROBE_OFFSET,
            buffer,
            part: 0..PROBE_BYTES,
            tag,
        };
        if let Start::NoEntry(_) = self.start(probe, now) {
            let busy = "all entries of the ring are in use".to_owned();
            self.end_probe(Symptom::ProbeFailed(busy), now);
        }
    }

    pub(super) fn probe_went_on(&mut self, completed: Completed<Tag>, now: Instant) {
        let Some((began, wrote)) = self.probe else {
            return;
        };
        let transfer = completed.transfer;
        let failed = match completed.result {
            Err(error) => Some(error.to_string()),
            Ok(moved) if moved < PROBE_BYTES => Some(format!("{moved} bytes of a probe moved")),
            Ok(_) if now - began >= self.bounds.write => Some("it is still slow".to_owned()),
            Ok(_) if transfer.buffer.iter().any(|byte| *byte != wrote) => {
                Some("it returned other bytes than were written".to_owned())
            }
            Ok(_) => None,
        };
        match (failed, transfer.tag) {
            (Some(reason), _) => self.end_probe(Symptom::ProbeFailed(reason), now),
            (None, Tag::ProbeWrite) => {
                let buffer = Buffer::zeroed(PROBE_BYTES);
                self.start_probe(Operation::Read, buffer, Tag::ProbeRead, now);
            }
            (None, _) => self.end_probe(Symptom::ProbeDone, now),
        }
    }

    fn end_probe(&mut self, symptom: Symptom, now: Instant) {
        self.probe = None;
        self.shared.note(symptom, now);
    }
}
