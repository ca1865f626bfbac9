// SPDX-License-Identifier: Apache-2.0
//! A wire that flips bits, and that can be cut.
//!
//! ```text
//!   client ──────────────────────────────► server
//!          ◄── a bit in a long reply ─────         while flips are ordered
//! ```
//! Bits are flipped on the way to the client only: what the server has is then known to be right.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// A read of so many bytes or more has a page in it, mostly.
const LONG_BYTES: usize = 128;
/// After a long reply that was spoilt, this many less one are not: a page that is asked for again must come through.
const FLIP_EVERY: u64 = 16;

#[derive(Debug, Default)]
struct State {
    server: AtomicU16,
    flips: AtomicU64,
    long_replies: AtomicU64,
    /// The first long reply that may be spoilt next.
    spoilt_again_from: AtomicU64,
    flipped: AtomicU64,
    is_cut: AtomicBool,
    ends: Mutex<Vec<TcpStream>>,
}

impl State {
    /// Whether the long reply of this number is; it counts as one of those ordered then.
    fn is_to_be_spoilt(&self, number: u64) -> bool {
        let due = |from: u64| (number >= from).then_some(number + FLIP_EVERY);
        let take = |left: u64| left.checked_sub(1);
        // An order that is not there would else hold back the next one.
        self.flips.load(Relaxed) > 0
            && self
                .spoilt_again_from
                .fetch_update(Relaxed, Relaxed, due)
                .is_ok()
            && self.flips.fetch_update(Relaxed, Relaxed, take).is_ok()
    }
}

/// A port of this machine that leads to a server.
#[derive(Debug)]
pub struct Wire {
    state: Arc<State>,
    port: u16,
}

impl Wire {
    /// A wire to the server on `port`.
    ///
    /// # Errors
    /// No port is to be had.
    pub fn to(port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let wire = Self {
            state: Arc::default(),
            port: listener.local_addr()?.port(),
        };
        wire.state.server.store(port, Relaxed);
        let state = Arc::clone(&wire.state);
        thread::spawn(move || {
            for client in listener.incoming() {
                if let Err(error) = client.and_then(|client| connect(&state, client)) {
                    // The client sees the same: its connection ends.
                    eprintln!("the wire: {error}");
                }
            }
        });
        Ok(wire)
    }

    /// The port for clients.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// Flips one bit in so many of the next long replies, though never in several in a row.
    pub fn flip(&self, count: u64) {
        self.state.flips.store(count, Relaxed);
    }

    /// Bits flipped so far.
    #[must_use]
    pub fn flipped(&self) -> u64 {
        self.state.flipped.load(Relaxed)
    }

    /// Ends all connections, and lets no new one come about.
    pub fn cut(&self) {
        self.state.is_cut.store(true, Relaxed);
        let mut ends = self
            .state
            .ends
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        for end in ends.drain(..) {
            if let Err(error) = end.shutdown(Shutdown::Both) {
                // It has ended by itself.
                eprintln!("the wire: {error}");
            }
        }
    }

    /// Lets connections come about again.
    pub fn mend(&self) {
        self.state.is_cut.store(false, Relaxed);
    }
}

fn connect(state: &Arc<State>, client: TcpStream) -> io::Result<()> {
    if state.is_cut.load(Relaxed) {
        return client.shutdown(Shutdown::Both);
    }
    let server = TcpStream::connect((Ipv4Addr::LOCALHOST, state.server.load(Relaxed)))?;
    for end in [&client, &server] {
        end.set_nodelay(true)?;
        let mut ends = state.ends.lock().unwrap_or_else(PoisonError::into_inner);
        ends.push(end.try_clone()?);
    }
    let (to_server, to_client) = (server.try_clone()?, client.try_clone()?);
    thread::spawn(move || pump(client, to_server, |_| {}));
    let state = Arc::clone(state);
    thread::spawn(move || pump(server, to_client, |bytes| spoil(&state, bytes)));
    Ok(())
}

fn spoil(state: &State, bytes: &mut [u8]) {
    if bytes.len() < LONG_BYTES {
        return;
    }
    let number = state.long_replies.fetch_add(1, Relaxed);
    if !state.is_to_be_spoilt(number) {
        return;
    }
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0x10;
    state.flipped.fetch_add(1, Relaxed);
}

/// Until one of the two ends; then both do.
fn pump(mut from: TcpStream, mut to: TcpStream, mut spoil: impl FnMut(&mut [u8])) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        spoil(&mut bytes[..count]);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    for end in [from, to] {
        if let Err(error) = end.shutdown(Shutdown::Both)
            && error.kind() != io::ErrorKind::NotConnected
        {
            eprintln!("the wire: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spoilt(state: &State, replies: usize) -> Vec<usize> {
        let is_spoilt = |_: &usize| {
            let mut bytes = [0; LONG_BYTES];
            spoil(state, &mut bytes);
            bytes != [0; LONG_BYTES]
        };
        (0..replies).filter(is_spoilt).collect()
    }

    #[test]
    fn the_next_long_reply_is_spoilt_and_none_soon_after() {
        let state = State::default();
        assert!(spoilt(&state, 5).is_empty());
        state.flips.store(2, Relaxed);
        assert_eq!(spoilt(&state, 40), [0, 16]);
        assert_eq!(state.flipped.load(Relaxed), 2);
        state.flips.store(1, Relaxed);
        assert_eq!(spoilt(&state, 1), [0]);
    }

    #[test]
    fn short_replies_come_through() {
        let state = State::default();
        state.flips.store(1, Relaxed);
        let mut bytes = [0; LONG_BYTES - 1];
        spoil(&state, &mut bytes);
        assert_eq!(bytes, [0; LONG_BYTES - 1]);
        assert_eq!(spoilt(&state, 1), [0]);
    }
}
