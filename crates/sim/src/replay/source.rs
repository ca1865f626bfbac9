// SPDX-License-Identifier: Apache-2.0
//! Streams of accesses: a guest's requests to its disks turned into DMA, and the accesses of its CPUs.

use super::{
    AccessStream, Actor, DirectPool, DiskRequest, GuestPageCache, PageCacheCounts, ReplayAccess,
    ReplayError,
};
use pagetide_addr::{Access, SectionNo};
use std::{
    collections::VecDeque,
    iter::Peekable,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

/// CPUs touch their working set this often: at least once between two scans of the daemon, so that each
/// scan sees it in use.
const WORKING_SET_ROUND: Duration = Duration::from_secs(4);

/// Where DMA of a guest's disks goes.
#[derive(Debug)]
pub enum DiskPath {
    /// To its page cache.
    Cached(Box<GuestPageCache>),
    /// To buffers of its programs.
    Direct(DirectPool),
}

/// A request with its time since the start of the replay.
pub type TimedRequest = (Duration, DiskRequest);

/// Accesses that follow from requests to the disks of one guest. Pages dirty at the end stay so.
pub struct DiskStream<I> {
    requests: I,
    path: DiskPath,
    next: Option<TimedRequest>,
    ready: VecDeque<ReplayAccess>,
    made: Vec<ReplayAccess>,
    file: PathBuf,
    /// Number of the last request.
    number: u64,
    counts: Arc<Mutex<PageCacheCounts>>,
}

impl<I> DiskStream<I>
where
    I: Iterator<Item = Result<TimedRequest, ReplayError>> + Send,
{
    /// The accesses of `requests`, whose times never run backwards. `file`, their source, is for messages.
    pub fn new(file: &Path, requests: I, path: DiskPath) -> Self {
        Self {
            requests,
            path,
            next: None,
            ready: VecDeque::new(),
            made: Vec::new(),
            file: file.to_owned(),
            number: 0,
            counts: Arc::default(),
        }
    }

    /// Where to find the page cache's counters when the stream has ended.
    #[must_use]
    pub fn counts(&self) -> Arc<Mutex<PageCacheCounts>> {
        Arc::clone(&self.counts)
    }

    fn ended(&self) {
        if let DiskPath::Cached(cache) = &self.path {
            *self.counts.lock().unwrap_or_else(PoisonError::into_inner) = cache.counts();
        }
    }
}

impl<I> AccessStream for DiskStream<I>
where
    I: Iterator<Item = Result<TimedRequest, ReplayError>> + Send,
{
    fn next(&mut self) -> Result<Option<ReplayAccess>, ReplayError> {
        loop {
            if let Some(access) = self.ready.pop_front() {
                return Ok(Some(access));
            }
            if self.next.is_none() {
                self.next = self.requests.next().transpose()?;
            }
            let Some((at, request)) = self.next else {
                self.ended();
                return Ok(None);
            };
            self.number = request.number;
            let file = &self.file;
            match &mut self.path {
                DiskPath::Cached(cache) => match cache.due().filter(|due| *due <= at) {
                    Some(due) => cache.passed(due, &mut self.made),
                    None => {
                        self.next = None;
                        cache
                            .request(at, &request, &mut self.made)
                            .map_err(|error| error.of_file(file))?;
                    }
                },
                DiskPath::Direct(pool) => {
                    self.next = None;
                    pool.request(at, &request, &mut self.made)
                        .map_err(|error| error.of_file(file))?;
                }
            }
            self.ready.extend(self.made.drain(..));
        }
    }

    fn whence(&self) -> String {
        format!("{}, record {}", self.file.display(), self.number)
    }
}

/// A stream merged with accesses that continue as long as it lasts.
pub struct Beside<S, I: Iterator> {
    stream: S,
    next: Option<ReplayAccess>,
    others: Peekable<I>,
}

impl<S, I> Beside<S, I>
where
    S: AccessStream,
    I: Iterator<Item = ReplayAccess> + Send,
{
    /// `stream` merged with `others`, whose times never run backwards.
    pub fn new(stream: S, others: I) -> Self {
        Self {
            stream,
            next: None,
            others: others.peekable(),
        }
    }
}

impl<S, I> AccessStream for Beside<S, I>
where
    S: AccessStream,
    I: Iterator<Item = ReplayAccess> + Send,
{
    fn next(&mut self) -> Result<Option<ReplayAccess>, ReplayError> {
        if self.next.is_none() {
            self.next = self.stream.next()?;
        }
        let Some(at) = self.next.map(|next| next.at) else {
            return Ok(None);
        };
        let other = self.others.next_if(|other| other.at <= at);
        Ok(other.or_else(|| self.next.take()))
    }

    fn whence(&self) -> String {
        self.stream.whence()
    }
}

/// Accesses of CPUs that keep `sections` in use for ever.
pub fn working_set(sections: Vec<SectionNo>) -> impl Iterator<Item = ReplayAccess> + Send {
    let rounds = if sections.is_empty() { 0 } else { u32::MAX };
    (0..rounds).flat_map(move |round| {
        let touch = move |section| ReplayAccess {
            at: WORKING_SET_ROUND * round,
            actor: Actor::Cpu,
            section,
            access: Access::Write,
            bytes: 0,
        };
        sections.clone().into_iter().map(touch)
    })
}

/// The first of `sections`, a share of them in thousandths, spread evenly.
#[must_use]
pub fn spread(sections: &[SectionNo], permille: u64) -> Vec<SectionNo> {
    let permille = permille.min(1000);
    let chosen = |i: usize| (i as u64 + 1) * permille / 1000 > i as u64 * permille / 1000;
    let numbered = sections.iter().enumerate();
    numbered
        .filter(|(i, _)| chosen(*i))
        .map(|(_, section)| *section)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::PageCacheParams;
    use pagetide_addr::DeviceId;

    fn drain(mut stream: impl AccessStream) -> Vec<ReplayAccess> {
        std::iter::from_fn(|| stream.next().unwrap()).collect()
    }

    fn request(at_s: u64, offset_bytes: u64, access: Access) -> Result<TimedRequest, ReplayError> {
        let request = DiskRequest {
            number: 0,
            disk: DeviceId(1),
            offset_bytes,
            len_bytes: 4096,
            access,
        };
        Ok((Duration::from_secs(at_s), request))
    }

    #[test]
    fn dirty_page_is_written_back_at_the_tick_after_it_expired_and_before_later_requests() {
        let params = PageCacheParams::at_the_end_of(4 << 20, 2 << 20, 2 << 20);
        let cache = GuestPageCache::new(params).unwrap();
        let requests = [
            request(2, 0, Access::Write),
            request(36, 8192, Access::Read),
        ];
        let stream = DiskStream::new(
            Path::new("trace"),
            requests.into_iter(),
            DiskPath::Cached(Box::new(cache)),
        );
        let counts = stream.counts();
        let disk = Actor::Device(DeviceId(1), crate::replay::Service::Block);
        let seen: Vec<_> = drain(stream)
            .iter()
            .map(|a| (a.at.as_secs(), a.actor, a.access))
            .collect();
        assert_eq!(
            seen,
            [
                (2, Actor::Cpu, Access::Write),
                (35, disk, Access::Read),
                (36, disk, Access::Write)
            ]
        );
        let counts = *counts.lock().unwrap();
        assert_eq!((counts.written_back, counts.read_misses), (1, 1));
    }

    #[test]
    fn working_set_is_touched_every_round_while_the_stream_lasts() {
        let touch = |at_s| ReplayAccess {
            at: Duration::from_secs(at_s),
            actor: Actor::Cpu,
            section: SectionNo(9),
            access: Access::Read,
            bytes: 1,
        };
        let set = vec![SectionNo(1), SectionNo(2)];
        let stream = Beside::new([touch(3), touch(4)].into_iter(), working_set(set));
        let seen: Vec<_> = drain(stream)
            .iter()
            .map(|a| (a.at.as_secs(), a.section.0))
            .collect();
        assert_eq!(seen, [(0, 1), (0, 2), (3, 9), (4, 1), (4, 2), (4, 9)]);
        let none = Beside::new([touch(3)].into_iter(), working_set(vec![]));
        assert_eq!(drain(none).len(), 1);
    }

    #[test]
    fn spread_takes_its_share_from_everywhere() {
        let sections: Vec<_> = (0..1000).map(SectionNo).collect();
        for (permille, len) in [(0, 0), (1, 1), (250, 250), (999, 999), (1000, 1000)] {
            assert_eq!(spread(&sections, permille).len(), len);
        }
        let quarter = spread(&sections, 250);
        assert!(quarter.windows(2).all(|pair| pair[1].0 - pair[0].0 == 4));
    }
}
