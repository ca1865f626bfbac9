// SPDX-License-Identifier: Apache-2.0
//! What benches of network devices start: becomes a QEMU with a stock Linux guest that is in a network with some
//! servers.
//!
//! It does not stay as a parent: its process id is QEMU's, and ending it ends QEMU. Its output says `ready` once the
//! guest has booted; the servers open their ports a moment later.

use std::convert::Infallible;
use std::error::Error;
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use clap::Parser;
use pagetide_guest::params::Params;
use pagetide_guestkit::image::{self, Extras};
use pagetide_guestkit::network::{self, Back, Pings, Server};
use pagetide_guestkit::qemu::{Accel, GuestSpec, Paths, Port, QEMU, Version, arguments};

/// Status if the machine lacks something, which the output names.
const UNABLE: u8 = 3;

/// Becomes a QEMU with a stock Linux guest that serves others by its network.
#[derive(Parser)]
struct Arguments {
    /// RAM in MiB
    #[arg(long)]
    ram_mib: u64,
    /// Folder for the guest's console
    #[arg(long)]
    folder: PathBuf,
    /// Socket of its vhost-user network device; without one QEMU serves the interface, on the TAP
    #[arg(long)]
    device: Option<PathBuf>,
    /// Its number: of its TAP and its network
    #[arg(long, default_value_t = 0)]
    number: u8,
    /// Pairs of queues
    #[arg(long, default_value_t = 1)]
    queues: u16,
    /// Buffers of a receiving ring
    #[arg(long, default_value_t = 256)]
    ring: u16,
    /// A server that begins with it: echo, redis, memcached, memcached:MIB, iperf3; may be given again
    #[arg(long = "server")]
    servers: Vec<Server>,
    /// It pings the host all the time, as fast as answers come
    #[arg(long)]
    pings: bool,
}

fn main() -> ExitCode {
    let Err(error) = become_qemu(&Arguments::parse());
    // Nothing can be done if the reader is gone.
    match writeln!(std::io::stdout(), "unable: {error}") {
        Ok(()) => ExitCode::from(UNABLE),
        Err(_) => ExitCode::FAILURE,
    }
}

fn become_qemu(given: &Arguments) -> Result<Infallible, Box<dyn Error>> {
    let mut names: Vec<_> = given.servers.iter().map(ToString::to_string).collect();
    let pings = match given.pings {
        true => Pings::Flood,
        false => Pings::None,
    };
    if given.pings {
        names.push("pings".to_owned());
    }
    let image = image::prepare_with(&Extras {
        suffix: &format!("-network-{}-{}", given.number, names.join("-")),
        additions: &network::additions_of(given.number, &given.servers, pings)?,
        ..Extras::default()
    })?;
    let version = Version::installed()?;
    let back = match &given.device {
        Some(socket) => Back::Socket(socket),
        None => Back::Qemu(given.number),
    };
    let spec = GuestSpec {
        ram_bytes: given.ram_mib.saturating_mul(1 << 20),
        work: Params {
            loads: 1,
            ..Params::default()
        },
        port: Port::Stdio,
        extra: network::interface(back, given.queues, given.ring, version),
        ..GuestSpec::default()
    };
    let paths = Paths::in_folder(&given.folder);
    let error = Command::new(QEMU)
        .args(arguments(
            &spec,
            &image,
            &paths,
            Accel::of_this_machine(),
            version,
        ))
        .exec();
    Err(format!("{QEMU}: {error}").into())
}
