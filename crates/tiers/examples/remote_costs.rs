// SPDX-License-Identifier: Apache-2.0
//! What the remote tier costs with a server of your choice, printed.
//!
//! ```sh
//! cargo run --release -p pagetide-tiers --example remote_costs redis://HOST:6379
//! ```

use std::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use pagetide_random::SplitMix64;
use pagetide_tiers::remote::{RemoteConfig, RemoteTier, RemoteUrl, TimeBounds, WhenGone};
use pagetide_tiers::{
    Batch, ExtentName, ExtentNo, Latency, Place, ReadDone, SlowTier, Standing, TierError, TierKind,
    Version, VmId, WriteDone,
};

/// 256 MiB of pages that do not compress.
const EXTENTS: u64 = 128;
const EXTENT_PAGES: usize = 512;
/// A page with its tag.
const SEALED_BYTES: usize = 4112;
const READS: usize = 50_000;

fn main() -> Result<(), Box<dyn Error>> {
    let url = std::env::args()
        .nth(1)
        .ok_or("name the server: redis://HOST:6379")?;
    let places = written(&url)?;
    for at_a_time in [1, 8, 128] {
        let tier = start(&url)?;
        let begin = Instant::now();
        read(&tier, &places, at_a_time, READS)?;
        report(
            &format!("{at_a_time} reads at a time"),
            READS,
            begin,
            tier.figures().read_latency,
        );
    }
    let tier = start(&url)?;
    let begin = Instant::now();
    let stopped = AtomicBool::new(false);
    std::thread::scope(|scope| -> Result<(), Box<dyn Error>> {
        let writer = scope.spawn(|| {
            let mut version = EXTENTS;
            while !stopped.load(Ordering::Relaxed) {
                version += 1;
                let places = write(&tier, version)?;
                tier.forget(&places);
            }
            Ok::<_, TierError>(())
        });
        let reading = read(&tier, &places, 1, READS);
        stopped.store(true, Ordering::Relaxed);
        reading?;
        Ok(writer.join().map_err(|_| "the writer panicked")??)
    })?;
    report(
        "1 read at a time beside writes",
        READS,
        begin,
        tier.figures().read_latency,
    );
    tier.forget(&places);
    Ok(())
}

fn start(url: &str) -> Result<RemoteTier, Box<dyn Error>> {
    let tier = RemoteTier::start(RemoteConfig {
        url: RemoteUrl::parse(url)?,
        limit_bytes: u64::MAX,
        when_gone: WhenGone::Lost,
        bounds: TimeBounds::default(),
    })?;
    match tier.first_contact(Duration::from_secs(10)).1.standing {
        Standing::Working => Ok(tier),
        other => Err(format!("the tier does not work: {other:?}").into()),
    }
}

fn report(what: &str, count: usize, begin: Instant, latency: Latency) {
    let Latency {
        p50_us,
        p99_us,
        max_us,
        ..
    } = latency;
    let us = begin.elapsed().as_secs_f64() * 1e6 / count as f64;
    eprintln!("{what}: p50 {p50_us} us, p99 {p99_us} us, at most {max_us} us; {us:.1} us each");
}

/// Writes all extents, one at a time.
fn written(url: &str) -> Result<Vec<Place>, Box<dyn Error>> {
    let tier = start(url)?;
    let begin = Instant::now();
    let mut places = Vec::new();
    for version in 1..=EXTENTS {
        places.extend(write(&tier, version)?);
    }
    let latency = tier.figures().write_latency;
    report(
        "1 batch of 512 pages at a time, a page",
        places.len(),
        begin,
        latency,
    );
    Ok(places)
}

fn write(tier: &RemoteTier, version: u64) -> Result<Vec<Place>, TierError> {
    let extent = ExtentName {
        vm: VmId(1),
        number: ExtentNo(1),
        version: Version(version),
    };
    let room = tier.make_room(extent.vm, &[SEALED_BYTES; EXTENT_PAGES])?[0];
    let mut batch = Batch::new(extent, room);
    let mut random = SplitMix64::new(version);
    let mut page = vec![0; SEALED_BYTES];
    let mut places = Vec::new();
    for _ in 0..EXTENT_PAGES {
        for word in page.chunks_exact_mut(8) {
            word.copy_from_slice(&random.next_u64().to_le_bytes());
        }
        places.extend(batch.push(&page));
    }
    let (tell, told) = mpsc::channel();
    let done = WriteDone::new(TierKind::Remote, move |result| {
        if tell.send(result).is_err() {
            eprintln!("nobody waits for a batch");
        }
    });
    tier.write(batch, done);
    let ended = |_| TierError::Gone {
        kind: TierKind::Remote,
        reason: "no answer".to_owned(),
    };
    told.recv().map_err(ended)?.map(|()| places)
}

/// Reads random pages, so many at a time.
fn read(
    tier: &RemoteTier,
    places: &[Place],
    at_a_time: usize,
    count: usize,
) -> Result<(), Box<dyn Error>> {
    let mut random = SplitMix64::new(7);
    let (tell, told) = mpsc::channel();
    let mut next = |tell: mpsc::Sender<_>| {
        let done = ReadDone::new(TierKind::Remote, move |result| {
            if tell.send(result).is_err() {
                eprintln!("nobody waits for a page");
            }
        });
        tier.read(places[random.index(places.len())], done);
    };
    for _ in 0..at_a_time {
        next(tell.clone());
    }
    for done in 0..count {
        let page: Vec<u8> = told.recv()??;
        if page.len() != SEALED_BYTES {
            return Err("a page of another length".into());
        }
        if done + at_a_time < count {
            next(tell.clone());
        }
    }
    Ok(())
}
