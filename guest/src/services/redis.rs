// SPDX-License-Identifier: Apache-2.0
//! redis: values that follow from their key and generation.

use super::{DATA_BYTES, Random, Service, ServiceError, io_failed, used};
use crate::pattern;
use crate::soak::content;
use crate::soak::redis::{Answer, answer, request};
use std::io::{self, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const PROGRAM: &str = "/bin/redis-server";
const SOCKET: &str = "/tmp/service/redis.sock";
const VALUE_BYTES: usize = 1024;
/// Of a request.
const KEYS_A_REQUEST: u64 = 16;
/// Written without waiting for an answer, while the data is made.
const BATCH: usize = 64;
const PATIENCE: Duration = Duration::from_secs(120);
const LOOK: Duration = Duration::from_millis(50);

/// See the module.
pub(super) struct Keys {
    server: Child,
    stream: BufReader<UnixStream>,
    generations: Vec<u32>,
}

impl Drop for Keys {
    fn drop(&mut self) {
        if let Err(error) = self.server.kill().and_then(|()| self.server.wait()) {
            eprintln!("guest-work: ending redis: {error}");
        }
    }
}

impl Keys {
    pub(super) fn prepare() -> Result<Self, ServiceError> {
        let failed = io_failed(PROGRAM);
        let server = Command::new(PROGRAM)
            .args(["--port", "0", "--unixsocket", SOCKET])
            .args(["--save", "", "--appendonly", "no"])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(&failed)?;
        let mut keys = Self {
            server,
            stream: BufReader::new(connect().map_err(&failed)?),
            generations: vec![0; usize::try_from(DATA_BYTES).unwrap_or(0) / VALUE_BYTES],
        };
        let all = keys.generations.len() as u64;
        for first in (0..all).step_by(BATCH) {
            keys.write(&(first..all.min(first + BATCH as u64)).collect::<Vec<_>>())?;
        }
        Ok(keys)
    }

    fn write(&mut self, keys: &[u64]) -> Result<(), ServiceError> {
        for key in keys {
            let value = self.value(*key, self.generations[place(*key)] + 1);
            self.send(&[b"SET", name(*key).as_bytes(), &value])?;
        }
        for key in keys {
            match answer(&mut self.stream).map_err(io_failed(PROGRAM))? {
                Answer::Ok => self.generations[place(*key)] += 1,
                other => return Err(unexpected(&other)),
            }
        }
        Ok(())
    }

    fn check(&mut self, key: u64) -> Result<(), ServiceError> {
        self.send(&[b"GET", name(key).as_bytes()])?;
        match answer(&mut self.stream).map_err(io_failed(PROGRAM))? {
            Answer::Value(Some(got)) if got == self.value(key, self.generations[place(key)]) => {
                Ok(())
            }
            Answer::Value(_) => Err(ServiceError::Wrong(format!("the value of {}", name(key)))),
            other => Err(unexpected(&other)),
        }
    }

    fn send(&mut self, words: &[&[u8]]) -> Result<(), ServiceError> {
        let stream = self.stream.get_mut();
        stream
            .write_all(&request(words))
            .map_err(io_failed(PROGRAM))
    }

    fn value(&self, key: u64, generation: u32) -> Vec<u8> {
        content(pattern::key(1, key, generation), VALUE_BYTES)
    }
}

impl Service for Keys {
    fn request(&mut self, random: &mut Random) -> Result<(), ServiceError> {
        let keys = used(self.generations.len() as u64);
        for number in 0..KEYS_A_REQUEST {
            let key = random.below(keys);
            match number % 4 {
                0 => self.write(&[key])?,
                _ => self.check(key)?,
            }
        }
        Ok(())
    }

    fn verify(&mut self) -> Result<(), ServiceError> {
        (0..self.generations.len() as u64).try_for_each(|key| self.check(key))
    }
}

fn place(key: u64) -> usize {
    usize::try_from(key).unwrap_or(usize::MAX)
}

fn name(key: u64) -> String {
    format!("key:{key}")
}

fn unexpected(answer: &Answer) -> ServiceError {
    let said = io::Error::other(format!("the answer is {answer:?}"));
    io_failed(PROGRAM)(said)
}

/// Waits until redis listens.
fn connect() -> io::Result<UnixStream> {
    let began = Instant::now();
    loop {
        match UnixStream::connect(SOCKET) {
            Err(_) if began.elapsed() < PATIENCE => thread::sleep(LOOK),
            connected => return connected,
        }
    }
}
