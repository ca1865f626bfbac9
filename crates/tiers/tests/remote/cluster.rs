// SPDX-License-Identifier: Apache-2.0
//! A cluster of three nodes.

use pagetide_tiers::SlowTier;

use crate::server::Server;
use crate::{assert_not_there, assert_pages, config, extent, pages, until, working, write};

/// A third of the slots, to the end of the last.
const SLOTS: [(&str, &str); 3] = [("0", "5460"), ("5461", "10922"), ("10923", "16383")];

fn cluster() -> Option<Vec<Server>> {
    let options = [
        "--cluster-enabled",
        "yes",
        "--cluster-config-file",
        "nodes.conf",
    ];
    let of_ports = |port: u16, bus: u16| {
        [
            "--port",
            &port.to_string(),
            "--cluster-port",
            &bus.to_string(),
        ]
        .map(str::to_owned)
        .to_vec()
    };
    let nodes = SLOTS
        .iter()
        .map(|_| Server::on_port(&options, of_ports))
        .collect::<Option<Vec<_>>>()?;
    for (node, (first, last)) in nodes.iter().zip(SLOTS) {
        let _: () = node.query(&["CLUSTER", "ADDSLOTSRANGE", first, last]);
    }
    let bus: String = nodes[0].query(&["CLUSTER", "NODES"]);
    let bus = bus.split(['@', ' ', ',']).nth(2).unwrap().to_owned();
    for node in &nodes[1..] {
        let port = nodes[0].port().to_string();
        let _: () = node.query(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
    }
    until("the cluster", || {
        nodes.iter().all(|node| {
            let state: String = node.query(&["CLUSTER", "INFO"]);
            state.contains("cluster_state:ok") && state.contains("cluster_known_nodes:3")
        })
    });
    Some(nodes)
}

#[test]
fn pages_are_spread_over_a_cluster_extent_by_extent() {
    let Some(nodes) = cluster() else {
        return;
    };
    let port = nodes[0].port();
    let tier = working(config(&format!("redis://127.0.0.1:{port}?cluster=true")));
    let contents = pages(30, 40);
    let places: Vec<_> = (1..=12)
        .map(|version| write(&tier, extent(version), &contents).unwrap())
        .collect();
    for places in &places {
        assert_pages(&tier, places, &contents);
    }
    let sizes: Vec<u64> = nodes.iter().map(|node| node.query(&["DBSIZE"])).collect();
    // The marker is on one of them.
    assert_eq!(sizes.iter().sum::<u64>(), 12 * 40 + 1);
    assert!(
        sizes.iter().filter(|&&size| size >= 40).count() >= 2,
        "{sizes:?}"
    );
    assert!(sizes.iter().all(|size| size % 40 <= 1), "{sizes:?}");
    tier.forget(&places.concat());
    until("the deletion", || {
        let size = |node: &Server| node.query::<u64>(&["DBSIZE"]);
        nodes.iter().map(size).sum::<u64>() == 1
    });
    assert_not_there(&tier, &places[3]);
}
