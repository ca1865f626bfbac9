// SPDX-License-Identifier: Apache-2.0
//! Reader of `…iotlb_trace.bin`: reads whole batches of records at once and decodes them in place, so that
//! the cost is that of the copy from the page cache.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::{RECORD_BYTES, complaint, event_of, is_sound};
use crate::event::Event;
use crate::stream::{BATCH_EVENTS, EventSource};
use pagetide_access_log::TraceError;

/// Reads translation requests from the authors' binary trace.
///
/// `next` and `slpte` are ignored. The reader needs one batch of memory,
/// whatever the length of the file.
#[derive(Debug)]
pub struct HypersioReader<R = File> {
    path: PathBuf,
    input: R,
    /// One batch of records.
    buffer: Box<[u8]>,
    /// Records returned so far.
    done: u64,
    /// The error after the events returned last.
    broken: Option<TraceError>,
    ended: bool,
}

impl HypersioReader {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(path: &Path) -> Result<Self, TraceError> {
        let file = File::open(path).map_err(|source| TraceError::Io {
            path: path.to_owned(),
            source,
        })?;
        Ok(Self::new(path, file))
    }
}

impl<R: Read> HypersioReader<R> {
    /// Reads from `input`; errors name `path`.
    pub fn new(path: &Path, input: R) -> Self {
        Self {
            path: path.to_owned(),
            input,
            buffer: vec![0; BATCH_EVENTS * RECORD_BYTES].into_boxed_slice(),
            done: 0,
            broken: None,
            ended: false,
        }
    }

    /// Fills the buffer as far as the file goes; returns the bytes read.
    fn fill(&mut self) -> Result<usize, TraceError> {
        let mut filled = 0;
        while let Some(rest) = self
            .buffer
            .get_mut(filled..)
            .filter(|rest| !rest.is_empty())
        {
            match self.input.read(rest) {
                Ok(0) => break,
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(TraceError::Io {
                        path: self.path.clone(),
                        source,
                    });
                }
            }
        }
        Ok(filled)
    }

    fn record_error(&self, record: u64, reason: String) -> TraceError {
        TraceError::Record {
            path: self.path.clone(),
            record,
            reason,
        }
    }

    /// Decodes the first `filled` bytes of the buffer; notes where they break off.
    ///
    /// Two passes, one that only checks and one that only builds, are faster than one that may stop at each
    /// record.
    fn decode_into(&mut self, filled: usize, batch: &mut Vec<Event>) {
        let (records, rest) = self.buffer[..filled].as_chunks::<RECORD_BYTES>();
        let unsound = records.iter().position(|record| !is_sound(record));
        let good = &records[..unsound.unwrap_or(records.len())];
        batch.extend(good.iter().map(event_of));
        let reason = match records.get(good.len()) {
            Some(record) => Some(complaint(record)),
            None if rest.is_empty() => None,
            None => Some(format!(
                "the file ends after {} of {RECORD_BYTES} bytes",
                rest.len()
            )),
        };
        self.done += good.len() as u64;
        self.broken = reason.map(|reason| self.record_error(self.done, reason));
    }
}

impl<R: Read + Send> EventSource for HypersioReader<R> {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        if let Some(error) = self.broken.take() {
            self.ended = true;
            return Err(error);
        }
        if self.ended {
            return Ok(0);
        }
        let filled = self.fill().inspect_err(|_| self.ended = true)?;
        let before = batch.len();
        self.decode_into(filled, batch);
        let count = batch.len() - before;
        match self.broken.take_if(|_| count == 0) {
            Some(error) => {
                self.ended = true;
                Err(error)
            }
            None => Ok(count),
        }
    }
}
