// SPDX-License-Identifier: Apache-2.0
//! A cluster of three nodes.

use super::{
    PAGES, attach,
    daemon::{Daemon, command},
    far::FarServer,
    filled, number, show, sink_all, touch_half, vmm,
};
use std::{
    net::TcpListener,
    path::Path,
    time::{Duration, Instant},
};

/// A third of the slots, to the end of the last.
const SLOTS: [(&str, &str); 3] = [("0", "5460"), ("5461", "10922"), ("10923", "16383")];
/// After this a cluster does not come about.
const STUCK: Duration = Duration::from_secs(120);

struct Node {
    server: FarServer,
    bus: String,
}

fn node(program: &'static str, folder: &Path) -> Node {
    let free = TcpListener::bind("127.0.0.1:0").unwrap();
    let bus = free.local_addr().unwrap().port().to_string();
    drop(free);
    let options = [
        ["--cluster-enabled", "yes"],
        ["--cluster-port", &bus],
        ["--appendonly", "yes"],
        ["--appendfsync", "always"],
    ];
    let server = FarServer::start(program, folder, options.as_flattened()).unwrap();
    Node { server, bus }
}

fn is_whole(nodes: &[Node]) -> bool {
    nodes.iter().all(|node| {
        let state = node.server.ask(&["CLUSTER", "INFO"]).unwrap_or_default();
        state.contains("cluster_state:ok") && state.contains("cluster_known_nodes:3")
    })
}

fn until_whole(nodes: &[Node]) {
    let begun = Instant::now();
    while !is_whole(nodes) {
        assert!(begun.elapsed() < STUCK, "no cluster");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn cluster(program: &'static str, folder: &Path) -> Vec<Node> {
    let nodes: Vec<Node> = (0..SLOTS.len())
        .map(|number| node(program, &folder.join(number.to_string())))
        .collect();
    for (node, (first, last)) in nodes.iter().zip(SLOTS) {
        let words = ["CLUSTER", "ADDSLOTSRANGE", first, last];
        assert_eq!(node.server.ask(&words).unwrap(), "+OK");
    }
    let (first, others) = nodes.split_first().unwrap();
    let port = first.server.port().to_string();
    for node in others {
        let words = ["CLUSTER", "MEET", "127.0.0.1", &port, &first.bus];
        assert_eq!(node.server.ask(&words).unwrap(), "+OK");
    }
    until_whole(&nodes);
    nodes
}

fn keys(nodes: &[Node]) -> Vec<u64> {
    nodes
        .iter()
        .map(|node| node.server.keys().unwrap())
        .collect()
}

#[test]
fn memory_is_spread_over_a_cluster_and_outlives_a_killed_node_and_a_killed_daemon() {
    let test = "far_cluster::memory_is_spread_over_a_cluster_and_outlives_a_killed_node_and_a_killed_daemon";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return;
    }
    let Some(program) = FarServer::program() else {
        return;
    };
    if !vmm::is_this(test) {
        return;
    }
    let (state, far) = (
        tempfile::tempdir_in("/dev/shm").unwrap(),
        tempfile::tempdir().unwrap(),
    );
    let mut nodes = cluster(program, far.path());
    let start = || {
        // The second one is asked if the first is down.
        let tiers = format!(
            "lz4,remote:redis://127.0.0.1:{}?cluster=true&node=127.0.0.1:{}=512M",
            nodes[0].server.port(),
            nodes[1].server.port(),
        );
        let settings = ["--tiers", &tiers, "--sink-after", "100ms"];
        command(state.path(), &settings)
    };
    let run = start();
    let again = [start(), start()];
    let ram = filled();
    let mut daemon = Daemon::start(state.path(), run);
    attach(&daemon);
    sink_all(&mut daemon);
    let spread = keys(&nodes);
    assert!(spread.iter().sum::<u64>() > PAGES * 9 / 10, "{spread:?}");
    let is_used = |keys: &&u64| **keys > PAGES / 20;
    assert!(spread.iter().filter(is_used).count() >= 2, "{spread:?}");
    // Pages of a node that is killed are waited for until it is back.
    touch_half(&ram, 0, || {
        nodes[2].server.kill().unwrap();
        nodes[2].server.start_again().unwrap();
        until_whole(&nodes);
    });
    assert!(number(&show(&daemon), "remote_pages") > PAGES / 4);
    for run in again {
        daemon.client(&["vm", "reclaim", "a"]);
        drop(daemon);
        daemon = Daemon::start(state.path(), run);
        touch_half(&ram, 1, || {});
    }
    ram.verify();
    let vm = show(&daemon);
    assert_eq!(number(&vm, "poisoned_pages"), 0, "{vm}");
    daemon.json(&["vm", "detach", "a"]);
    // A marker for each life of the daemon.
    daemon.until("an empty cluster", |_| {
        keys(&nodes).iter().sum::<u64>() == 3
    });
}
