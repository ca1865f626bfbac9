// SPDX-License-Identifier: Apache-2.0
//! The processes behind a guest's network device die, while the guest uses it out of order: it goes on by itself.
//!
//! `PAGETIDE_NET_KILLS` is how often, as `DPU,DAEMON`; 6,2 without it. A hundred and twenty take some minutes.

use std::net::UdpSocket;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use pagetide_guest::params::Params;
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::image::Extras;
use pagetide_guestkit::network::{
    self, Back, ECHO_PORT, GUEST, Pings, Server, TAP, in_own_network, interface,
};
use pagetide_guestkit::qemu::{GuestSpec, Version};
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    PATIENCE, VM, let_go, number, small, squeeze, take_turn, work, working_guest,
};
use pagetide_random::SplitMix64;

/// Of one exchange with the guest.
const ECHO_BYTES: usize = 128 << 10;
/// The smallest store.
const STORE_BYTES: u64 = 128 << 10;

/// Runs `test` with a network of its own, a DPU process and a daemon; skips loudly where that cannot be.
fn on_stage(test: impl FnOnce(&mut Stage) + Send) {
    let ran = in_own_network(|| {
        if let Some((_turn, mut stage)) = take_turn(Stage::set_with_dpu_process) {
            test(&mut stage);
        }
    });
    if let Err(error) = ran {
        eprintln!("SKIPPED: {error}");
    }
}

/// A squeezed guest with an echo, whose network device is in the DPU process; the device's socket.
fn squeezed(stage: &mut Stage) -> (Guest, PathBuf) {
    let additions = network::additions(&[Server::Echo], Pings::None).expect("no program");
    let extras = Extras {
        suffix: "-echo",
        additions: &additions,
        ..Extras::default()
    };
    stage.add_to_image(&extras).expect("an image");
    let socket = stage.folder().join("net.sock");
    let (name, store) = (socket.to_str().unwrap(), STORE_BYTES.to_string());
    let added = stage.devices().client([
        "dpu",
        "net",
        "--socket",
        name,
        "--tap",
        TAP,
        "--queues",
        "2",
        "--backup-bytes",
        &store,
        "--on-receive-fault",
        "out-of-order",
    ]);
    added
        .expect("a client")
        .success()
        .expect("a network device");
    let version = Version::installed().unwrap();
    let spec = GuestSpec {
        ram_bytes: 192 << 20,
        work: Params {
            mem_bytes: 64 << 20,
            ..small().work
        },
        extra: interface(Back::Socket(&socket), 2, 256, version),
        ..small()
    };
    let guest = working_guest(stage, &spec);
    network::connect(ECHO_PORT, PATIENCE).expect("an echo");
    squeeze(stage, &guest);
    (guest, socket)
}

fn echo_once(seed: u64) {
    let mut stream = network::connect(ECHO_PORT, PATIENCE).expect("an echo");
    network::echo(&mut stream, ECHO_BYTES, seed, PATIENCE).expect("the same bytes");
}

fn is_sound(guest: &Guest) {
    let console = guest.console().expect("a console");
    for wrong in ["is not a head", "id 0 out of range", "BUG:", "Oops"] {
        assert!(!console.contains(wrong), "{wrong}: {}", guest.log_tails());
    }
}

fn evicts(stage: &Stage) {
    let evicting = || Ok(stage.product.show(VM)?["eviction_blockers"] == serde_json::json!([]));
    stage
        .until("eviction to go on", PATIENCE, evicting)
        .expect("no blocker");
}

/// Ends the other thread, also if this one panics.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// How often the DPU process and the daemon are killed.
fn kills() -> [u64; 2] {
    let given = std::env::var("PAGETIDE_NET_KILLS").unwrap_or_else(|_| "6,2".to_owned());
    let (dpu, daemon) = given.split_once(',').expect("two numbers");
    [dpu, daemon].map(|count| count.parse().expect("a number of kills"))
}

#[test]
fn guest_uses_its_network_on_after_deaths_of_the_dpu_process_and_of_the_daemon() {
    on_stage(|stage| {
        let (mut guest, socket) = squeezed(stage);
        let (over, echoed) = (AtomicBool::new(false), AtomicU64::new(0));
        thread::scope(|scope| {
            let ended = SetOnDrop(&over);
            let talking = scope.spawn(|| {
                // One connection: it lives as long as the guest.
                let mut stream = network::connect(ECHO_PORT, PATIENCE).expect("an echo");
                while !over.load(Ordering::Relaxed) {
                    let seed = echoed.fetch_add(1, Ordering::Relaxed);
                    network::echo(&mut stream, ECHO_BYTES, seed, PATIENCE).expect("the same bytes");
                }
            });
            let [mut of_dpu, mut of_daemon] = kills();
            let mut random = SplitMix64::new(19);
            while of_dpu + of_daemon > 0 {
                let goal = echoed.load(Ordering::Relaxed) + 2 + random.below(4);
                stage
                    .until("the connection to go on", PATIENCE, || {
                        assert!(!talking.is_finished(), "the connection broke");
                        Ok(echoed.load(Ordering::Relaxed) >= goal)
                    })
                    .unwrap_or_else(|error| panic!("{error}\n{}", guest.log_tails()));
                if random.below(of_dpu + of_daemon) < of_dpu {
                    of_dpu -= 1;
                    let dpu = stage.dpu.as_mut().expect("a DPU process");
                    dpu.kill();
                    dpu.run().expect("a successor");
                } else {
                    of_daemon -= 1;
                    stage.product.kill();
                    stage.product.run().expect("a successor");
                }
                is_sound(&guest);
            }
            drop(ended);
        });
        echo_once(1);
        evicts(stage);
        is_sound(&guest);
        let device = stage.devices().device(&socket).expect("a device");
        assert_eq!(device["state"], "connected", "{device}");
        assert_eq!(number(&device, "failed_requests"), 0, "{device}");
        work(&mut guest, 64 << 20);
        let_go(stage, &mut guest);
    });
}

#[test]
fn without_the_daemon_packets_fill_present_buffers_then_the_store_and_then_are_counted() {
    on_stage(|stage| {
        let (mut guest, socket) = squeezed(stage);
        stage.product.reclaim(VM, 192 << 20).expect("an eviction");
        let before = device_counts(stage, &socket);
        stage.product.kill();
        let sender = UdpSocket::bind("0.0.0.0:0").expect("a socket");
        stage
            .until("packets to be lost to faults", PATIENCE, || {
                for _ in 0..64 {
                    // The TAP's own queue may be full: that loss is not ours.
                    if sender.send_to(&[7; 1400], (GUEST, 9)).is_err() {
                        break;
                    }
                }
                Ok(device_counts(stage, &socket)["lost"] > before["lost"])
            })
            .expect("a loss that is counted");
        let away = device_counts(stage, &socket);
        assert!(away["stored"] > before["stored"], "{away:?}");
        assert!(away["peak"] <= STORE_BYTES, "{away:?}");
        stage.product.run().expect("a successor");
        echo_once(2);
        evicts(stage);
        is_sound(&guest);
        work(&mut guest, 64 << 20);
        let_go(stage, &mut guest);
    });
}

fn device_counts(stage: &Stage, socket: &Path) -> std::collections::BTreeMap<&'static str, u64> {
    let device = stage.devices().device(socket).expect("a device");
    let counts = [
        ("lost", "fault_dropped_packets"),
        ("stored", "stored_packets"),
        ("peak", "stored_peak_bytes"),
    ];
    counts.map(|(name, of)| (name, number(&device, of))).into()
}
