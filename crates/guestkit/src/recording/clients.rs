// SPDX-License-Identifier: Apache-2.0
//! Clients of the guest's servers, on this machine.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guest::record::{ServedWorkload, search};
use serde_json::Value;

use super::RecordingError;
use crate::programs::IPERF3;

/// Connections to each server of media and search: the paper's for media.
const CONNECTIONS: u64 = 8;
/// Bytes of a TCP segment in a frame of 1,500 bytes.
const SEGMENT_BYTES: &str = "1448";
/// How much longer than its time a client may take. An emulated guest answers late.
const PATIENCE: Duration = Duration::from_secs(300);
/// Longest wait for the next bytes of an answer.
const SILENCE: Duration = Duration::from_secs(60);
/// Qualities of videos, as the server has them.
const QUALITIES: [&str; 4] = ["240", "360", "480", "720"];
/// Pieces of a video that are fetched in a row.
const PIECES_OF_A_VIDEO: u64 = 6;

/// Runs the clients of all servers for `seconds`. Returns the bytes that were received: by the servers of iperf3, by
/// the clients of the others.
pub(super) fn run(
    workload: ServedWorkload,
    ports: &[u16],
    seconds: u32,
) -> Result<u64, RecordingError> {
    let until = Instant::now() + Duration::from_secs(seconds.into());
    match workload {
        ServedWorkload::Iperf3 => iperf3(ports, seconds),
        ServedWorkload::Media => {
            connections(workload, ports, |port, seed| media(port, seed, until))
        }
        ServedWorkload::Search => connections(workload, ports, |port, seed| ask(port, seed, until)),
    }
}

fn failed(workload: ServedWorkload) -> impl Fn(String) -> RecordingError {
    move |reason| RecordingError::Client {
        workload: workload.name(),
        reason,
    }
}

/// An iperf3 that sends to one server. Dropped, it is killed.
struct Sender(Child);

impl Drop for Sender {
    fn drop(&mut self) {
        // One that has ended cannot be killed, and is only waited for.
        if let Err(error) = self.0.kill().and_then(|()| self.0.wait()) {
            eprintln!("ending iperf3: {error}");
        }
    }
}

fn iperf3(ports: &[u16], seconds: u32) -> Result<u64, RecordingError> {
    let failed = failed(ServedWorkload::Iperf3);
    let deadline = Instant::now() + Duration::from_secs(seconds.into()) + PATIENCE;
    let mut senders = Vec::new();
    for port in ports {
        let child = Command::new(IPERF3.path)
            .args(["-c", "127.0.0.1", "-4", "-J", "-M", SEGMENT_BYTES])
            .args(["-p", &port.to_string(), "-t", &seconds.to_string()])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(RecordingError::io(IPERF3.path))?;
        senders.push(Sender(child));
    }
    let mut bytes = 0;
    for mut sender in senders {
        let output = sender.0.stdout.take();
        let reader = thread::spawn(move || {
            let mut report = String::new();
            output.map_or(Ok(0), |mut output| output.read_to_string(&mut report))?;
            Ok::<_, std::io::Error>(report)
        });
        while !reader.is_finished() {
            if Instant::now() > deadline {
                return Err(failed(format!(
                    "it has not ended after {seconds} s and more"
                )));
            }
            thread::sleep(Duration::from_millis(20));
        }
        let report = reader
            .join()
            .map_err(|_| failed("its reader panicked".to_owned()))?
            .map_err(RecordingError::io(IPERF3.path))?;
        bytes += received(&report).map_err(&failed)?;
    }
    Ok(bytes)
}

/// The bytes that the server received, by a report of iperf3.
fn received(report: &str) -> Result<u64, String> {
    let value: Value = serde_json::from_str(report).map_err(|error| error.to_string())?;
    if let Some(error) = value["error"].as_str() {
        return Err(error.to_owned());
    }
    value["end"]["sum_received"]["bytes"]
        .as_u64()
        .ok_or_else(|| "its report has no end.sum_received.bytes".to_owned())
}

/// Runs `one` for each connection to each server, and adds up its bytes.
fn connections(
    workload: ServedWorkload,
    ports: &[u16],
    one: impl Fn(u16, u64) -> std::io::Result<u64> + Sync,
) -> Result<u64, RecordingError> {
    let bytes = thread::scope(|scope| {
        let threads: Vec<_> = (0..CONNECTIONS)
            .flat_map(|number| ports.iter().map(move |port| (*port, number)))
            .map(|(port, number)| {
                let one = &one;
                scope.spawn(move || one(port, number + 1))
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| match thread.join() {
                Ok(bytes) => bytes.map_err(|error| error.to_string()),
                Err(_) => Err("a thread panicked".to_owned()),
            })
            .sum::<Result<u64, String>>()
    });
    bytes.map_err(failed(workload))
}

fn connect(port: u16) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_read_timeout(Some(SILENCE))?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Fetches videos piece by piece, each in a quality chosen by `seed`, until `until`.
fn media(port: u16, seed: u64, until: Instant) -> std::io::Result<u64> {
    let (mut bytes, mut random, mut piece) = (0, seed, 0);
    let mut quality = QUALITIES[0];
    while Instant::now() < until {
        if piece % PIECES_OF_A_VIDEO == 0 {
            quality = QUALITIES[below(&mut random, QUALITIES.len())];
        }
        piece += 1;
        let mut stream = connect(port)?;
        write!(stream, "GET /{quality} HTTP/1.0\r\n\r\n")?;
        bytes += std::io::copy(&mut stream, &mut std::io::sink())?;
    }
    Ok(bytes)
}

/// Asks for one to four words, again and again, until `until`.
fn ask(port: u16, seed: u64, until: Instant) -> std::io::Result<u64> {
    let mut stream = connect(port)?;
    let mut answers = BufReader::new(stream.try_clone()?);
    let (mut bytes, mut random) = (0, seed);
    while Instant::now() < until {
        let words: Vec<String> = (0..=below(&mut random, 4))
            .map(|_| below(&mut random, search::WORDS as usize).to_string())
            .collect();
        stream.write_all((words.join(" ") + "\n").as_bytes())?;
        loop {
            let mut line = String::new();
            let read = answers.read_line(&mut line)?;
            bytes += read as u64;
            match line.as_str() {
                "" => return Err(std::io::ErrorKind::UnexpectedEof.into()),
                "\n" => break,
                _ => {}
            }
        }
    }
    Ok(bytes)
}

/// A number below `limit`, the next after `random`.
fn below(random: &mut u64, limit: usize) -> usize {
    // Knuth's constants; the upper bits are the better ones.
    *random = random
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    usize::try_from(*random >> 33).unwrap_or(0) % limit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_those_that_the_server_received() {
        let report = r#"{"end": {"sum_sent": {"bytes": 9}, "sum_received": {"bytes": 7}}}"#;
        assert_eq!(received(report), Ok(7));
        let refused = r#"{"error": "unable to connect"}"#;
        assert_eq!(received(refused), Err("unable to connect".to_owned()));
        assert!(received("{}").is_err());
        assert!(received("").is_err());
    }
}
