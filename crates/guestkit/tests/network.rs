// SPDX-License-Identifier: Apache-2.0
//! A guest whose network device is ours, on a TAP, in a network of the test's own: nothing is lost
//! while its RAM is squeezed.
//!
//! `PAGETIDE_ECHO_MIB` is how much goes there and back, 6 MiB without it.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guest::params::Params;
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::image::Extras;
use pagetide_guestkit::network::{
    self, Back, ECHO_PORT, GUEST, Pings, Server, TAP, in_own_network, interface,
};
use pagetide_guestkit::qemu::{GuestSpec, Version};
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    PATIENCE, VM, let_go, number, small, squeeze, take_turn, working_guest,
};
use serde_json::Value;

/// Pairs of queues, and vCPUs, so that the driver uses all of them.
const QUEUES: u16 = 4;
/// Of one connection.
const ECHO_BYTES: usize = 2 << 20;

/// Runs `test` with a network of its own; skips loudly where that cannot be.
fn in_network(test: impl FnOnce() + Send) {
    if let Err(error) = in_own_network(test) {
        eprintln!("SKIPPED: {error}");
    }
}

fn echoes() -> u64 {
    let given = std::env::var("PAGETIDE_ECHO_MIB");
    let mib = given.map_or(6, |mib| mib.parse().expect("a number of MiB"));
    mib * (1 << 20) / ECHO_BYTES as u64
}

/// Results of pings, as the guest has printed them.
fn pings(guest: &Guest) -> Vec<String> {
    let console = guest.console().unwrap();
    network::pings(&console).map(str::to_owned).collect()
}

/// Runs iperf3 against the guest's server.
///
/// The server opens its socket anew for each run, a moment after its client of the last one has ended: whoever connects
/// before that is refused or reset, which are no losses.
fn iperf3(words: &[&str]) {
    let begun = Instant::now();
    loop {
        let mut command = Command::new("iperf3");
        command.args(["-c", &GUEST.to_string(), "-t", "2"]);
        let ran = command.args(words).output().expect("iperf3");
        if ran.status.success() {
            return;
        }
        let said = [&ran.stdout[..], &ran.stderr[..]].concat();
        let said = String::from_utf8_lossy(&said).into_owned();
        let has_streams = said.contains(" connected to ");
        assert!(
            !has_streams && begun.elapsed() < PATIENCE,
            "{words:?}: {said}"
        );
        thread::sleep(Duration::from_millis(200));
    }
}

/// Neither a ping nor a packet, as the guest and the device tell it.
fn nothing_was_lost(guest: &Guest, device: &Value) {
    let lossy: Vec<_> = pings(guest)
        .into_iter()
        .filter(|line| !line.contains(" 0% packet loss"))
        .collect();
    assert!(lossy.is_empty(), "{lossy:?}");
    let console = guest.console().unwrap();
    assert!(!console.contains("is not a head"), "{console}");
    assert_eq!(
        (&device["vm"], &device["state"]),
        (&VM.into(), &"connected".into())
    );
    for lost in ["failed_requests", "fault_dropped_packets"] {
        assert_eq!(number(device, lost), 0, "{lost}: {device}");
    }
    let bytes = echoes() * ECHO_BYTES as u64;
    assert!(number(device, "read_bytes") > bytes, "{device}");
    assert!(number(device, "written_bytes") > bytes, "{device}");
}

#[test]
fn squeezed_guest_loses_no_packet_of_a_tap_and_no_byte() {
    in_network(|| {
        let Some((_turn, mut stage)) = take_turn(Stage::set) else {
            return;
        };
        let mut servers = vec![Server::Echo];
        match Server::Iperf3.program().map(|program| program.additions()) {
            Some(Err(error)) => eprintln!("SKIPPED: streams of iperf3: {error}"),
            _ => servers.push(Server::Iperf3),
        }
        let additions = network::additions(&servers, Pings::Flood).expect("programs");
        let extras = Extras {
            suffix: "-network",
            additions: &additions,
            ..Extras::default()
        };
        stage.add_to_image(&extras).expect("an image");
        let socket = stage.folder().join("net.sock");
        let name = socket.to_str().unwrap();
        let net = [
            "dpu", "net", "--socket", name, "--tap", TAP, "--queues", "4",
        ];
        let added = stage.product.client(net).expect("a client");
        added.success().expect("a network device");

        let version = Version::installed().unwrap();
        let spec = GuestSpec {
            ram_bytes: 192 << 20,
            cpus: u32::from(QUEUES),
            work: Params {
                mem_bytes: 64 << 20,
                ..small().work
            },
            extra: interface(Back::Socket(&socket), QUEUES, 256, version),
            ..small()
        };
        let mut guest = working_guest(&mut stage, &spec);
        let mut stream = network::connect(ECHO_PORT, PATIENCE).expect("an echo");
        network::echo(&mut stream, 1 << 20, 1, PATIENCE).expect("the same bytes");
        squeeze(&stage, &guest);
        let before = pings(&guest).len();
        for seed in 0..echoes() {
            let mut stream = network::connect(ECHO_PORT, PATIENCE).expect("an echo");
            network::echo(&mut stream, ECHO_BYTES, seed, PATIENCE).expect("the same bytes");
        }
        if servers.contains(&Server::Iperf3) {
            // Several flows, so that several queues have work; both ways.
            for words in [
                &["-P", "4"][..],
                &["-P", "4", "-R"],
                &["-u", "-b", "10M", "-l", "1200"],
                &["-u", "-b", "10M", "-l", "1200", "-R"],
            ] {
                iperf3(words);
            }
        }
        stage
            .until("pings were answered", PATIENCE, || {
                Ok(pings(&guest).len() >= before + 2)
            })
            .expect("pings");
        nothing_was_lost(&guest, &stage.product.device(&socket).expect("a device"));
        let_go(&stage, &mut guest);
    });
}
