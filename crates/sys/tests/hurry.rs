// SPDX-License-Identifier: Apache-2.0
//! All threads of a process hurry: so this is a process of its own.

use pagetide_sys::{
    cpu::{self, Urgency, priority},
    hurry::Hurry,
};
use std::{fs, sync::mpsc::channel};

/// Real-time priority and policy of a thread of this process: fields 40 and 41 of its `stat`, counted after the name.
fn scheduling(thread: u32) -> (u32, u32) {
    let stat = fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap();
    let (_, fields) = stat.rsplit_once(')').unwrap();
    let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
    (fields[37].parse().unwrap(), fields[38].parse().unwrap())
}

fn own() -> (u32, u32) {
    scheduling(cpu::thread_id())
}

/// `SCHED_RR`.
const HURRIED: (u32, u32) = (priority::HURRY as u32, 2);

#[test]
fn all_threads_hurry_and_those_they_start_and_are_as_before_afterwards() {
    let (tell, told) = channel();
    let (go_on, wait) = channel::<()>();
    let weak = std::thread::spawn(move || {
        cpu::set_urgency(Urgency::Idle).unwrap();
        tell.send(cpu::thread_id()).unwrap();
        wait.recv().unwrap();
    });
    let weak_id = told.recv().unwrap();
    let before = (own(), scheduling(weak_id));
    let hurry = Hurry::begin();
    if own() != HURRIED {
        assert_eq!(own(), before.0, "nothing happens without the right");
        eprintln!("SKIPPED: no CAP_SYS_NICE");
        return;
    }
    assert_eq!(scheduling(weak_id), HURRIED);
    let (tell, told) = channel();
    let (end, wait) = channel::<()>();
    let newcomer = std::thread::spawn(move || {
        tell.send(own()).unwrap();
        wait.recv().unwrap();
        own()
    });
    let chooser = std::thread::spawn(|| {
        cpu::set_urgency(Urgency::Preempting(priority::RECLAIM)).unwrap();
        own()
    });
    assert_eq!(told.recv().unwrap(), HURRIED, "it inherits that");
    assert_ne!(chooser.join().unwrap(), HURRIED, "nobody else has that");
    drop(hurry);
    assert_eq!((own(), scheduling(weak_id)), before);
    end.send(()).unwrap();
    assert_eq!(newcomer.join().unwrap(), before.0);
    go_on.send(()).unwrap();
    weak.join().unwrap();

    let left = Hurry::begin().leave();
    assert_eq!(own(), HURRIED, "it goes on");
    drop(Hurry::inherited(left));
    assert_eq!(own(), before.0);
}
