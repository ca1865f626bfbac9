// SPDX-License-Identifier: Apache-2.0
//! [`LogStream`]: the accesses of an access log, section by section.

use super::{
    AccessStream, Actor, ReplayAccess, ReplayError, TraceOptions,
    traces::{check_span, stretched},
};
use pagetide_access_log::{AccessLog, AccessRecord};
use pagetide_addr::{DomainId, SectionNo};
use std::collections::{BTreeSet, VecDeque};

/// Most address spaces of a log that an error names: a file may have any number.
const SPACES_NAMED: usize = 8;

/// The accesses of an access log in one address space.
pub(super) struct LogStream {
    log: AccessLog,
    vm: String,
    /// The space; by default the first record's.
    pub(super) space: Option<DomainId>,
    /// Some of the other spaces.
    others: BTreeSet<DomainId>,
    memory_bytes: u64,
    section_bytes: u64,
    time_scale: f64,
    first_ns: Option<u64>,
    /// Read so far.
    records: u64,
    /// Those of them that are in the space.
    pub(super) replayed: u64,
    ready: VecDeque<ReplayAccess>,
}

impl LogStream {
    pub(super) fn new(log: AccessLog, memory_bytes: u64, options: &TraceOptions) -> Self {
        Self {
            vm: log.meta().vm.clone(),
            log,
            space: options.space,
            others: BTreeSet::new(),
            memory_bytes,
            section_bytes: options.section_bytes,
            time_scale: options.time_scale,
            first_ns: None,
            records: 0,
            replayed: 0,
            ready: VecDeque::new(),
        }
    }

    /// Whether the records read are one VM's memory, and of the selected space.
    pub(super) fn check_spaces(&self, asked: &TraceOptions) -> Result<(), ReplayError> {
        let is_there = self.replayed > 0;
        if asked.space.map_or(self.others.is_empty(), |_| is_there) {
            return Ok(());
        }
        let first = self.space.filter(|_| is_there);
        let spaces: BTreeSet<_> = self.others.iter().copied().chain(first).collect();
        Err(ReplayError::Space {
            vm: self.vm.clone(),
            asked: asked.space,
            spaces: spaces.into_iter().collect(),
            named_max: SPACES_NAMED,
        })
    }

    /// One access for each section that a record touches, if it is in the space.
    fn split(&mut self, record: &AccessRecord) -> Result<(), ReplayError> {
        let number = self.records;
        self.records += 1;
        if *self.space.get_or_insert(record.space) != record.space {
            // One more than are named shows that there are more.
            if self.others.len() <= SPACES_NAMED {
                self.others.insert(record.space);
            }
            return Ok(());
        }
        self.replayed += 1;
        let first = *self.first_ns.get_or_insert(record.time_ns);
        let at = stretched(record.time_ns.saturating_sub(first), self.time_scale);
        check_span(at, || format!("record {number} of the log of {}", self.vm))?;
        let end = record.address.checked_add(record.len_bytes.into());
        let Some(end) = end.filter(|end| *end <= self.memory_bytes) else {
            return Err(ReplayError::Address {
                vm: self.vm.clone(),
                record: number,
                address: record.address,
                len_bytes: record.len_bytes.into(),
                memory_bytes: self.memory_bytes,
            });
        };
        let mut from = record.address;
        while from < end {
            let section = from / self.section_bytes;
            let to = end.min((section + 1) * self.section_bytes);
            self.ready.push_back(ReplayAccess {
                at,
                actor: Actor::Device(record.device, record.service),
                section: SectionNo(section),
                access: record.access,
                bytes: to - from,
            });
            from = to;
        }
        Ok(())
    }
}

impl AccessStream for LogStream {
    fn next(&mut self) -> Result<Option<ReplayAccess>, ReplayError> {
        loop {
            if let Some(access) = self.ready.pop_front() {
                return Ok(Some(access));
            }
            match self.log.next() {
                Some(record) => self.split(&record?)?,
                None => return Ok(None),
            }
        }
    }

    fn whence(&self) -> String {
        let record = self.records.saturating_sub(1);
        format!("log of {}, record {record}", self.vm)
    }
}
