// SPDX-License-Identifier: Apache-2.0
//! The VM of a test whose memory goes to a slow tier: this process, which a daemon knows as `a`.

use crate::daemon::{Daemon, number};
use serde_json::Value;

/// What a page holds: half of it compresses, and none of it is made of one word.
pub fn content(page: u64) -> Vec<u8> {
    let mut word = page.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(4096);
    while bytes.len() < 4096 {
        word = word.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let part = match bytes.len() < 2048 || page.is_multiple_of(4) {
            true => word,
            false => page | 1 << 40,
        };
        bytes.extend_from_slice(&part.to_le_bytes());
    }
    bytes
}

pub fn attach(daemon: &Daemon) {
    let own = std::process::id().to_string();
    daemon.json(&["attach", "--pid", &own, "--name", "a"]);
}

pub fn show(daemon: &Daemon) -> Value {
    daemon.json(&["vm", "show", "a"])
}

/// The only slow tier.
pub fn tier(daemon: &Daemon) -> Value {
    daemon.json(&["pool", "show"])["tiers"][0].clone()
}

/// Until more than `pages` pages are where the report counts them as `figure`.
pub fn sink(daemon: &mut Daemon, figure: &str, pages: u64) {
    daemon.until("memory on the tier", |daemon| {
        daemon.client(&["vm", "reclaim", "a"]);
        number(&show(daemon), figure) > pages
    });
}
