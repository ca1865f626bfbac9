// SPDX-License-Identifier: Apache-2.0
//! Other tenants of the same daemon, with devices of their own, who misbehave.
//!
//! An [`Attack`] connects to the socket of the attacker's device as a front end and does something
//! that no front end should. How it ends is not looked at: what matters is that the guest, which has
//! its disk on the same engine, gets on.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::Board;
use super::deaths::Dice;
use super::stand::Stand;

/// Devices that are attacked; the rest of the tenants' devices come and go.
const ATTACKED: usize = 2;
/// Rest between two attacks.
const REST_MS: (u64, u64) = (100, 900);
/// How long an attacker waits for an answer.
const PATIENCE: Duration = Duration::from_millis(500);

/// One way to misbehave.
#[derive(Clone, Copy)]
pub struct Attack {
    /// What it is.
    pub name: &'static str,
    /// Does it, to the device that listens there, with a seed.
    pub run: fn(&Path, u64) -> io::Result<()>,
}

/// All that is known.
#[must_use]
pub fn attacks() -> Vec<Attack> {
    vec![
        Attack {
            name: "half a header",
            run: half_header,
        },
        Attack {
            name: "half a handshake",
            run: half_handshake,
        },
        Attack {
            name: "garbage",
            run: garbage,
        },
        Attack {
            name: "rings without memory",
            run: rings_without_memory,
        },
        Attack {
            name: "silence",
            run: silence,
        },
    ]
}

/// A tenant who attacks the device that it was given.
pub struct Attacker {
    socket: PathBuf,
    seed: u64,
}

/// One for each device that is attacked.
pub fn attackers(stand: &Stand, seed: u64) -> Vec<Attacker> {
    let devices = stand.tenants.iter().take(ATTACKED).enumerate();
    devices
        .map(|(number, device)| Attacker {
            socket: device.socket.clone(),
            seed: Dice::new(seed, 100 + number as u64).any(),
        })
        .collect()
}

impl Attacker {
    /// Attacks until the soak is over.
    pub fn run(&self, board: &Board) {
        let attacks = attacks();
        let mut dice = Dice::new(self.seed, 0);
        while !board.is_over() {
            let choice = usize::try_from(dice.from_to(0, attacks.len() as u64)).unwrap_or(0);
            let attack = attacks[choice];
            let done = (attack.run)(&self.socket, dice.any());
            // While the daemon is away nobody listens, and nothing was attacked.
            let away = done.is_err_and(|error| {
                matches!(
                    error.kind(),
                    io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound
                )
            });
            if !away {
                board.count_attack(attack.name);
            }
            board.rest(Duration::from_millis(dice.from_to(REST_MS.0, REST_MS.1)));
        }
    }
}

/// Numbers of the requests that are used here.
mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_VRING_ENABLE: u32 = 18;
}

fn connect(socket: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

/// A message: number, flags (version 1), size, and content.
fn message(number: u32, content: &[u8]) -> Vec<u8> {
    let size = u32::try_from(content.len()).unwrap_or(u32::MAX);
    let mut message = Vec::with_capacity(12 + content.len());
    for word in [number, 1, size] {
        message.extend_from_slice(&word.to_le_bytes());
    }
    message.extend_from_slice(content);
    message
}

fn half_header(socket: &Path, seed: u64) -> io::Result<()> {
    let bytes = message(request::GET_FEATURES, &[]);
    let cut = usize::try_from(seed % 11).unwrap_or(0) + 1;
    connect(socket)?.write_all(&bytes[..cut])
}

fn half_handshake(socket: &Path, _seed: u64) -> io::Result<()> {
    let mut stream = connect(socket)?;
    let mut answer = [0; 20];
    stream.write_all(&message(request::GET_FEATURES, &[]))?;
    stream.read_exact(&mut answer)?;
    stream.write_all(&message(request::SET_FEATURES, &answer[12..]))?;
    stream.write_all(&message(request::GET_PROTOCOL_FEATURES, &[]))?;
    stream.read_exact(&mut answer)?;
    stream.write_all(&message(request::SET_OWNER, &[]))
}

fn garbage(socket: &Path, seed: u64) -> io::Result<()> {
    let mut stream = connect(socket)?;
    let mut dice = Dice::new(seed, 0);
    for _ in 0..dice.from_to(1, 40) {
        let number = u32::try_from(dice.from_to(0, 60)).unwrap_or(0);
        let words = usize::try_from(dice.from_to(0, 12)).unwrap_or(0);
        let content: Vec<u8> = (0..words).flat_map(|_| dice.any().to_le_bytes()).collect();
        stream.write_all(&message(number, &content))?;
    }
    Ok(())
}

fn rings_without_memory(socket: &Path, seed: u64) -> io::Result<()> {
    let mut stream = connect(socket)?;
    stream.write_all(&message(request::SET_OWNER, &[]))?;
    let state = |index: u32, number: u32| [index.to_le_bytes(), number.to_le_bytes()].concat();
    for (number, value) in [
        (request::SET_VRING_NUM, 256),
        (request::SET_VRING_BASE, 65_535),
    ] {
        stream.write_all(&message(number, &state(0, value)))?;
    }
    let mut addresses = state(0, 0);
    for turn in 0..4_u64 {
        addresses.extend_from_slice(&(seed ^ turn << 60).to_le_bytes());
    }
    stream.write_all(&message(request::SET_VRING_ADDR, &addresses))?;
    stream.write_all(&message(request::SET_VRING_ENABLE, &state(0, 1)))
}

fn silence(socket: &Path, seed: u64) -> io::Result<()> {
    let _stream = connect(socket)?;
    std::thread::sleep(Duration::from_millis(seed % 3_000));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_begins_with_number_version_and_size() {
        assert_eq!(
            message(3, &[9]),
            [3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 9].to_vec()
        );
    }
}
