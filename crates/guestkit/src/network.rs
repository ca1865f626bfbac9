// SPDX-License-Identifier: Apache-2.0
//! A network of a test's own, and guests that are in it.
//!
//! ```text
//!   a network namespace of one thread:   10.99.0.1, TAP pt0 ──── the device ──── 10.99.0.2, eth0 of the guest
//! ```
//! Further guests are on TAPs `pt1`, `pt2` and so on, which whoever needs them makes, as 10.99.1.2 and so on.
//!
//! Processes that such a thread starts are in its namespace, so that a daemon finds the TAP there, and nobody else
//! does. Namespace and TAP end with the thread and its processes.

use std::fmt;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::str::FromStr;
use std::thread;
use std::time::{Duration, Instant};

use crate::image::Addition;
use crate::programs::{IPERF3, MEMCACHED, Program, ProgramError, REDIS_SERVER};
use crate::qemu::Version;

/// The TAP, with several queues.
pub const TAP: &str = "pt0";
/// The host's address in the network.
pub const HOST: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
/// The guest's.
pub const GUEST: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 2);
/// The port at which a guest sends back what it gets.
pub const ECHO_PORT: u16 = 7;

/// Runs `act` on a thread with a network of its own.
///
/// # Errors
/// Why there can be none: usually for lack of root or of `ip`.
///
/// # Panics
/// `act` did.
pub fn in_own_network<R: Send>(act: impl FnOnce() -> R + Send) -> Result<R, String> {
    let run = || -> Result<R, String> {
        pagetide_sys::net::namespace::enter_new()
            .map_err(|error| format!("a network namespace needs root: {error}"))?;
        ip(&format!("tuntap add dev {TAP} mode tap multi_queue"))?;
        ip(&format!("addr add {HOST}/24 dev {TAP}"))?;
        ip(&format!("link set {TAP} up"))?;
        Ok(act())
    };
    thread::scope(|scope| match scope.spawn(run).join() {
        Ok(ran) => ran,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

fn ip(words: &str) -> Result<(), String> {
    let ran = Command::new("ip").args(words.split(' ')).output();
    let output = ran.map_err(|error| format!("`ip`, of the package iproute2: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "`ip {words}`: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

/// A program of a guest that others use by the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Server {
    /// Sends back what it gets at [`ECHO_PORT`].
    Echo,
    /// Redis, at port 6379.
    Redis,
    /// Memcached, at port 11211, with so many MiB for values.
    Memcached(u32),
    /// iperf3, at port 5201.
    Iperf3,
}

impl Server {
    const ALL: [Self; 4] = [Self::Echo, Self::Redis, Self::MEMCACHED, Self::Iperf3];
    /// Memcached as it is without a size.
    pub const MEMCACHED: Self = Self::Memcached(96);

    const fn name(self) -> &'static str {
        match self {
            Self::Echo => "echo",
            Self::Redis => "redis",
            Self::Memcached(_) => "memcached",
            Self::Iperf3 => "iperf3",
        }
    }

    /// What it needs beyond busybox.
    #[must_use]
    pub const fn program(self) -> Option<Program> {
        match self {
            Self::Echo => None,
            Self::Redis => Some(REDIS_SERVER),
            Self::Memcached(_) => Some(MEMCACHED),
            Self::Iperf3 => Some(IPERF3),
        }
    }

    fn command(self) -> String {
        match self {
            Self::Echo => "/bin/busybox nc -ll -p 7 -e /bin/busybox cat".to_owned(),
            Self::Redis => {
                "/bin/redis-server --bind 0.0.0.0 --port 6379 --protected-mode no --save '' \
                            --appendonly no >/dev/null"
                    .to_owned()
            }
            Self::Memcached(mib) => {
                format!("/bin/memcached -u root -l 0.0.0.0 -p 11211 -U 0 -m {mib} -t 2")
            }
            Self::Iperf3 => "/bin/iperf3 -s >/dev/null".to_owned(),
        }
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Memcached(mib) if *self != Self::MEMCACHED => {
                write!(f, "{}:{mib}", self.name())
            }
            _ => f.write_str(self.name()),
        }
    }
}

impl FromStr for Server {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(Ok(mib)) = text.strip_prefix("memcached:").map(str::parse) {
            return Ok(Self::Memcached(mib));
        }
        let found = Self::ALL.into_iter().find(|server| server.name() == text);
        found.ok_or_else(|| {
            let all: Vec<_> = Self::ALL.iter().map(ToString::to_string).collect();
            format!("'{text}' is no server: {} are", all.join(", "))
        })
    }
}

/// Whether a guest pings the host all the time, as fast as answers come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pings {
    /// It does: each thousand are one line of its console.
    Flood,
    /// It does not.
    None,
}

/// What a guest needs in its initramfs to be in the network, with `servers` that begin with it.
///
/// # Errors
/// A program is not installed.
pub fn additions(servers: &[Server], pings: Pings) -> Result<Vec<Addition>, ProgramError> {
    additions_of(0, servers, pings)
}

/// The same for the guest with this number.
///
/// # Errors
/// As there.
pub fn additions_of(
    number: u8,
    servers: &[Server],
    pings: Pings,
) -> Result<Vec<Addition>, ProgramError> {
    let mut additions = vec![
        Addition::text("network", &script(number, servers, pings)),
        // Servers that give up root look it up.
        Addition::text("etc/passwd", "root:x:0:0:root:/:/bin/sh\n"),
    ];
    for program in servers.iter().filter_map(|server| server.program()) {
        additions.extend(program.additions()?);
    }
    Ok(additions)
}

fn script(number: u8, servers: &[Server], pings: Pings) -> String {
    let mut script = format!(
        "busybox=/bin/busybox\n$busybox ip link set lo up\n$busybox ip addr add 10.99.{number}.2/24 dev eth0\n\
         $busybox ip link set eth0 up\n"
    );
    for server in servers {
        script += &format!("{} &\n", server.command());
    }
    if pings == Pings::Flood {
        script +=
            &format!("while :; do $busybox ping -A -q -c 1000 -W 20 10.99.{number}.1; done\n");
    }
    script
}

/// Who serves a guest's interface.
#[derive(Clone, Copy, Debug)]
pub enum Back<'a> {
    /// The vhost-user device that listens on this socket.
    Socket(&'a Path),
    /// QEMU itself, on the TAP of the guest with this number.
    Qemu(u8),
}

/// QEMU's arguments for an interface with `queues` pairs of queues, receiving ones of `ring` buffers.
#[must_use]
pub fn interface(back: Back<'_>, queues: u16, ring: u16, version: Version) -> Vec<String> {
    let mut words = Vec::new();
    let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
    match back {
        Back::Socket(socket) => {
            let (name, value) = version.reconnect();
            let path = socket.display();
            option(
                "-chardev",
                format!("socket,id=net0,path={path},{name}={value}"),
            );
            option(
                "-netdev",
                format!("vhost-user,id=n0,chardev=net0,queues={queues}"),
            );
        }
        Back::Qemu(number) => {
            // QEMU opens a TAP of several queues only if it is to have several itself. The device uses one with mq=off.
            let queues = queues.max(2);
            option(
                "-netdev",
                format!("tap,id=n0,ifname=pt{number},script=no,downscript=no,queues={queues}"),
            );
        }
    }
    // Without MSI-X: QEMU 7.2 dies with it under software emulation if the back end is another process.
    let mq = if queues > 1 { "on" } else { "off" };
    option(
        "-device",
        format!("virtio-net-pci,netdev=n0,mq={mq},vectors=0,rx_queue_size={ring}"),
    );
    words
}

/// Connects to the guest, whose servers open a moment after its boot; tries no longer than `patience`.
///
/// # Errors
/// The last try's.
pub fn connect(port: u16, patience: Duration) -> std::io::Result<TcpStream> {
    let address = SocketAddr::from((GUEST, port));
    let begun = Instant::now();
    loop {
        let error = match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        if begun.elapsed() > patience {
            return Err(error);
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Sends `bytes` that follow from `seed` on a connection to an echo, and compares what comes back.
///
/// # Errors
/// The connection broke, or a byte has changed, or nothing came for `patience`.
pub fn echo(
    stream: &mut TcpStream,
    bytes: usize,
    seed: u64,
    patience: Duration,
) -> std::io::Result<()> {
    stream.set_read_timeout(Some(patience))?;
    stream.set_write_timeout(Some(patience))?;
    let sent: Vec<u8> = (0..bytes as u64)
        .map(|at| {
            let mixed = (at ^ seed.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            mixed.to_be_bytes()[0]
        })
        .collect();
    let mut out = stream.try_clone()?;
    let mut got = vec![0; bytes];
    thread::scope(|scope| {
        let sending = scope.spawn(|| out.write_all(&sent));
        let read = stream.read_exact(&mut got);
        let written = match sending.join() {
            Ok(written) => written,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        read.and(written)
    })?;
    match got == sent {
        true => Ok(()),
        false => Err(std::io::Error::other("bytes came back changed")),
    }
}

/// The lines in which a guest's pings have told their loss.
pub fn pings(console: &str) -> impl Iterator<Item = &str> {
    console.lines().filter(|line| line.contains("packet loss"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_read_as_they_are_written() {
        for server in [&Server::ALL[..], &[Server::Memcached(7)]].concat() {
            assert_eq!(server.to_string().parse(), Ok(server));
        }
        let error = "tea".parse::<Server>().expect_err("no server");
        assert!(
            error.contains("'tea'") && error.contains("memcached"),
            "{error}"
        );
    }

    #[test]
    fn scripts_begin_their_servers_and_interfaces_their_rings() {
        let script = script(3, &[Server::Memcached(64)], Pings::Flood);
        assert!(
            script.contains("-m 64") && script.contains("ping -A") && script.contains("10.99.3.2"),
            "{script}"
        );
        let version = Version {
            major: 7,
            minor: 2,
            micro: 0,
        };
        let words = interface(Back::Socket(Path::new("/s")), 4, 256, version).join(" ");
        assert!(words.contains("path=/s,reconnect=1"), "{words}");
        assert!(
            words.contains("queues=4") && words.contains("rx_queue_size=256"),
            "{words}"
        );
        let words = interface(Back::Qemu(0), 1, 1024, version).join(" ");
        assert!(
            words.contains("ifname=pt0") && words.contains("mq=off"),
            "{words}"
        );
    }
}
