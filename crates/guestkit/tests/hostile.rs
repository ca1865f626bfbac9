// SPDX-License-Identifier: Apache-2.0
//! Front ends that mean harm: each may stop its own device and nothing else.
//!
//! One daemon with one engine serves a victim that verifies its data, and is
//! attacked on another device, case after case. A case that harms anybody is told
//! with its name and the end of the daemon's log, and the next one gets a daemon of
//! its own. `HOSTILE=name,name` runs only the cases whose names hold one of these.

use std::io::{BufRead as _, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use pagetide_guestkit::hostile::scene::{Scene, Verdict};
use pagetide_guestkit::hostile::{Attack, attacks};
use pagetide_guestkit::product::Product;

/// Fewer would be another suite.
const CASES_MIN: usize = 100;
/// What is held while a device is removed, or the daemon ends.
const HELD: [&str; 10] = [
    "call-full-and-blocking",
    "error-full-and-blocking",
    "connects-and-says-nothing",
    "header-half-and-held",
    "never-reads-features",
    "never-reads-inflight-regions",
    "ram-lent-on-silent-fuse",
    "shrink-used-ring-idle",
    "kick-storm",
    "holds-requests-in-flight",
];

/// The binary, or `None` where it is not built.
fn binary() -> Option<PathBuf> {
    match Product::binary() {
        Ok(binary) => Some(binary),
        Err(error) => {
            eprintln!("SKIPPED: {error}: build it with `cargo build --release -p pagetide`");
            None
        }
    }
}

/// The cases that are asked for.
fn cases() -> Vec<Attack> {
    let wanted = std::env::var("HOSTILE").unwrap_or_default();
    let is_wanted = |attack: &Attack| wanted.split(',').any(|part| attack.name.contains(part));
    let all = attacks();
    assert!(all.len() >= CASES_MIN, "{} cases", all.len());
    all.into_iter().filter(is_wanted).collect()
}

#[test]
fn attack_of_each_kind_harms_nobody_but_its_own_device() {
    let Some(binary) = binary() else { return };
    let began = Instant::now();
    let (mut scene, mut failed, mut skipped) = (None, Vec::new(), 0);
    let cases = cases();
    for attack in &cases {
        let current = match scene.take() {
            Some(scene) => scene,
            None => Scene::set(&binary).expect("a daemon with a victim"),
        };
        let case_began = Instant::now();
        let outcome = current.play(attack);
        let took = case_began.elapsed().as_millis();
        match outcome {
            Ok(Verdict::Right(seen)) => println!("ok       {} ({seen:?}, {took} ms)", attack.name),
            Ok(Verdict::Skipped(why)) => {
                println!("SKIPPED  {}: {why}", attack.name);
                skipped += 1;
            }
            Err(why) => {
                println!("FAILED   {} ({took} ms): {why}", attack.name);
                println!("{}", indented(&current.log_tail()));
                failed.push(format!("{}: {why}", attack.name));
                continue;
            }
        }
        scene = Some(current);
    }
    let count = cases.len();
    println!(
        "{count} cases, {} failed, {skipped} skipped, {} s",
        failed.len(),
        began.elapsed().as_secs()
    );
    if let Some(scene) = scene {
        println!("the last victim: {:?}", scene.victim());
        scene.end().expect("an end in time");
    }
    assert!(
        failed.is_empty(),
        "{} of {count} cases failed:\n{}",
        failed.len(),
        failed.join("\n")
    );
}

fn indented(log: &str) -> String {
    let lines = log.lines().map(|line| format!("         | {line}"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Has each of [`HELD`] attack, then does `then`; what it says is wrong.
fn with_each_held(then: impl Fn(Scene) -> Result<(), String>) -> Vec<String> {
    let Some(binary) = binary() else {
        return Vec::new();
    };
    let mut failed = Vec::new();
    for name in HELD {
        let attack = attacks().into_iter().find(|attack| attack.name == name);
        let attack = attack.unwrap_or_else(|| panic!("there is no attack {name}"));
        let scene = Scene::set(&binary).expect("a daemon with a victim");
        // Whatever the attack comes to, it is what it holds that counts here.
        let held = attack.run(&scene.target());
        let outcome = then(scene);
        eprintln!("{name} ({held:?}): {outcome:?}");
        failed.extend(outcome.err().map(|why| format!("{name}: {why}")));
    }
    failed
}

#[test]
fn daemon_ends_in_time_while_attackers_hold_what_they_have() {
    let failed = with_each_held(Scene::end);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn attacked_device_is_removed_while_its_attacker_holds_what_it_has() {
    let failed = with_each_held(|scene| {
        scene.remove_device(&scene.target().socket)?;
        scene.well_meanwhile()
    });
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// A front end as a process of its own is stopped with requests in flight, and then killed.
#[test]
fn front_end_that_freezes_and_dies_with_requests_in_flight_harms_nobody() {
    let Some(binary) = binary() else { return };
    let scene = Scene::set(&binary).expect("a daemon with a victim");
    let target = scene.target();
    let mut front = Command::new(env!("CARGO_BIN_EXE_hostile"))
        .args(["--hold", "holds-requests-in-flight", "--socket"])
        .arg(&target.socket)
        .arg("--folder")
        .arg(&target.folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("a front end");
    let mut line = String::new();
    let out = front.stdout.take().expect("its output");
    BufReader::new(out).read_line(&mut line).expect("a line");
    assert!(line.contains("Served"), "{line}");
    let pid = i32::try_from(front.id())
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let pid = pid.expect("a process id");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("SIGSTOP");
    let frozen = scene.well_meanwhile();
    front.kill().expect("SIGKILL");
    front.wait().expect("its end");
    frozen.expect("nobody harmed while it is frozen");
    scene.well_afterwards().expect("all well after its death");
    scene.end().expect("an end in time");
}
