// SPDX-License-Identifier: Apache-2.0
//! A guest whose network device is ours, on a TAP, in a network of the test's own: nothing is lost
//! while its RAM is squeezed.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use pagetide_guest::params::Params;
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::image::{Addition, Extras};
use pagetide_guestkit::qemu::{GuestSpec, Version};
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    PATIENCE, VM, let_go, number, small, squeeze, take_turn, working_guest,
};
use pagetide_sys::net::namespace;

const HOST: &str = "10.99.0.1";
const GUEST: &str = "10.99.0.2";
const ECHO_BYTES: usize = 6 << 20;
/// Sends back what it gets on port 7, and pings the host all the time.
const SCRIPT: &str = "\
busybox=/bin/busybox
$busybox ip link set lo up
$busybox ip addr add 10.99.0.2/24 dev eth0
$busybox ip link set eth0 up
$busybox nc -ll -p 7 -e $busybox cat &
while :; do $busybox ping -c 5 -W 20 10.99.0.1; done
";

fn ip(line: &str) -> bool {
    let done = Command::new("ip").args(line.split(' ')).status();
    done.is_ok_and(|status| status.success())
}

/// Runs `test` where a TAP `pt0` leads to a network of its own; skips loudly where that cannot be.
fn in_network(test: impl FnOnce() + Send + 'static) {
    let thread = thread::spawn(move || {
        if let Err(error) = namespace::enter_new() {
            eprintln!("SKIPPED: a network namespace needs root: {error}");
            return;
        }
        let is_there = ip("tuntap add dev pt0 mode tap multi_queue")
            && ip(&format!("addr add {HOST}/24 dev pt0"))
            && ip("link set pt0 up");
        if !is_there {
            eprintln!("SKIPPED: a TAP cannot be made here");
            return;
        }
        test();
    });
    thread.join().unwrap();
}

/// A small guest that works on memory, with a network.
fn with_network(socket: &str) -> GuestSpec {
    let (name, value) = Version::installed().unwrap().reconnect();
    let words = [
        "-chardev".to_owned(),
        format!("socket,id=net0,path={socket},{name}={value}"),
        "-netdev".to_owned(),
        "vhost-user,id=n0,chardev=net0,queues=2".to_owned(),
        "-device".to_owned(),
        // Without MSI-X: QEMU 7.2 dies with it under software emulation.
        "virtio-net-pci,netdev=n0,mq=on,vectors=0".to_owned(),
    ];
    GuestSpec {
        ram_bytes: 192 << 20,
        work: Params {
            mem_bytes: 64 << 20,
            ..small().work
        },
        extra: words.to_vec(),
        ..small()
    }
}

/// Connects to the guest's port 7, which opens a moment after its work has begun.
fn connect() -> TcpStream {
    let address: SocketAddr = format!("{GUEST}:7").parse().unwrap();
    let begun = Instant::now();
    loop {
        match TcpStream::connect_timeout(&address, Duration::from_secs(5)) {
            Ok(stream) => return stream,
            Err(error) => assert!(begun.elapsed() < PATIENCE, "{error}"),
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Sends bytes to the guest, and gets them back as they were.
fn echo(bytes: usize, seed: u64) {
    let mut stream = connect();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    let sent: Vec<u8> = (0..bytes as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15 ^ seed) >> 56).to_le_bytes()[0])
        .collect();
    let mut out = stream.try_clone().unwrap();
    let expected = sent.clone();
    let sending = thread::spawn(move || out.write_all(&sent).unwrap());
    let mut got = vec![0; bytes];
    stream.read_exact(&mut got).unwrap();
    sending.join().unwrap();
    assert!(got == expected, "bytes came back changed");
}

/// Results of pings, as the guest has printed them.
fn pings(guest: &Guest) -> Vec<String> {
    let console = guest.console().unwrap();
    let lines = console.lines().filter(|line| line.contains("packet loss"));
    lines.map(str::to_owned).collect()
}

#[test]
fn squeezed_guest_loses_no_packet_of_a_tap_and_no_byte() {
    in_network(|| {
        let Some((_turn, mut stage)) = take_turn(Stage::set) else {
            return;
        };
        let script = Addition::text("network", SCRIPT);
        let extras = Extras {
            suffix: "-network",
            additions: &[script],
            ..Extras::default()
        };
        stage.add_to_image(&extras).expect("an image");
        let socket = stage.folder().join("net.sock");
        let name = socket.to_str().unwrap();
        let net = [
            "dpu", "net", "--socket", name, "--tap", "pt0", "--queues", "2",
        ];
        let added = stage.product.client(net).expect("a client");
        added.success().expect("a network device");

        let mut guest = working_guest(&mut stage, &with_network(name));
        echo(1 << 20, 1);
        squeeze(&stage, &guest);
        let before = pings(&guest).len();
        for seed in 2..5 {
            echo(ECHO_BYTES / 3, seed);
        }
        stage
            .until("pings were answered", PATIENCE, || {
                Ok(pings(&guest).len() >= before + 2)
            })
            .expect("pings");
        let lossy: Vec<_> = pings(&guest)
            .into_iter()
            .filter(|line| !line.contains(" 0% packet loss"))
            .collect();
        assert!(lossy.is_empty(), "{lossy:?}");
        let console = guest.console().unwrap();
        assert!(!console.contains("is not a head"), "{console}");

        let device = stage.product.device(&socket).expect("a device");
        assert_eq!(
            (&device["vm"], &device["state"]),
            (&VM.into(), &"connected".into())
        );
        assert_eq!(number(&device, "failed_requests"), 0, "{device}");
        assert!(
            number(&device, "read_bytes") > ECHO_BYTES as u64,
            "{device}"
        );
        assert!(
            number(&device, "written_bytes") > ECHO_BYTES as u64,
            "{device}"
        );
        let_go(&stage, &mut guest);
    });
}
