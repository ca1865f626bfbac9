// SPDX-License-Identifier: Apache-2.0
//! One death: its act is begun, the process killed in the middle, a successor started, and everybody waited for.
//!
//! ```text
//!   prepare ─ act begins ──┬── share of its expected time ──► KILL ─ reap ─ spawn ─ ready ─ vCPUs, disk go on ─ mend
//!   expected time is learnt┘                                   │                             │
//!                                          is it under way? ◄──┘      longest pause of a vCPU ┘
//! ```
//! Whether an act is under way is observed, not assumed: an attach, a detach, an eviction or an upgrade is if its
//! client has no answer yet; faults, sinking and slow fills are if their counters have just grown; a recovery is if
//! the successor does not serve yet.

use super::{
    plan::{Act, Death, Victim},
    process::{Asked, PATIENCE},
    scene::{MAIN, Main, SMALL, Scene, Squeeze},
    tally::{InUse, Played},
};
use crate::{busy::guest::Order, harness::figures::to_f64};
use hyper::Method;
use pagetide_sys::clock::{self, now_ns};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

/// How long an act is expected to take before it was seen.
const FIRST_EXPECTED: Duration = Duration::from_millis(60);
/// For acts without an end.
const NO_END: Duration = Duration::from_millis(150);
/// A counter that grew so shortly ago is still growing.
const JUST_NOW: Duration = Duration::from_millis(10);
/// Longest wait for a counter to grow.
const GROWS_WAIT: Duration = Duration::from_secs(4);
/// Between two looks at it.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// Between two looks whether an upgrade is over.
const SETTLE_AGAIN: Duration = Duration::from_millis(5);

/// How long acts take, as far as it was seen.
#[derive(Default)]
pub(super) struct Expected(BTreeMap<Act, Duration>);

impl Expected {
    fn of(&self, act: Act) -> Duration {
        match act {
            Act::Running | Act::Budgeting => NO_END,
            Act::Sinking | Act::SlowFilling => JUST_NOW,
            _ => self.0.get(&act).copied().unwrap_or(FIRST_EXPECTED),
        }
    }

    /// The act took so long, without a death in it.
    fn learn(&mut self, act: Act, took: Duration) {
        let expected = self.0.entry(act).or_insert(took);
        *expected = (*expected * 3 + took) / 4;
    }

    /// When to kill, from the beginning of the act on.
    fn instant(&self, death: Death) -> Duration {
        self.of(death.act).mul_f64(to_f64(death.permille) / 1000.0)
    }
}

/// What was begun.
enum Begun {
    Asked(Asked),
    /// A counter of *main* grows.
    Grows,
    /// It never grew.
    Quiet,
    Budget,
    Nothing,
}

/// What a kill has cost so far.
struct Down {
    killed_ns: u64,
    starts_ns: u64,
}

fn number(vm: &Value, name: &str) -> u64 {
    vm[name].as_u64().unwrap_or(0)
}

/// Plays `death`.
pub(super) fn play(
    scene: &mut Scene,
    expected: &mut Expected,
    death: Death,
) -> Result<Played, String> {
    let began = prepare(scene, death.act)?;
    let before = scene.vm(MAIN)?;
    let in_use = InUse {
        zero_pages: number(&before, "zero_pages"),
        same_filled_pages: number(&before, "same_filled_pages"),
        lz4_pages: number(&before, "lz4_pages"),
        zstd_pages: number(&before, "zstd_pages"),
        disk_pages: number(&before, "disk_pages"),
        remote_pages: number(&before, "remote_pages"),
    };
    let quiet_ns = scene.begin_watch()?;
    scene.drain_disk()?;
    let begun = begin(scene, death.act, began)?;
    let since = Instant::now();
    let instant = expected.instant(death);
    sleep_until(since, instant, &begun);
    if let (Begun::Asked(asked), true) = (&begun, death.act != Act::Recovering)
        && !asked.is_under_way()
    {
        expected.learn(death.act, since.elapsed());
    }
    let mut is_under_way = looks_under_way(scene, &begun)?;
    let mut down = match death.act {
        Act::Upgrading => {
            is_under_way |= scene.daemon.pids().len() > 1;
            kill_in_upgrade(scene, death.victim)?
        }
        _ => kill(scene, death.victim)?,
    };
    if death.act == Act::Recovering {
        let instant = expected.instant(death);
        std::thread::sleep(instant);
        is_under_way = !is_ready(scene, death.victim);
        if death.victim != Victim::Dpu {
            down.starts_ns += scene.daemon.start_ns_since(down.killed_ns);
        }
        kill(scene, death.victim)?;
    }
    let recovery_ns = wait_until_served(scene, death, &mut down)?;
    if death.victim != Victim::Dpu && death.act != Act::Upgrading {
        expected.learn(Act::Recovering, Duration::from_nanos(recovery_ns));
    }
    let served_ns = now_ns();
    let gap_ns = scene.wait_for_vcpus(served_ns)?;
    let disk = scene.wait_for_disk()?;
    after(scene, death.act, begun)?;
    Ok(Played {
        death,
        is_under_way,
        quiet_ns,
        stall_ns: gap_ns.saturating_sub(down.starts_ns),
        start_ns: down.starts_ns,
        recovery_ns,
        in_use,
        disk,
    })
}

/// What an act needs before it begins.
fn prepare(scene: &mut Scene, act: Act) -> Result<Option<&'static str>, String> {
    match act {
        Act::Attaching => scene.detach_small().map(|()| None),
        Act::Sinking => {
            let path = format!("/v1/vms/{MAIN}/reclaim");
            scene.daemon.order(Method::POST, &path, &json!({}))?;
            Ok(Some("sunk_pages"))
        }
        Act::SlowFilling => {
            // What was cold becomes hot.
            if let Main::StandIn(guest) = &mut scene.main {
                guest.obey(&Order::Move { sections: 8 })?;
            }
            Ok(Some("slowly_loaded_pages"))
        }
        Act::Running => Ok(Some("vcpu_faults")),
        _ => Ok(None),
    }
}

fn begin(scene: &Scene, act: Act, grows: Option<&'static str>) -> Result<Begun, String> {
    let ask = |method, path: &str, body| {
        let asked = scene.daemon.order_aside(method, path, body);
        asked.map(Begun::Asked)
    };
    match act {
        Act::Running | Act::Sinking | Act::SlowFilling => wait_for_growth(scene, grows),
        Act::Attaching => ask(Method::POST, "/v1/vms", Some(scene.attach_body(SMALL))),
        Act::Detaching => ask(Method::DELETE, &format!("/v1/vms/{SMALL}"), None),
        Act::Evicting => {
            let path = format!("/v1/vms/{MAIN}/reclaim");
            ask(Method::POST, &path, Some(json!({})))
        }
        Act::Upgrading => {
            let body = json!({"program": scene.program});
            ask(Method::POST, "/v1/upgrade", Some(body))
        }
        Act::Budgeting => {
            scene.set_budget(Squeeze::Strong)?;
            Ok(Begun::Budget)
        }
        Act::Recovering => Ok(Begun::Nothing),
    }
}

/// Waits until a counter of *main* grows, if it does.
fn wait_for_growth(scene: &Scene, counter: Option<&'static str>) -> Result<Begun, String> {
    let Some(counter) = counter else {
        return Ok(Begun::Nothing);
    };
    let first = number(&scene.vm(MAIN)?, counter);
    let begun = Instant::now();
    while begun.elapsed() < GROWS_WAIT {
        std::thread::sleep(LOOK_AGAIN);
        let now = number(&scene.vm(MAIN)?, counter);
        if now > first {
            return Ok(Begun::Grows);
        }
    }
    Ok(Begun::Quiet)
}

/// An act without an end is looked at from its beginning; one with an end is not waited for beyond that.
fn sleep_until(since: Instant, instant: Duration, begun: &Begun) {
    let left = || instant.saturating_sub(since.elapsed());
    match begun {
        Begun::Asked(_) | Begun::Grows | Begun::Budget => std::thread::sleep(left()),
        Begun::Quiet | Begun::Nothing => {}
    }
}

/// Whether the act is under way now, as far as can be seen.
fn looks_under_way(scene: &Scene, begun: &Begun) -> Result<bool, String> {
    match begun {
        Begun::Asked(asked) => Ok(asked.is_under_way()),
        // It grew within the last moments, and goes on.
        Begun::Grows => Ok(true),
        Begun::Budget => scene.is_over_budget(),
        Begun::Quiet | Begun::Nothing => Ok(false),
    }
}

/// Kills, and starts successors at once.
fn kill(scene: &mut Scene, victim: Victim) -> Result<Down, String> {
    let killed_ns = now_ns();
    let (daemon, dpu) = match victim {
        Victim::Daemon | Victim::Successor => (true, false),
        Victim::Dpu => (false, true),
        Victim::Both => (true, true),
    };
    if daemon {
        scene.daemon.kill()?;
    }
    if let (Some(process), true) = (&mut scene.dpu, dpu) {
        process.kill()?;
        process.spawn()?;
    }
    if daemon {
        scene.daemon.spawn()?;
    }
    Ok(Down {
        killed_ns,
        starts_ns: 0,
    })
}

/// Kills one of the processes of an upgrade, or both.
fn kill_in_upgrade(scene: &mut Scene, victim: Victim) -> Result<Down, String> {
    let killed_ns = now_ns();
    let pids = scene.daemon.pids();
    match (victim, &pids[..]) {
        (Victim::Daemon, [old, ..]) => scene.daemon.kill_one(*old).map(|_| ())?,
        (Victim::Successor, [.., new]) => scene.daemon.kill_one(*new).map(|_| ())?,
        _ => scene.daemon.kill().map(|_| ())?,
    }
    Ok(Down {
        killed_ns,
        starts_ns: 0,
    })
}

fn is_ready(scene: &mut Scene, victim: Victim) -> bool {
    match (victim, &mut scene.dpu) {
        (Victim::Dpu, Some(dpu)) => dpu.is_ready(),
        _ => scene.daemon.is_ready(),
    }
}

/// Waits until all serve; how long the last one needed from its spawn on.
fn wait_until_served(scene: &mut Scene, death: Death, down: &mut Down) -> Result<u64, String> {
    if death.act == Act::Upgrading {
        settle(scene)?;
        down.starts_ns += scene.daemon.start_ns_since(down.killed_ns);
        return Ok(now_ns().saturating_sub(down.killed_ns));
    }
    let mut recovery_ns = 0;
    if let (Some(dpu), Victim::Dpu | Victim::Both) = (&mut scene.dpu, death.victim) {
        dpu.wait_until_ready()?;
        recovery_ns = dpu.recovery_ns();
    }
    if death.victim != Victim::Dpu {
        scene.daemon.wait_until_ready()?;
        recovery_ns = scene.daemon.recovery_ns();
        down.starts_ns += scene.daemon.start_ns_since(down.killed_ns);
    }
    Ok(recovery_ns)
}

/// Waits until an upgrade that was disturbed has come to its end; starts a daemon if none is left.
fn settle(scene: &mut Scene) -> Result<(), String> {
    let begun = Instant::now();
    loop {
        let pids = scene.daemon.pids();
        if pids.is_empty() {
            // Its group is gone; what is left of the leader is reaped.
            scene.daemon.kill()?;
            scene.daemon.spawn()?;
            return scene.daemon.wait_until_ready();
        }
        let report = match pids.len() {
            1 => scene.daemon.try_ask("/v1/upgrade"),
            _ => None,
        };
        if report.is_some_and(|report| report["state"] != "under-way") {
            return Ok(());
        }
        if begun.elapsed() > PATIENCE {
            return Err(scene.daemon.with_log("an upgrade does not come to an end"));
        }
        std::thread::sleep(SETTLE_AGAIN);
    }
}

/// Ends what the act has begun.
fn after(scene: &Scene, act: Act, begun: Begun) -> Result<(), String> {
    if let Begun::Asked(asked) = begun {
        // An answer, or a connection that broke: both are right.
        match asked.answer() {
            Ok(answer) => tracing::debug!(?act, %answer, "it was done before the death"),
            Err(error) => tracing::debug!(?act, error, "it was cut off"),
        }
    }
    if act == Act::Budgeting {
        scene.set_budget(Squeeze::Usual)?;
    }
    scene.mend()
}

/// Has an act done, and returns how long it has taken. An upgrade is refused while a tier is slow, as a disk may be that
/// others use, too.
fn once(scene: &mut Scene, act: Act) -> Result<Duration, String> {
    let begun = Instant::now();
    loop {
        let since = Instant::now();
        let answer = match begin(scene, act, None)? {
            Begun::Asked(asked) => asked.answer(),
            _ => return Ok(since.elapsed()),
        };
        match answer {
            Ok(_) if act == Act::Upgrading => {
                settle(scene)?;
                return Ok(since.elapsed());
            }
            Ok(_) => return Ok(since.elapsed()),
            Err(_) if act == Act::Upgrading && begun.elapsed() < PATIENCE => {
                std::thread::sleep(SETTLE_AGAIN);
            }
            Err(error) => return Err(scene.daemon.with_log(error)),
        }
    }
}

/// Each act once, without a death, so that it is known how long it takes.
pub(super) fn rehearse(scene: &mut Scene, expected: &mut Expected) -> Result<(), String> {
    for act in [
        Act::Evicting,
        Act::Detaching,
        Act::Attaching,
        Act::Upgrading,
    ] {
        if act == Act::Attaching {
            if scene.state(SMALL)?.is_some() {
                scene.detach_small()?;
            }
        } else {
            scene.mend()?;
        }
        let took = once(scene, act)?;
        expected.learn(act, took);
    }
    let before = Instant::now();
    kill(scene, Victim::Daemon)?;
    scene.daemon.wait_until_ready()?;
    let took = clock::ns(before.elapsed());
    expected.learn(Act::Recovering, Duration::from_nanos(took));
    scene.mend()
}
