// SPDX-License-Identifier: Apache-2.0
//! Well-known loads, each run for the time that the host sets and reported with its operations in that
//! time: for benches of a guest's speed.
//!
//! ```text
//!   guest, at first: ready
//!   host: run NAME SECONDS      guest: ran OPERATIONS NANOSECONDS  │  failed WORDS
//! ```
//! | name | what | an operation |
//! |---|---|---|
//! | `stress-vm` | stress-ng `--vm`, memory written and verified | one of its own |
//! | `stress-stream` | stress-ng `--stream`, four long arrays | one of its own |
//! | `redis` | redis-benchmark, reads and writes at random | a request |
//! | `sysbench-cpu` | sysbench `cpu`, prime numbers | one of its events |
//! | `sysbench-memory` | sysbench `memory`, long blocks written in order | a block |
//! | `fio` | fio on the guest's disk, 4 KiB at random past the page cache | a request |
//! | `fio-verify` | the same, written, read again and verified | a request |
//!
//! The first run of a load prepares its data, and measures its rate.

mod disk;
mod sysbench;

use crate::fio::FioError;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

const STRESS_NG: &str = "/bin/stress-ng";
const REPORT: &str = "/tmp/stress-ng.yaml";
/// Part of the guest's memory that `stress-vm` uses.
const VM_BYTES: u64 = 256 << 20;
/// Cache size that stress-ng assumes: its arrays are a multiple of it.
const STREAM_BYTES: u64 = 2 << 20;
const REDIS: &str = "/bin/redis-server";
const REDIS_BENCHMARK: &str = "/bin/redis-benchmark";
const REDIS_SOCKET: &str = "/tmp/redis.sock";
/// Keys of redis, each with a value.
const KEYS: u64 = 300_000;
const VALUE_BYTES: u64 = 512;
/// Requests that measure redis' rate.
const TRIAL_REQUESTS: u64 = 4000;
/// Longest wait for redis to start.
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(50);

/// A load cannot be run.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The command is not valid.
    #[error("'{0}' is no order: run LOAD SECONDS, of at most an hour")]
    NoOrder(String),
    /// There is no such load.
    #[error("'{0}' is no load: {all} are", all = names())]
    NoLoad(String),
    /// A program or file failed.
    #[error("{what}: {source}")]
    Io {
        /// Which.
        what: &'static str,
        /// Why.
        source: io::Error,
    },
    /// A program failed.
    #[error("{program} ended with {said}")]
    Ended {
        /// Which.
        program: &'static str,
        /// Its status and output.
        said: String,
    },
    /// fio failed, or a request did.
    #[error(transparent)]
    Fio(#[from] FioError),
}

/// A load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Load {
    /// See the module.
    StressVm,
    /// See the module.
    StressStream,
    /// See the module.
    Redis,
    /// See the module.
    SysbenchCpu,
    /// See the module.
    SysbenchMemory,
    /// See the module.
    Fio,
    /// See the module.
    FioVerify,
}

impl Load {
    /// All.
    pub const ALL: [Self; 7] = [
        Self::StressVm,
        Self::StressStream,
        Self::Redis,
        Self::SysbenchCpu,
        Self::SysbenchMemory,
        Self::Fio,
        Self::FioVerify,
    ];

    /// Its name in a command.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::StressVm => "stress-vm",
            Self::StressStream => "stress-stream",
            Self::Redis => "redis",
            Self::SysbenchCpu => "sysbench-cpu",
            Self::SysbenchMemory => "sysbench-memory",
            Self::Fio => "fio",
            Self::FioVerify => "fio-verify",
        }
    }
}

impl FromStr for Load {
    type Err = LoadError;

    fn from_str(name: &str) -> Result<Self, LoadError> {
        let found = Self::ALL.into_iter().find(|load| load.name() == name);
        found.ok_or_else(|| LoadError::NoLoad(name.to_owned()))
    }
}

/// The names of all loads.
fn names() -> String {
    Load::ALL.map(Load::name).join(", ")
}

/// A command of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Order {
    load: Load,
    seconds: u64,
}

impl FromStr for Order {
    type Err = LoadError;

    fn from_str(line: &str) -> Result<Self, LoadError> {
        let no_order = || LoadError::NoOrder(line.to_owned());
        let mut words = line.split_whitespace();
        let (verb, name, seconds) = (words.next(), words.next(), words.next());
        let load = name.ok_or_else(no_order)?.parse()?;
        let seconds = seconds.and_then(|text| text.parse().ok());
        match (verb, seconds, words.next()) {
            (Some("run"), Some(seconds @ 1..=3600), None) => Ok(Self { load, seconds }),
            _ => Err(no_order()),
        }
    }
}

/// The result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ran {
    operations: u64,
    took: Duration,
}

impl Ran {
    /// By a report's figures, `None` if they show no work.
    fn of(operations: &str, seconds: &str) -> Option<Self> {
        let (Ok(operations), Ok(seconds)) = (operations.parse::<u64>(), seconds.parse::<f64>())
        else {
            return None;
        };
        match Duration::try_from_secs_f64(seconds) {
            Ok(took) if operations > 0 && !took.is_zero() => Some(Self { operations, took }),
            _ => None,
        }
    }
}

/// Executes the host's commands until it closes the port.
///
/// # Errors
/// The port fails.
pub fn run(port: &mut File) -> io::Result<()> {
    let mut redis = None;
    // Earlier output went to a port that echoes.
    writeln!(port, "ready")?;
    for line in BufReader::new(port.try_clone()?).lines() {
        let ran = line?
            .parse()
            .and_then(|order: Order| obey(order, &mut redis));
        let answer = match ran {
            Ok(ran) => format!("ran {} {}", ran.operations, ran.took.as_nanos()),
            Err(error) => format!("failed {}", error.to_string().replace('\n', "; ")),
        };
        writeln!(port, "{answer}")?;
    }
    Ok(())
}

fn obey(order: Order, redis: &mut Option<Redis>) -> Result<Ran, LoadError> {
    match order.load {
        Load::StressVm => stress(
            order.seconds,
            &format!(
                "--vm 1 --vm-bytes {VM_BYTES} --vm-method zero-one --vm-keep --vm-madvise normal --verify"
            ),
        ),
        Load::StressStream => stress(
            order.seconds,
            &format!("--stream 1 --stream-l3-size {STREAM_BYTES} --stream-madvise normal"),
        ),
        Load::Redis => {
            let redis = match redis {
                Some(redis) => redis,
                None => redis.insert(Redis::start()?),
            };
            redis.work(order.seconds)
        }
        Load::SysbenchCpu => sysbench::run(sysbench::Test::Cpu, order.seconds),
        Load::SysbenchMemory => sysbench::run(sysbench::Test::Memory, order.seconds),
        Load::Fio => disk::run(disk::Job::Mixed, order.seconds),
        Load::FioVerify => disk::run(disk::Job::Verified, order.seconds),
    }
}

fn stress(seconds: u64, what: &str) -> Result<Ran, LoadError> {
    const PROGRAM: &str = "stress-ng";
    let mut command = Command::new(STRESS_NG);
    command
        .args(what.split_whitespace())
        .arg(format!("--timeout={seconds}s"))
        .args(["--metrics-brief", "--temp-path=/tmp", "--yaml", REPORT]);
    output_of(PROGRAM, &mut command)?;
    let report = fs::read_to_string(REPORT).map_err(|source| LoadError::Io {
        what: REPORT,
        source,
    })?;
    ran_by(&report).ok_or_else(|| LoadError::Ended {
        program: PROGRAM,
        said: format!("a report without operations: {report}"),
    })
}

/// The figures of its one load in a report of stress-ng.
fn ran_by(report: &str) -> Option<Ran> {
    let value = |name: &str| {
        let line = |line: &'_ str| {
            line.trim()
                .strip_prefix(name)
                .map(str::trim)
                .map(str::to_owned)
        };
        report.lines().find_map(line)
    };
    Ran::of(&value("bogo-ops:")?, &value("wall-clock-time:")?)
}

/// The output of `command`; an error if it fails.
fn output_of(program: &'static str, command: &mut Command) -> Result<String, LoadError> {
    let failed = |source| LoadError::Io {
        what: program,
        source,
    };
    let output = command.stdin(Stdio::null()).output().map_err(failed)?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    let errors = String::from_utf8_lossy(&output.stderr);
    Err(LoadError::Ended {
        program,
        said: format!("{}: {said} {errors}", output.status),
    })
}

/// A redis with all its keys, and its request rate.
struct Redis {
    server: Child,
    requests_per_s: u64,
}

impl Drop for Redis {
    fn drop(&mut self) {
        if let Err(error) = self.server.kill().and_then(|()| self.server.wait()) {
            eprintln!("guest-work: ending redis: {error}");
        }
    }
}

impl Redis {
    fn start() -> Result<Self, LoadError> {
        let failed = |source| LoadError::Io {
            what: REDIS,
            source,
        };
        let server = Command::new(REDIS)
            .args(["--port", "0", "--unixsocket", REDIS_SOCKET])
            .args(["--save", "", "--appendonly", "no"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(failed)?;
        let mut redis = Self {
            server,
            requests_per_s: 0,
        };
        wait_for_answer().map_err(failed)?;
        // Every key then exists with a probability of 0.95, and later requests change no size.
        benchmark(&["-t", "set", "-P", "64"], 3 * KEYS)?;
        let trial = ask(TRIAL_REQUESTS)?;
        let rate = u128::from(trial.operations) * 1_000_000_000 / trial.took.as_nanos().max(1);
        redis.requests_per_s = u64::try_from(rate).unwrap_or(u64::MAX).max(1);
        Ok(redis)
    }

    fn work(&self, seconds: u64) -> Result<Ran, LoadError> {
        ask(self.requests_per_s.saturating_mul(seconds) / 2)
    }
}

/// `requests` requests, half of them reads and half writes.
fn ask(requests: u64) -> Result<Ran, LoadError> {
    let requests = requests.max(1);
    let began = Instant::now();
    benchmark(&["-t", "get,set", "-P", "1", "-c", "8"], requests)?;
    Ok(Ran {
        operations: 2 * requests,
        took: began.elapsed(),
    })
}

fn benchmark(how: &[&str], requests: u64) -> Result<(), LoadError> {
    let mut command = Command::new(REDIS_BENCHMARK);
    command
        .args(["-s", REDIS_SOCKET, "--csv"])
        .args(how)
        .args(["-n", &requests.to_string(), "-r", &KEYS.to_string()])
        .args(["-d", &VALUE_BYTES.to_string()]);
    output_of("redis-benchmark", &mut command).map(|_figures| ())
}

fn wait_for_answer() -> io::Result<()> {
    let began = Instant::now();
    loop {
        match ping() {
            Ok(()) => return Ok(()),
            Err(error) if began.elapsed() > PATIENCE => return Err(error),
            Err(_) => thread::sleep(LOOK),
        }
    }
}

fn ping() -> io::Result<()> {
    let mut socket = UnixStream::connect(REDIS_SOCKET)?;
    socket.write_all(b"PING\r\n")?;
    let mut answer = [0; 7];
    socket.read_exact(&mut answer)?;
    if &answer == b"+PONG\r\n" {
        return Ok(());
    }
    Err(io::Error::other("redis does not answer a PING"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_and_others_refused_by_their_words() {
        let order = "run stress-vm 4".parse::<Order>().expect("an order");
        assert_eq!((order.load, order.seconds), (Load::StressVm, 4));
        for wrong in [
            "",
            "run",
            "run redis",
            "run redis 0",
            "run redis 4 5",
            "walk redis 4",
        ] {
            let error = wrong.parse::<Order>().expect_err("no order");
            assert!(error.to_string().contains(&format!("'{wrong}'")), "{error}");
        }
        let error = "run tea 4".parse::<Order>().expect_err("no load");
        let said = error.to_string();
        assert!(
            said.contains("'tea'") && said.contains("sysbench-cpu"),
            "{said}"
        );
    }

    #[test]
    fn rate_is_read_from_the_report_of_stress_ng() {
        let report = "metrics:\n    - stressor: vm\n      bogo-ops: 204800\n      \
                      bogo-ops-per-second-real-time: 51028.460000\n      wall-clock-time: 4.013500\n";
        let ran = ran_by(report).expect("it has all");
        assert_eq!((ran.operations, ran.took.as_micros()), (204_800, 4_013_500));
        assert_eq!(
            ran_by("metrics:\n      bogo-ops: 0\n      wall-clock-time: 4.0\n"),
            None
        );
        assert_eq!(ran_by(""), None);
    }
}
