// SPDX-License-Identifier: Apache-2.0
//! redis in a soak: an append-only log that is synced at each write, and a checker of confirmed writes.
//!
//! The checker knows, for each key, the generation of its value that redis has confirmed. It writes and
//! reads at random; every so often it kills redis (SIGKILL), drops the page cache, starts redis again, and
//! reads every key: redis then has the content of its log, from the disk. A write whose answer was not
//! received may be there or not.

use std::fs;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::tally::Tally;
use super::{FILES, PAUSE, Soak, content, different_bytes, drop_page_cache};
use crate::pattern;

const PROGRAM: &str = "/bin/redis-server";
const SOCKET: &str = "/tmp/redis.sock";
const KEYS: usize = 600;
const VALUE_BYTES_MAX: u64 = 8 << 10;
/// Writes sent together, and reads after them.
const BATCH: usize = 8;
const REST: Duration = Duration::from_millis(120);
/// How long redis lives, in batches.
const BATCHES_A_LIFE: u64 = 150;
/// Longest wait for an answer or a start; the guest may stall for seconds in each.
const PATIENCE: Duration = Duration::from_secs(180);
const START_LOOK: Duration = Duration::from_millis(100);

/// Writes, reads, kills until the soak ends; then every key is verified.
pub fn run(soak: &Soak) {
    let mut checker = Checker {
        soak,
        generations: vec![0; KEYS],
        random: pattern::mix(soak.seed ^ 0x0072_6564_6973),
    };
    while soak.goes_on() {
        if let Err(error) = checker.life() {
            soak.tally.failed(&format!("redis: {error}"));
            soak.rest(PAUSE);
        }
    }
    if let Err(error) = Server::start().and_then(|mut server| checker.verify_all(&mut server)) {
        soak.tally.failed(&format!("redis, at the end: {error}"));
    }
}

struct Checker<'a> {
    soak: &'a Soak,
    /// The confirmed generation of each key; 0 for none.
    generations: Vec<u32>,
    random: u64,
}

impl Checker<'_> {
    /// Start, verification of all confirmed writes, work, and a kill.
    fn life(&mut self) -> io::Result<()> {
        let mut server = Server::start()?;
        self.verify_all(&mut server)?;
        for _ in 0..BATCHES_A_LIFE {
            if !self.soak.goes_on() {
                break;
            }
            self.write(&mut server)?;
            for _ in 0..BATCH {
                let key = self.draw();
                self.verify(&mut server, key)?;
            }
            self.soak.rest(REST);
        }
        drop(server);
        drop_page_cache()?;
        Tally::add(&self.soak.tally.redis_restarts, 1);
        Ok(())
    }

    fn write(&mut self, server: &mut Server) -> io::Result<()> {
        let mut keys: Vec<usize> = (0..BATCH).map(|_| self.draw()).collect();
        keys.sort_unstable();
        keys.dedup();
        for &key in &keys {
            let value = self.value(key, self.generations[key] + 1);
            server.send(&[b"SET", name(key).as_bytes(), &value])?;
        }
        for &key in &keys {
            match server.answer()? {
                Answer::Ok => self.generations[key] += 1,
                other => return Err(unexpected("SET", &other)),
            }
        }
        Tally::add(&self.soak.tally.redis_operations, keys.len() as u64);
        Ok(())
    }

    fn verify_all(&mut self, server: &mut Server) -> io::Result<()> {
        for key in 0..KEYS {
            self.verify(server, key)?;
        }
        Ok(())
    }

    fn verify(&mut self, server: &mut Server, key: usize) -> io::Result<()> {
        server.send(&[b"GET", name(key).as_bytes()])?;
        let promised = self.generations[key];
        let got = match server.answer()? {
            Answer::Value(got) => got,
            other @ (Answer::Ok | Answer::Error(_)) => return Err(unexpected("GET", &other)),
        };
        Tally::add(&self.soak.tally.redis_operations, 1);
        let want = (promised > 0).then(|| self.value(key, promised));
        if got == want {
            return Ok(());
        }
        // A write whose answer was lost with its server exists after all.
        let later = self.value(key, promised + 1);
        if got.as_deref() == Some(&later) {
            self.generations[key] = promised + 1;
            return Ok(());
        }
        let (want, got) = (want.unwrap_or_default(), got.unwrap_or_default());
        self.soak.tally.wrong(
            different_bytes(&want, &got),
            &format!("redis, key {key}, generation {promised}"),
        );
        Ok(())
    }

    fn value(&self, key: usize, generation: u32) -> Vec<u8> {
        let key = pattern::key(self.soak.seed ^ 0x7265, key as u64, generation);
        let bytes = pattern::mix(key) % VALUE_BYTES_MAX + 1;
        content(key, usize::try_from(bytes).unwrap_or(1))
    }

    fn draw(&mut self) -> usize {
        self.random = pattern::mix(self.random);
        usize::try_from(self.random % KEYS as u64).unwrap_or(0)
    }
}

fn name(key: usize) -> String {
    format!("key:{key}")
}

fn unexpected(command: &str, answer: &Answer) -> io::Error {
    io::Error::other(format!("the answer to {command} is {answer:?}"))
}

/// An answer of redis.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The value is written.
    Ok,
    /// The value, if there is one.
    Value(Option<Vec<u8>>),
    /// What redis says.
    Error(String),
}

/// A running redis and the connection to it. Dropped, it is killed.
struct Server {
    child: Child,
    stream: BufReader<UnixStream>,
}

impl Server {
    fn start() -> io::Result<Self> {
        let folder = format!("{FILES}/redis");
        fs::create_dir_all(&folder)?;
        let mut child = Command::new(PROGRAM)
            .args(["--port", "0", "--unixsocket", SOCKET, "--save", ""])
            .args(["--appendonly", "yes", "--appendfsync", "always"])
            // Rewritten each few megabytes, by a fork.
            .args(["--auto-aof-rewrite-min-size", "4mb"])
            .args(["--dir", &folder])
            .stdout(Stdio::null())
            .spawn()?;
        match connect(&mut child) {
            Ok(stream) => Ok(Self {
                child,
                stream: BufReader::new(stream),
            }),
            Err(error) => {
                end(&mut child);
                Err(error)
            }
        }
    }

    fn send(&mut self, words: &[&[u8]]) -> io::Result<()> {
        self.stream.get_mut().write_all(&request(words))
    }

    fn answer(&mut self) -> io::Result<Answer> {
        answer(&mut self.stream)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

fn end(child: &mut Child) {
    for result in [child.kill(), child.wait().map(|_| ())] {
        if let Err(error) = result {
            eprintln!("guest-work: ending redis: {error}");
        }
    }
}

/// Waits until redis has read its log and answers.
fn connect(child: &mut Child) -> io::Result<UnixStream> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait()? {
            return Err(io::Error::other(format!(
                "it ended at its start, with {status}"
            )));
        }
        if let Ok(stream) = ready() {
            return Ok(stream);
        }
        if Instant::now() > deadline {
            return Err(io::Error::other("it does not answer after its start"));
        }
        thread::sleep(START_LOOK);
    }
}

fn ready() -> io::Result<UnixStream> {
    let stream = UnixStream::connect(SOCKET)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut reader = BufReader::new(stream);
    reader.get_mut().write_all(&request(&[b"GET", b"ready"]))?;
    match answer(&mut reader)? {
        Answer::Value(None) => Ok(reader.into_inner()),
        // It is still reading its log.
        other => Err(unexpected("GET", &other)),
    }
}

/// A request in redis' protocol: an array of strings, each after its length.
pub(crate) fn request(words: &[&[u8]]) -> Vec<u8> {
    let mut request = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        request.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        request.extend_from_slice(word);
        request.extend_from_slice(b"\r\n");
    }
    request
}

/// The next answer.
pub(crate) fn answer(stream: &mut impl BufRead) -> io::Result<Answer> {
    let mut line = String::new();
    stream.read_line(&mut line)?;
    let line = line.trim_end();
    if line == "+OK" {
        return Ok(Answer::Ok);
    }
    if let Some(error) = line.strip_prefix('-') {
        return Ok(Answer::Error(error.to_owned()));
    }
    match line.strip_prefix('$').map(str::parse::<i64>) {
        Some(Ok(-1)) => Ok(Answer::Value(None)),
        Some(Ok(length)) if usize::try_from(length).is_ok() => {
            let length = usize::try_from(length).unwrap_or(0);
            let mut value = vec![0; length + 2];
            stream.read_exact(&mut value)?;
            value.truncate(length);
            Ok(Answer::Value(Some(value)))
        }
        _ => Err(io::Error::other(format!("no answer of redis': {line:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_and_answers_are_as_the_protocol_says() {
        assert_eq!(
            request(&[b"GET", b"a"]),
            b"*2\r\n$3\r\nGET\r\n$1\r\na\r\n".to_vec()
        );
        let read = |bytes: &[u8]| answer(&mut io::Cursor::new(bytes.to_vec()));
        assert_eq!(read(b"+OK\r\n").expect("an answer"), Answer::Ok);
        assert_eq!(read(b"$-1\r\n").expect("an answer"), Answer::Value(None));
        assert_eq!(
            read(b"$4\r\n\r\nab\r\n").expect("an answer"),
            Answer::Value(Some(b"\r\nab".to_vec()))
        );
        assert_eq!(
            read(b"-LOADING x\r\n").expect("an answer"),
            Answer::Error("LOADING x".to_owned())
        );
        for torn in [&b""[..], b"$5\r\nab", b"?\r\n"] {
            assert!(read(torn).is_err());
        }
    }
}
