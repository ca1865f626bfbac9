// SPDX-License-Identifier: Apache-2.0
//! Another host: a network namespace with a Redis server, behind a pair of virtual Ethernet devices.
//!
//! ```text
//!   this namespace                      namespace ptfarPID
//!   daemon ── pth PID 198.18.x.1 ══════ ptf PID 198.18.x.2 ── redis-server
//! ```
//! The addresses are of the block for benchmarks (RFC 2544). The whole of TCP and of both stacks is passed, and no
//! wire: a figure is what a link adds to.

use crate::redis::program_in;
use rustix::process::getpid;
use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{Ipv4Addr, TcpStream},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// The port of the server: nothing else listens in its namespace.
const PORT: u16 = 6379;

/// The other host; it is gone when this is dropped.
pub(super) struct FarHost {
    name: String,
    device: String,
    far_device: String,
    address: Ipv4Addr,
    folder: PathBuf,
    program: PathBuf,
    server: Option<Child>,
}

fn ip(words: &[&str]) -> Result<(), String> {
    let run = Command::new("ip").args(words).output();
    let output = run.map_err(|error| format!("`ip` of iproute2: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "`ip {}`: {}",
            words.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

impl FarHost {
    /// Makes it, with a server whose files are in `folder`.
    pub(super) fn make(folder: &Path) -> Result<Self, String> {
        let program = program_in(folder)?;
        let pid = getpid().as_raw_nonzero().get();
        let part = u8::try_from(pid % 256).unwrap_or(0);
        let address = |host| Ipv4Addr::new(198, 18, part, host);
        let host = Self {
            name: format!("ptfar{pid}"),
            device: format!("pth{pid}"),
            far_device: format!("ptf{pid}"),
            address: address(2),
            folder: folder.to_owned(),
            program,
            server: None,
        };
        ip(&["netns", "add", &host.name])?;
        let Self {
            name,
            device,
            far_device,
            ..
        } = &host;
        ip(&[
            "link", "add", device, "type", "veth", "peer", "name", far_device, "netns", name,
        ])?;
        ip(&["addr", "add", &format!("{}/30", address(1)), "dev", device])?;
        let far_address = format!("{}/30", address(2));
        ip(&["-n", name, "addr", "add", &far_address, "dev", far_device])?;
        ip(&["-n", name, "link", "set", "lo", "up"])?;
        ip(&["-n", name, "link", "set", far_device, "up"])?;
        host.link_up()?;
        let mut host = host;
        host.start_server()?;
        Ok(host)
    }

    /// Starts the server with its files, and waits until it serves.
    pub(super) fn start_server(&mut self) -> Result<(), String> {
        let failed = |error: std::io::Error| format!("the redis server: {error}");
        let mut child = Command::new("nsenter")
            .arg(format!("--net=/run/netns/{}", self.name))
            .arg(&self.program)
            .args(["--bind", &self.address.to_string(), "--port"])
            .arg(PORT.to_string())
            .args(["--protected-mode", "no"])
            .args(["--save", "", "--appendonly", "yes", "--appendfsync"])
            .args(["always", "--dir"])
            .arg(&self.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let out = child.stdout.take();
        self.server = Some(child);
        let mut lines = BufReader::new(out.ok_or("the redis server has no output")?).lines();
        let is_ready = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.contains("eady to accept connections"));
        if !is_ready {
            return Err("the redis server ended".to_owned());
        }
        // It must never wait for a reader of its log.
        std::thread::spawn(move || lines.count());
        Ok(())
    }

    /// Ends the server as if its host had crashed.
    pub(super) fn kill_server(&mut self) -> Result<(), String> {
        let Some(mut server) = self.server.take() else {
            return Ok(());
        };
        let ended = server.kill().and_then(|()| server.wait());
        ended
            .map(drop)
            .map_err(|error| format!("the redis server cannot be ended: {error}"))
    }

    /// As a cable that is pulled out.
    pub(super) fn link_down(&self) -> Result<(), String> {
        ip(&["link", "set", &self.device, "down"])
    }

    /// As a cable that is put in.
    pub(super) fn link_up(&self) -> Result<(), String> {
        ip(&["link", "set", &self.device, "up"])
    }

    /// The server's URL.
    pub(super) fn url(&self) -> String {
        format!("redis://{}:{PORT}", self.address)
    }

    /// Times `count` requests that ask for nothing, one after the other, in nanoseconds.
    pub(super) fn round_trips(&self, count: u64) -> Result<Vec<u32>, String> {
        let failed = |error: std::io::Error| format!("the other host: {error}");
        let mut stream = TcpStream::connect((self.address, PORT)).map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .map_err(failed)?;
        let mut answer = [0; 7];
        let mut taken = Vec::new();
        for _ in 0..count {
            let begun = Instant::now();
            stream.write_all(b"PING\r\n").map_err(failed)?;
            stream.read_exact(&mut answer).map_err(failed)?;
            taken.push(u32::try_from(begun.elapsed().as_nanos()).unwrap_or(u32::MAX));
        }
        Ok(taken)
    }
}

impl Drop for FarHost {
    fn drop(&mut self) {
        let ended = [
            self.kill_server(),
            ip(&["link", "del", &self.device]),
            ip(&["netns", "del", &self.name]),
        ];
        for error in ended.into_iter().filter_map(Result::err) {
            tracing::warn!(
                error,
                "something of the other host stays, or was never there"
            );
        }
    }
}
