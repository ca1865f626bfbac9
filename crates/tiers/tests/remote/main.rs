// SPDX-License-Identifier: Apache-2.0
//! The remote tier against servers of Debian, and against one that misbehaves.

mod cluster;
mod fake;
mod hostile;
mod server;
mod standing;
mod tls;

use std::sync::mpsc;
use std::time::{Duration, Instant};

use pagetide_random::SplitMix64;
use pagetide_tiers::remote::{RemoteConfig, RemoteTier, RemoteUrl, TimeBounds, WhenGone};
use pagetide_tiers::{
    Batch, ExtentName, ExtentNo, Place, ReadDone, SlowTier, Standing, TierError, TierKind, Version,
    VmId, WriteDone,
};

/// After this a test is stuck.
const STUCK: Duration = Duration::from_secs(60);

type Answer<T> = mpsc::Receiver<Result<T, TierError>>;

/// Waits for a condition of another thread or program.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_so() {
        assert!(begin.elapsed() < STUCK, "{what} never came to be");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A tier with generous bounds.
fn config(url: &str) -> RemoteConfig {
    RemoteConfig {
        url: RemoteUrl::parse(url).unwrap(),
        limit_bytes: 1 << 30,
        when_gone: WhenGone::Wait,
        bounds: TimeBounds {
            connect: STUCK,
            read: STUCK,
            write: STUCK,
        },
    }
}

/// A tier that works.
fn working(config: RemoteConfig) -> RemoteTier {
    let tier = RemoteTier::start(config).unwrap();
    let (_, health) = tier.first_contact(STUCK);
    assert_eq!(health.standing, Standing::Working);
    tier
}

/// Why a tier is gone.
fn reason(tier: &RemoteTier) -> String {
    match tier.health().standing {
        Standing::Gone { reason } => reason,
        other => panic!("not gone: {other:?}"),
    }
}

fn extent(version: u64) -> ExtentName {
    ExtentName {
        vm: VmId(0xfeed),
        number: ExtentNo(1),
        version: Version(version),
    }
}

/// Something like sealed pages.
fn pages(seed: u64, count: usize) -> Vec<Vec<u8>> {
    let mut random = SplitMix64::new(seed);
    let mut page = || {
        let mut bytes = vec![0; 1 + random.index(4112)];
        bytes.fill_with(|| random.next_u64().to_le_bytes()[0]);
        bytes
    };
    (0..count).map(|_| page()).collect()
}

/// Begins to write pages as one extent.
fn begin_write(
    tier: &RemoteTier,
    extent: ExtentName,
    pages: &[Vec<u8>],
) -> (Vec<Place>, Answer<()>) {
    let lengths: Vec<_> = pages.iter().map(Vec::len).collect();
    let room = match tier.make_room(extent.vm, &lengths) {
        Ok(rooms) => rooms[0],
        Err(error) => {
            let (tell, answer) = mpsc::channel();
            tell.send(Err(error)).unwrap();
            return (Vec::new(), answer);
        }
    };
    let mut batch = Batch::new(extent, room);
    let places = pages.iter().map(|page| batch.push(page).unwrap()).collect();
    let (tell, answer) = mpsc::channel();
    tier.write(
        batch,
        WriteDone::new(TierKind::Remote, move |result| tell.send(result).unwrap()),
    );
    (places, answer)
}

fn write(
    tier: &RemoteTier,
    extent: ExtentName,
    pages: &[Vec<u8>],
) -> Result<Vec<Place>, TierError> {
    let (places, answer) = begin_write(tier, extent, pages);
    answer.recv_timeout(STUCK).unwrap().map(|()| places)
}

fn begin_read(tier: &RemoteTier, place: Place) -> Answer<Vec<u8>> {
    let (tell, answer) = mpsc::channel();
    let done = ReadDone::new(TierKind::Remote, move |result| {
        // A test that has failed has dropped the other end.
        if tell.send(result).is_err() {
            eprintln!("nobody waits for this page any more");
        }
    });
    tier.read(place, done);
    answer
}

fn read(tier: &RemoteTier, place: Place) -> Result<Vec<u8>, TierError> {
    begin_read(tier, place).recv_timeout(STUCK).unwrap()
}

/// Reads all, at once.
fn read_all(tier: &RemoteTier, places: &[Place]) -> Vec<Result<Vec<u8>, TierError>> {
    let answers: Vec<_> = places
        .iter()
        .map(|&place| begin_read(tier, place))
        .collect();
    answers
        .iter()
        .map(|answer| answer.recv_timeout(STUCK).unwrap())
        .collect()
}

fn assert_pages(tier: &RemoteTier, places: &[Place], pages: &[Vec<u8>]) {
    for (read, page) in read_all(tier, places).iter().zip(pages) {
        assert_eq!(read.as_ref(), Ok(page));
    }
}

const NOT_THERE: TierError = TierError::NotThere(TierKind::Remote);

fn assert_not_there(tier: &RemoteTier, places: &[Place]) {
    for read in read_all(tier, places) {
        assert_eq!(read, Err(NOT_THERE));
    }
}
