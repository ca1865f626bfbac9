// SPDX-License-Identifier: Apache-2.0
//! Well-known programs that serve requests without a pause, each request timed and its answer checked: for
//! benches of guests whose host is short of memory.
//!
//! ```text
//!   guest, at first: ready
//!   host: prepare NAME     guest: done                               the data is made, and served from now on
//!   host: measure MS       guest: served REQUESTS NANOSECONDS TIME…  up to a thousand quantiles, in ns
//!   host: verify           guest: done                               all data is right
//!   any:                          failed WORDS
//! ```
//! | name | program | a request | data |
//! |---|---|---|---|
//! | `redis` | redis-server | 16 keys read, every fourth written | values of 1 KiB |
//! | `sqlite` | the shell of sqlite, kept open | 4 rows read, and one updated | rows of 4 KB |
//! | `files` | busybox' httpd | a file of 64 KiB fetched by HTTP | files in memory |
//! | `compile` | gcc's cc1 | a source compiled to assembler | sources, and what a build has left behind |
//!
//! Requests want the first [`USED_PERMILLE`] of the data, which was made first, and so lies together. The rest is
//! what a service keeps and nobody asks for.

mod compile;
mod files;
mod redis;
mod sqlite;

use crate::pattern;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Data of each service. An emulated guest makes it within a minute.
const DATA_BYTES: u64 = 96 << 20;
/// Thousandths of the data that requests want. Beside it the guest uses its kernel and programs.
const USED_PERMILLE: u64 = 150;
/// Quantiles of an answer.
const QUANTILES: usize = 1000;
const WORK: &str = "/tmp/service";

/// A service cannot do what it should.
#[derive(Debug, thiserror::Error)]
pub enum ServiceError {
    /// The command is not valid.
    #[error("'{0}' is no order: prepare redis|sqlite|files|compile, measure MILLISECONDS, verify")]
    NoOrder(String),
    /// Nothing is prepared yet, or something is already.
    #[error("'{0}' is not possible now: one service is prepared, once, before anything else")]
    NotNow(String),
    /// A program or file failed.
    #[error("{what}: {source}")]
    Io {
        /// Which.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// An answer is not what it must be: memory was lost.
    #[error("{0} is not what was stored")]
    Wrong(String),
}

fn io_failed(what: &'static str) -> impl Fn(io::Error) -> ServiceError {
    move |source| ServiceError::Io { what, source }
}

/// A program with its data.
trait Service: Send {
    /// Has one request served, chosen by `random`.
    fn request(&mut self, random: &mut Random) -> Result<(), ServiceError>;

    /// Compares all data with what was stored.
    fn verify(&mut self) -> Result<(), ServiceError>;
}

/// A service by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServiceName {
    /// See the module.
    Redis,
    /// See the module.
    Sqlite,
    /// See the module.
    Files,
    /// See the module.
    Compile,
}

impl ServiceName {
    /// All.
    pub const ALL: [Self; 4] = [Self::Redis, Self::Sqlite, Self::Files, Self::Compile];

    /// As in an order.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Redis => "redis",
            Self::Sqlite => "sqlite",
            Self::Files => "files",
            Self::Compile => "compile",
        }
    }

    fn prepare(self) -> Result<Box<dyn Service>, ServiceError> {
        std::fs::create_dir_all(WORK).map_err(io_failed(WORK))?;
        Ok(match self {
            Self::Redis => Box::new(redis::Keys::prepare()?),
            Self::Sqlite => Box::new(sqlite::Rows::prepare()?),
            Self::Files => Box::new(files::Files::prepare()?),
            Self::Compile => Box::new(compile::Sources::prepare()?),
        })
    }
}

impl FromStr for ServiceName {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|service| service.name() == name);
        found.ok_or_else(|| {
            let all = Self::ALL.map(Self::name).join(", ");
            format!("there is no service '{name}': {all} are")
        })
    }
}

/// Draws of one service.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = pattern::mix(self.0);
        self.0 % limit.max(1)
    }
}

/// Of `count` items of data, those that requests want.
fn used(count: u64) -> u64 {
    (count * USED_PERMILLE / 1000).max(1)
}

/// A command of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Prepare(ServiceName),
    Measure(Duration),
    Verify,
}

impl FromStr for Order {
    type Err = ServiceError;

    fn from_str(line: &str) -> Result<Self, ServiceError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let no_order = || ServiceError::NoOrder(line.to_owned());
        match words[..] {
            ["prepare", name] => name.parse().map(Self::Prepare).map_err(|_| no_order()),
            ["measure", ms] => match ms.parse() {
                Ok(ms @ 1..=3_600_000) => Ok(Self::Measure(Duration::from_millis(ms))),
                _ => Err(no_order()),
            },
            ["verify"] => Ok(Self::Verify),
            _ => Err(no_order()),
        }
    }
}

/// A service at work.
struct Serving {
    service: Mutex<Box<dyn Service>>,
    measures: AtomicBool,
    /// Of the requests measured, in nanoseconds.
    times: Mutex<Vec<u64>>,
    /// Why it serves no longer.
    failed: Mutex<Option<ServiceError>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Executes the host's commands until it closes the port.
///
/// # Errors
/// The port fails.
pub fn run(seed: u64, port: &mut File) -> io::Result<()> {
    let mut serving = None;
    // Earlier output went to a port that echoes.
    writeln!(port, "ready")?;
    for line in BufReader::new(port.try_clone()?).lines() {
        let line = line?;
        let answer = obey(&line, seed, &mut serving)
            .unwrap_or_else(|error| format!("failed {}", error.to_string().replace('\n', "; ")));
        writeln!(port, "{answer}")?;
    }
    Ok(())
}

fn obey(line: &str, seed: u64, serving: &mut Option<Arc<Serving>>) -> Result<String, ServiceError> {
    let done = || "done".to_owned();
    match (line.parse()?, &serving) {
        (Order::Prepare(name), None) => {
            *serving = Some(Serving::begin(name.prepare()?, seed));
            Ok(done())
        }
        (Order::Measure(time), Some(serving)) => serving.measure(time),
        (Order::Verify, Some(serving)) => {
            serving.check()?;
            lock(&serving.service).verify().map(|()| done())
        }
        (Order::Prepare(_), Some(_)) | (Order::Measure(_) | Order::Verify, None) => {
            Err(ServiceError::NotNow(line.to_owned()))
        }
    }
}

impl Serving {
    fn begin(service: Box<dyn Service>, seed: u64) -> Arc<Self> {
        let serving = Arc::new(Self {
            service: Mutex::new(service),
            measures: AtomicBool::new(false),
            times: Mutex::default(),
            failed: Mutex::default(),
        });
        let works = Arc::clone(&serving);
        thread::spawn(move || works.serve(&mut Random(seed)));
        serving
    }

    fn serve(&self, random: &mut Random) {
        loop {
            let began = Instant::now();
            if let Err(error) = lock(&self.service).request(random) {
                *lock(&self.failed) = Some(error);
                return;
            }
            if self.measures.load(Relaxed) {
                let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
                lock(&self.times).push(ns);
            }
        }
    }

    /// Fails if it serves no longer.
    fn check(&self) -> Result<(), ServiceError> {
        lock(&self.failed).take().map_or(Ok(()), Err)
    }

    fn measure(&self, time: Duration) -> Result<String, ServiceError> {
        self.check()?;
        lock(&self.times).clear();
        let began = Instant::now();
        self.measures.store(true, Relaxed);
        thread::sleep(time);
        self.measures.store(false, Relaxed);
        let took = began.elapsed();
        self.check()?;
        let mut times = std::mem::take(&mut *lock(&self.times));
        times.sort_unstable();
        let mut answer = format!("served {} {}", times.len(), took.as_nanos());
        for time in quantiles(&times) {
            answer += &format!(" {time}");
        }
        Ok(answer)
    }
}

/// [`QUANTILES`] of `sorted`, or all if there are fewer.
fn quantiles(sorted: &[u64]) -> impl Iterator<Item = u64> {
    let count = sorted.len().min(QUANTILES);
    // The middle of each part: the longest times are as likely to be in as any.
    (0..count).map(move |part| sorted[(2 * part + 1) * sorted.len() / (2 * count)])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicU64;

    #[test]
    fn orders_are_read_and_others_refused_by_their_words() {
        let order = |line: &str| line.parse::<Order>();
        let prepared = order("prepare sqlite").expect("an order");
        assert_eq!(prepared, Order::Prepare(ServiceName::Sqlite));
        let measured = order("measure 1500").expect("an order");
        assert_eq!(measured, Order::Measure(Duration::from_millis(1500)));
        for wrong in [
            "",
            "prepare",
            "prepare tea",
            "measure 0",
            "measure 1 2",
            "verify all",
        ] {
            let error = order(wrong).expect_err("no order");
            assert!(error.to_string().contains(&format!("'{wrong}'")), "{error}");
        }
    }

    #[test]
    fn quantiles_are_all_times_or_the_middles_of_a_thousand_parts() {
        assert_eq!(quantiles(&[]).count(), 0);
        assert_eq!(quantiles(&[3, 5, 9]).collect::<Vec<_>>(), [3, 5, 9]);
        let many: Vec<u64> = (0..10_000).collect();
        let some: Vec<u64> = quantiles(&many).collect();
        assert_eq!((some.len(), some[0], some[999]), (QUANTILES, 5, 9995));
    }

    /// Counts, and fails at the given request.
    struct Counter {
        requests: Arc<AtomicU64>,
        fails_at: u64,
    }

    impl Service for Counter {
        fn request(&mut self, random: &mut Random) -> Result<(), ServiceError> {
            assert!(random.below(7) < 7);
            match self.requests.fetch_add(1, Relaxed) == self.fails_at {
                true => Err(ServiceError::Wrong("a request".to_owned())),
                false => Ok(()),
            }
        }

        fn verify(&mut self) -> Result<(), ServiceError> {
            Ok(())
        }
    }

    #[test]
    fn requests_are_counted_while_measured_and_a_wrong_one_is_told_with_the_next_order() {
        let begin = |fails_at| {
            let requests = Arc::new(AtomicU64::new(0));
            let counter = Counter {
                requests: Arc::clone(&requests),
                fails_at,
            };
            (requests, Serving::begin(Box::new(counter), 5))
        };
        let (requests, serving) = begin(u64::MAX);
        let mut served = 0;
        while served == 0 {
            let answer = serving.measure(Duration::from_millis(5)).expect("served");
            let words: Vec<u64> = answer.split(' ').flat_map(str::parse).collect();
            served = words[0];
            let times = usize::try_from(served).expect("a count").min(QUANTILES);
            assert_eq!(words.len(), 2 + times, "{answer}");
        }
        assert!(served <= requests.load(Relaxed));
        let (_, failing) = begin(3);
        while lock(&failing.failed).is_none() {
            thread::yield_now();
        }
        let mut serving = Some(failing);
        let error = obey("measure 5", 1, &mut serving).expect_err("it failed");
        assert!(error.to_string().contains("a request"), "{error}");
        let error = obey("prepare redis", 1, &mut serving).expect_err("one is there");
        assert!(error.to_string().contains("not possible now"), "{error}");
    }
}
