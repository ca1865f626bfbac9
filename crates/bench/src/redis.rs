// SPDX-License-Identifier: Apache-2.0
//! A Redis server of this machine, for a bench: at a socket in its folder, or at a port of the loopback.

use crate::orders::Ordered;
use std::{
    net::{Ipv4Addr, TcpListener},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

/// Servers, and a checker of their files that is the same program and decides by its name.
const PROGRAMS: [&str; 3] = [
    "/usr/bin/redis-server",
    "/usr/bin/valkey-server",
    "/usr/bin/redis-check-rdb",
];
/// Longest time for a server to begin.
const START_WAIT: Duration = Duration::from_secs(20);
const READY: &str = "eady to accept connections";

/// The server's program, under its own name in `folder`.
///
/// # Errors
/// There is none.
pub(crate) fn program_in(folder: &Path) -> Result<PathBuf, String> {
    let found = PROGRAMS.into_iter().find(|path| Path::new(path).exists());
    let found = found.ok_or("there is no redis or valkey server (Debian's redis-server)")?;
    let program = folder.join("redis-server");
    if !program.exists() {
        symlink(found, &program).map_err(|error| format!("{}: {error}", program.display()))?;
    }
    Ok(program)
}

/// A running server, which keeps nothing on disk. Dropping it ends it.
pub(crate) struct RedisServer {
    process: Ordered,
    port: u16,
}

impl RedisServer {
    /// Starts one whose program lies in `folder`.
    ///
    /// # Errors
    /// There is none, or it does not begin.
    pub(crate) fn start(folder: &Path) -> Result<Self, String> {
        // Nobody else asks for this one meanwhile, as a rule; if somebody does, the server ends.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
            .and_then(|listener| listener.local_addr())
            .map_err(|error| format!("no port of the loopback: {error}"))?
            .port();
        let mut command = Command::new(program_in(folder)?);
        command
            .args(["--bind", "127.0.0.1", "--port", &port.to_string()])
            .args(["--save", "", "--appendonly", "no", "--dir"])
            .arg(folder);
        let mut process = Ordered::start(&mut command)?;
        let begun = Instant::now();
        while !process.line_within(START_WAIT)?.contains(READY) {
            if begun.elapsed() > START_WAIT {
                return Err("the redis server does not begin".to_owned());
            }
        }
        Ok(Self { process, port })
    }

    /// Its process id.
    pub(crate) fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Its port of the loopback.
    pub(crate) const fn port(&self) -> u16 {
        self.port
    }
}
