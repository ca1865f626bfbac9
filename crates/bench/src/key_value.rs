// SPDX-License-Identifier: Apache-2.0
//! A client of key-value servers: some connections, each with one request under way, nine gets to a set of 1 KiB.
//!
//! A key that a cache has dropped is a miss, and is set anew.
//!
//! It is what the papers' memaslap and redis-benchmark do, with the kernel's TCP, and tells when each operation was
//! done. Each value is compared with what was set.

use pagetide_random::SplitMix64;
use std::{
    io::{self, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    ops::Range,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// What is asked for: keys, of which each connection has its own part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WorkingSet {
    pub keys: u64,
    /// Of each value; a multiple of 8.
    pub value_bytes: usize,
}

impl WorkingSet {
    /// Values of 1 KiB that fit anywhere.
    pub(crate) const SMALL: Self = Self {
        keys: 4096,
        value_bytes: 1024,
    };
}

/// Between the requests of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Pace {
    /// As soon as the last one is answered.
    Closed,
    /// So long from one to the next, or as soon as the last one is answered if that took longer.
    Every(Duration),
}

/// Longest time without a byte of an answer, beyond which a server is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// Which server.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Speaks {
    /// Redis' protocol.
    Redis,
    /// Memcached's, as text.
    Memcached,
}

impl Speaks {
    /// The port at which guests have it.
    pub(crate) const fn port(self) -> u16 {
        match self {
            Self::Redis => 6379,
            Self::Memcached => 11211,
        }
    }
}

/// When a run ends.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Until {
    /// After this time.
    Time(Duration),
    /// After so many operations, or this time if they take longer.
    Operations(u64, Duration),
}

impl Until {
    const fn time(self) -> Duration {
        match self {
            Self::Time(time) | Self::Operations(_, time) => time,
        }
    }
}

/// One operation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Done {
    /// When it was done, from the run's begin on.
    pub at: Duration,
    /// How long it took.
    pub took: Duration,
    /// Whether the key was there.
    pub hit: bool,
}

/// Connections to one server. They stay from run to run.
pub(crate) struct Clients {
    connections: Vec<Connection>,
    pace: Pace,
}

struct Connection {
    speaks: Speaks,
    stream: TcpStream,
    keys: Range<u64>,
    value_bytes: usize,
    random: SplitMix64,
    got: Vec<u8>,
}

impl Clients {
    /// Connects, and sets all keys.
    ///
    /// # Errors
    /// There is no such server, or it answers wrongly.
    pub(crate) fn connect(
        speaks: Speaks,
        address: SocketAddr,
        count: u64,
        set: WorkingSet,
    ) -> Result<Self, String> {
        let told = |error: io::Error| format!("{speaks:?} of the guest: {error}");
        let mut connections = Vec::new();
        for number in 0..count {
            let stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(told)?;
            stream.set_nodelay(true).map_err(told)?;
            stream.set_read_timeout(Some(PATIENCE)).map_err(told)?;
            stream.set_write_timeout(Some(PATIENCE)).map_err(told)?;
            let mut connection = Connection {
                speaks,
                stream,
                keys: part(set.keys, number, count),
                value_bytes: set.value_bytes,
                random: SplitMix64::new(number),
                got: Vec::new(),
            };
            for key in connection.keys.clone() {
                connection.set(key).map_err(told)?;
            }
            connections.push(connection);
        }
        Ok(Self {
            connections,
            pace: Pace::Closed,
        })
    }

    /// Asks at this pace from now on.
    pub(crate) fn set_pace(&mut self, pace: Pace) {
        self.pace = pace;
    }

    /// Asks for the first `keys` keys from now on, whether they have been set or not.
    pub(crate) fn move_to(&mut self, keys: u64) {
        let count = self.connections.len() as u64;
        for (number, connection) in (0..).zip(&mut self.connections) {
            connection.keys = part(keys, number, count);
        }
    }

    /// Runs all connections at a time; the operations in the order of their ends.
    ///
    /// # Errors
    /// The server answers wrongly or no more.
    pub(crate) fn run(&mut self, until: Until) -> Result<Vec<Done>, String> {
        let (begun, asked, pace) = (Instant::now(), &AtomicU64::new(0), self.pace);
        let ran: Vec<io::Result<Vec<Done>>> = std::thread::scope(|scope| {
            let threads: Vec<_> = (self.connections.iter_mut())
                .map(|connection| scope.spawn(move || connection.run(begun, asked, until, pace)))
                .collect();
            let joined = threads.into_iter().map(|thread| {
                let panicked = |_| Err(io::Error::other("a client has panicked"));
                thread.join().unwrap_or_else(panicked)
            });
            joined.collect()
        });
        let mut done = Vec::new();
        for of_one in ran {
            done.extend(of_one.map_err(|error| format!("a client of the guest: {error}"))?);
        }
        done.sort_by_key(|operation| operation.at);
        Ok(done)
    }
}

impl Connection {
    fn run(
        &mut self,
        begun: Instant,
        asked: &AtomicU64,
        until: Until,
        pace: Pace,
    ) -> io::Result<Vec<Done>> {
        let mut done = Vec::new();
        while begun.elapsed() < until.time() {
            if let Until::Operations(count, _) = until
                && asked.fetch_add(1, Relaxed) >= count
            {
                break;
            }
            let key = self.keys.start + self.random.below(self.keys.end - self.keys.start);
            let began = Instant::now();
            let hit = match self.random.below(10) {
                0 => {
                    self.set(key)?;
                    true
                }
                _ => self.get(key)?,
            };
            if !hit {
                self.set(key)?;
            }
            done.push(Done {
                at: begun.elapsed(),
                took: began.elapsed(),
                hit,
            });
            if let Pace::Every(time) = pace {
                std::thread::sleep(time.saturating_sub(began.elapsed()));
            }
        }
        Ok(done)
    }

    fn set(&mut self, key: u64) -> io::Result<()> {
        let value = value(key, self.value_bytes);
        let (request, answer) = match self.speaks {
            Speaks::Redis => (
                resp(&[b"SET", name(key).as_bytes(), &value]),
                &b"+OK\r\n"[..],
            ),
            Speaks::Memcached => {
                let head = format!("set {} 0 0 {}\r\n", name(key), value.len());
                let request = [head.as_bytes(), &value, b"\r\n"].concat();
                (request, &b"STORED\r\n"[..])
            }
        };
        self.ask(&request, answer, b"").map(|_| ())
    }

    /// Whether it was there.
    fn get(&mut self, key: u64) -> io::Result<bool> {
        let value = value(key, self.value_bytes);
        match self.speaks {
            Speaks::Redis => {
                let head = format!("${}\r\n", value.len());
                let answer = [head.as_bytes(), &value, b"\r\n"].concat();
                let request = resp(&[b"GET", name(key).as_bytes()]);
                self.ask(&request, &answer, b"$-1\r\n")
            }
            Speaks::Memcached => {
                let head = format!("VALUE {} 0 {}\r\n", name(key), value.len());
                let answer = [head.as_bytes(), &value, b"\r\nEND\r\n"].concat();
                let request = format!("get {}\r\n", name(key));
                self.ask(request.as_bytes(), &answer, b"END\r\n")
            }
        }
    }

    /// True if the answer is `answer`, false if it is `other`.
    fn ask(&mut self, request: &[u8], answer: &[u8], other: &[u8]) -> io::Result<bool> {
        self.stream.write_all(request)?;
        // Both are told apart by then.
        let first = answer.len().min(other.len());
        self.got.resize(answer.len(), 0);
        self.stream.read_exact(&mut self.got[..first])?;
        if first > 0 && self.got[..first] == *other {
            return Ok(false);
        }
        self.stream.read_exact(&mut self.got[first..])?;
        match self.got == answer {
            true => Ok(true),
            false => Err(io::Error::other(format!(
                "the answer begins with {:?}",
                String::from_utf8_lossy(&self.got[..self.got.len().min(40)])
            ))),
        }
    }
}

/// The keys of a connection.
fn part(keys: u64, number: u64, count: u64) -> Range<u64> {
    keys * number / count..(keys * (number + 1) / count).max(keys * number / count + 1)
}

fn name(key: u64) -> String {
    format!("key:{key:06}")
}

fn value(key: u64, bytes: usize) -> Vec<u8> {
    let words = (0..bytes as u64 / 8).map(|word| (key << 32 | word).wrapping_mul(0x9e37_79b9));
    words.flat_map(u64::to_le_bytes).collect()
}

fn resp(words: &[&[u8]]) -> Vec<u8> {
    let mut request = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        request.extend(format!("${}\r\n", word.len()).as_bytes());
        request.extend(*word);
        request.extend(b"\r\n");
    }
    request
}

/// Operations a second of a run that took `time`.
pub(crate) fn rate(done: &[Done], time: Duration) -> f64 {
    crate::harness::figures::to_f64(done.len() as u64) / time.as_secs_f64().max(1e-9)
}

/// When operations were first done at `rate` a second for a whole `bin`.
pub(crate) fn recovery(done: &[Duration], rate: f64, bin: Duration) -> Option<Duration> {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a small positive count"
    )]
    let wanted = ((rate * bin.as_secs_f64()) as usize).max(1);
    let ends = done.iter().skip(wanted);
    let mut runs = done.iter().zip(ends);
    runs.find(|(begin, end)| **end - **begin <= bin)
        .map(|(begin, _)| *begin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::BufRead as _,
        net::{Ipv4Addr, TcpListener},
    };

    #[test]
    fn requests_are_those_of_the_protocol() {
        let request = resp(&[b"GET", b"key:000007"]);
        assert_eq!(request, b"*2\r\n$3\r\nGET\r\n$10\r\nkey:000007\r\n");
        assert_ne!(value(1, 64), value(2, 64));
        assert_eq!(value(3, 1024).len(), 1024);
        assert_eq!((part(10, 0, 4), part(10, 3, 4)), (0..2, 7..10));
    }

    /// Each key is a round trip, which takes long on a machine that is busy.
    const FEW: WorkingSet = WorkingSet {
        keys: 32,
        value_bytes: 64,
    };

    /// Answers as memcached does, has lost the key of the tenth get, and is wrong at the `wrong_at`-th.
    fn serve(listener: &TcpListener, wrong_at: u64) {
        let bytes = FEW.value_bytes;
        let (stream, _) = listener.accept().unwrap();
        let mut out = stream.try_clone().unwrap();
        let mut lines = io::BufReader::new(stream);
        let mut gets = 0;
        let mut line = String::new();
        while lines.read_line(&mut line).is_ok_and(|bytes| bytes > 0) {
            let words: Vec<&str> = line.split_whitespace().collect();
            let key: u64 = words[1].trim_start_matches("key:").parse().unwrap();
            let answer = match words[0] {
                "set" => {
                    let mut body = vec![0; bytes + 2];
                    lines.read_exact(&mut body).unwrap();
                    assert_eq!(body[..bytes], value(key, bytes));
                    b"STORED\r\n".to_vec()
                }
                _ => {
                    gets += 1;
                    let value = value(key + u64::from(gets == wrong_at), bytes);
                    let head = format!("VALUE {} 0 {bytes}\r\n", words[1]);
                    match gets {
                        10 => b"END\r\n".to_vec(),
                        _ => [head.as_bytes(), &value, b"\r\nEND\r\n"].concat(),
                    }
                }
            };
            out.write_all(&answer).unwrap();
            line.clear();
        }
    }

    #[test]
    fn operations_are_counted_and_a_wrong_value_ends_the_run() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| serve(&listener, 150));
            let mut clients = Clients::connect(Speaks::Memcached, address, 1, FEW).unwrap();
            let done = clients.run(Until::Operations(100, PATIENCE)).unwrap();
            assert_eq!(done.len(), 100);
            assert!(done.is_sorted_by_key(|operation| operation.at));
            assert_eq!(done.iter().filter(|operation| !operation.hit).count(), 1);
            let error = clients.run(Until::Operations(100, PATIENCE)).unwrap_err();
            assert!(error.contains("VALUE"), "{error}");
        });
    }

    #[test]
    fn recovery_is_when_the_rate_is_first_kept() {
        // None for a second, then a thousand a second.
        let done: Vec<_> = (0..1000).map(|n| Duration::from_millis(1000 + n)).collect();
        let bin = Duration::from_millis(50);
        assert_eq!(recovery(&done, 900.0, bin), Some(Duration::from_secs(1)));
        assert_eq!(recovery(&done, 2000.0, bin), None);
    }
}
