// SPDX-License-Identifier: Apache-2.0
//! A real server that works, ends, comes back, is full, is refused.

use std::time::Duration;

use pagetide_tiers::remote::{Durability, FirstContact, RemoteTier, WhenGone};
use pagetide_tiers::{SlowTier, Standing, TierError, TierKind, Version};

use crate::server::Server;
use crate::{
    NOT_THERE, STUCK, assert_not_there, assert_pages, begin_read, config, extent, pages, read,
    reason, until, working, write,
};

const LOGGED: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];

#[test]
fn pages_written_are_read_until_they_are_forgotten() {
    let Some(server) = Server::start(&[]) else {
        return;
    };
    let tier = working(config(&server.url()));
    let contents = pages(1, 512);
    let places = write(&tier, extent(1), &contents).unwrap();
    let other = pages(2, 3);
    let other_places = write(&tier, extent(2), &other).unwrap();
    assert_pages(&tier, &places, &contents);
    assert_pages(&tier, &other_places, &other);
    let figures = tier.figures();
    let bytes: u64 = contents
        .iter()
        .chain(&other)
        .map(|page| page.len() as u64)
        .sum();
    assert_eq!(figures.stored_bytes, bytes);
    assert_eq!((figures.pages_written, figures.pages_read), (515, 515));
    assert_eq!((figures.batches_written, figures.written_bytes), (2, bytes));
    assert_eq!(
        (figures.read_latency.count, figures.write_latency.count),
        (515, 2)
    );
    assert_eq!((figures.read_errors, figures.write_errors), (0, 0));

    tier.forget(&places);
    // The other extent and the marker stay.
    until("the deletion", || server.query::<u64>(&["DBSIZE"]) == 4);
    assert_not_there(&tier, &places[..1]);
    assert_eq!(tier.notes().pages_not_there, 1);
    assert_pages(&tier, &other_places, &other);
    tier.forget_vm(extent(2).vm, &[extent(2)]);
    until("the deletion", || server.query::<u64>(&["DBSIZE"]) == 1);
    assert_eq!(tier.figures().stored_bytes, 0);
    drop(tier);
    assert_eq!(server.query::<u64>(&["DBSIZE"]), 0);
}

#[test]
fn successor_reads_what_its_predecessor_wrote() {
    let Some(server) = Server::start(&[]) else {
        return;
    };
    let contents = pages(3, 9);
    let places = write(&working(config(&server.url())), extent(5), &contents).unwrap();
    let tier = RemoteTier::start(config(&server.url())).unwrap();
    tier.hold(extent(5).vm, Version(9), [extent(5)]);
    tier.recover(extent(5).vm, &places).unwrap();
    tier.first_contact(STUCK);
    assert!(tier.figures().stored_bytes >= 9 * 512);
    assert_pages(&tier, &places, &contents);
    tier.forget(&places);
    until("the deletion", || server.query::<u64>(&["DBSIZE"]) == 1);
}

#[test]
fn limit_refuses_batches_and_not_reads() {
    let Some(server) = Server::start(&[]) else {
        return;
    };
    let mut config = config(&server.url());
    config.limit_bytes = 10_000;
    let tier = working(config);
    let contents = vec![vec![1; 4112], vec![2; 4112]];
    let places = write(&tier, extent(1), &contents).unwrap();
    let refused = write(&tier, extent(2), &contents);
    assert_eq!(refused, Err(TierError::Full(TierKind::Remote)));
    assert_eq!(tier.health().standing, Standing::Working);
    assert_pages(&tier, &places, &contents);
    tier.forget(&places);
    write(&tier, extent(3), &contents).unwrap();
}

#[test]
fn server_with_a_log_loses_nothing_and_reads_wait_for_it() {
    let Some(mut server) = Server::start(&LOGGED) else {
        return;
    };
    let tier = working(config(&server.url()));
    assert_eq!(tier.notes().durability, Durability::Always);
    let contents = pages(4, 512);
    let places = write(&tier, extent(1), &contents).unwrap();
    for round in 0..3 {
        server.kill();
        let answers: Vec<_> = places
            .iter()
            .map(|&place| begin_read(&tier, place))
            .collect();
        until("the end of the connection", || {
            matches!(tier.health().standing, Standing::Gone { .. })
        });
        let refused = write(&tier, extent(2 + round), &pages(5, 2));
        assert!(
            matches!(refused, Err(TierError::Gone { .. })),
            "{refused:?}"
        );
        server.start_again();
        for (answer, page) in answers.iter().zip(&contents) {
            assert_eq!(answer.recv_timeout(STUCK).unwrap().as_ref(), Ok(page));
        }
        until("working again", || {
            tier.health().standing == Standing::Working
        });
    }
    assert_eq!(tier.notes().losses, 0);
    let more = pages(6, 7);
    let more_places = write(&tier, extent(9), &more).unwrap();
    assert_pages(&tier, &more_places, &more);
}

#[test]
fn pages_that_were_lost_are_asked_for_again_once_their_marker_is_back() {
    let Some(mut server) = Server::start(&LOGGED) else {
        return;
    };
    let tier = working(config(&server.url()));
    let contents = pages(17, 40);
    let places = write(&tier, extent(10), &contents).unwrap();
    server.kill();
    server.put_data_aside();
    server.start_again();
    until("the discovery", || {
        tier.notes().losses == 1 && tier.health().standing == Standing::Working
    });
    assert_not_there(&tier, &places);
    let new = pages(18, 5);
    let new_places = write(&tier, extent(11), &new).unwrap();
    // As an operator who has a copy. What was written since goes with the server that was empty.
    server.kill();
    server.put_data_back();
    server.start_again();
    until("the discovery", || {
        tier.notes().losses == 2 && tier.health().standing == Standing::Working
    });
    assert_pages(&tier, &places, &contents);
    assert_not_there(&tier, &new_places);
    let places = write(&tier, extent(12), &contents).unwrap();
    assert_pages(&tier, &places, &contents);
    drop(tier);
    let markers: Vec<String> = server.query(&["KEYS", "pagetide:marker:*"]);
    assert!(markers.is_empty(), "{markers:?}");
}

#[test]
fn server_without_a_log_loses_its_pages_and_that_is_told() {
    let Some(mut server) = Server::start(&["--appendonly", "no"]) else {
        return;
    };
    let tier = working(config(&server.url()));
    assert_eq!(tier.notes().durability, Durability::Nothing);
    let places = write(&tier, extent(10), &pages(7, 64)).unwrap();
    server.kill();
    let waiting = begin_read(&tier, places[0]);
    server.start_again();
    assert_eq!(waiting.recv_timeout(STUCK).unwrap(), Err(NOT_THERE));
    assert_not_there(&tier, &places);
    assert_eq!(tier.notes().losses, 1);
    until("working again", || {
        tier.health().standing == Standing::Working
    });

    // A version from before the loss would be taken for lost.
    let late = write(&tier, extent(9), &pages(8, 1));
    assert!(matches!(late, Err(TierError::Io { .. })), "{late:?}");
    let contents = pages(9, 64);
    let places = write(&tier, extent(11), &contents).unwrap();
    assert_pages(&tier, &places, &contents);
}

#[test]
fn server_that_was_emptied_is_told_and_new_pages_are_read() {
    let Some(server) = Server::start(&[]) else {
        return;
    };
    let tier = working(config(&server.url()));
    let places = write(&tier, extent(1), &pages(10, 3)).unwrap();
    let _: () = server.query(&["FLUSHALL"]);
    let contents = pages(11, 3);
    let new_places = write(&tier, extent(2), &contents).unwrap();
    until("the discovery", || tier.notes().losses == 1);
    assert_not_there(&tier, &places);
    assert_pages(&tier, &new_places, &contents);
}

#[test]
fn reads_of_a_server_that_stays_away_fail_if_so_chosen() {
    let Some(mut server) = Server::start(&LOGGED) else {
        return;
    };
    let mut config = config(&server.url());
    config.when_gone = WhenGone::Lost;
    config.bounds.read = Duration::from_millis(200);
    let tier = working(config);
    let contents = pages(12, 2);
    let places = write(&tier, extent(1), &contents).unwrap();
    server.kill();
    let lost = read(&tier, places[0]);
    assert!(matches!(lost, Err(TierError::Gone { .. })), "{lost:?}");
    assert!(lost.unwrap_err().may_pass());
    server.start_again();
    until("working again", || {
        tier.health().standing == Standing::Working
    });
    assert_pages(&tier, &places, &contents);
}

#[test]
fn full_server_refuses_batches_and_takes_them_again_after_deletions() {
    let Some(server) = Server::start(&["--maxmemory", "8mb"]) else {
        return;
    };
    let tier = working(config(&server.url()));
    let contents = vec![vec![7; 4112]; 512];
    let mut kept = Vec::new();
    let full = (1..100).find_map(|version| match write(&tier, extent(version), &contents) {
        Ok(places) => {
            kept.push(places);
            None
        }
        Err(error) => Some(error),
    });
    assert_eq!(full, Some(TierError::Full(TierKind::Remote)));
    assert!(!kept.is_empty());
    assert_pages(&tier, &kept[0], &contents);
    // What had arrived of the refused batch is deleted; then there may be room for a marker.
    until("the deletion", || {
        server.query::<usize>(&["DBSIZE"]) == 512 * kept.len() + 1
    });
    for places in &kept {
        tier.forget(places);
    }
    until("room", || tier.health().standing == Standing::Working);
    until("the deletion", || server.query::<u64>(&["DBSIZE"]) == 1);
    let places = write(&tier, extent(100), &contents).unwrap();
    assert_pages(&tier, &places, &contents);
}

#[test]
fn server_without_room_for_a_marker_is_full_and_returns_pages() {
    let Some(server) = Server::start(&[]) else {
        return;
    };
    let tier = working(config(&server.url()));
    let contents = pages(16, 9);
    let places = write(&tier, extent(1), &contents).unwrap();
    let _: () = server.query(&["CONFIG", "SET", "maxmemory", "1"]);
    let full = TierError::Full(TierKind::Remote);
    for version in 2..5 {
        assert_eq!(write(&tier, extent(version), &contents), Err(full.clone()));
        assert_eq!(tier.health().standing, Standing::Full);
        assert_pages(&tier, &places, &contents);
    }
    let _: () = server.query(&["CONFIG", "SET", "maxmemory", "0"]);
    until("room", || tier.health().standing == Standing::Working);
    write(&tier, extent(9), &contents).unwrap();
}

#[test]
fn server_that_evicts_is_refused_until_it_does_not() {
    let Some(server) = Server::start(&["--maxmemory-policy", "allkeys-lru"]) else {
        return;
    };
    let tier = pagetide_tiers::remote::RemoteTier::start(config(&server.url())).unwrap();
    let (contact, health) = tier.first_contact(STUCK);
    assert_eq!(contact, FirstContact::Refused);
    assert!(
        matches!(health.standing, Standing::Gone { .. }),
        "{health:?}"
    );
    assert!(reason(&tier).contains("allkeys-lru"), "{}", reason(&tier));
    let refused = write(&tier, extent(1), &pages(13, 1));
    assert!(refused.unwrap_err().to_string().contains("allkeys-lru"));
    let _: () = server.query(&["CONFIG", "SET", "maxmemory-policy", "noeviction"]);
    until("working", || tier.health().standing == Standing::Working);
    write(&tier, extent(1), &pages(13, 1)).unwrap();
}

#[test]
fn wrong_password_is_told_and_never_printed() {
    let Some(server) = Server::start(&["--requirepass", "right-one"]) else {
        return;
    };
    for (url, expected) in [
        (server.url(), "wants a password"),
        (
            server.url().replace("//", "//:wr0ng-one@localhost"),
            "refuses the user or the password",
        ),
    ] {
        let tier = pagetide_tiers::remote::RemoteTier::start(config(&url)).unwrap();
        let (contact, _) = tier.first_contact(STUCK);
        assert_eq!(contact, FirstContact::Refused);
        let reason = reason(&tier);
        assert!(reason.contains(expected), "{reason}");
        assert!(!format!("{reason} {tier:?}").contains("wr0ng-one"));
    }
    let tier = working(config(
        &server.url().replace("//", "//:right-one@localhost"),
    ));
    let contents = pages(14, 1);
    let places = write(&tier, extent(1), &contents).unwrap();
    assert_pages(&tier, &places, &contents);
}

#[test]
fn user_with_few_rights_works_if_the_policy_can_be_known_or_is_vouched_for() {
    let rights = [
        "on",
        ">secret",
        "~pagetide:*",
        "-@all",
        "+get",
        "+set",
        "+unlink",
    ];
    let silent = [["--user", "silent"].as_slice(), &rights].concat();
    let telling = [["--user", "telling"].as_slice(), &rights, &["+info"]].concat();
    let Some(server) = Server::start(&[silent, telling].concat()) else {
        return;
    };
    let url = |user: &str| {
        server
            .url()
            .replace("//", &format!("//{user}:secret@localhost"))
    };
    let tier = pagetide_tiers::remote::RemoteTier::start(config(&url("silent"))).unwrap();
    tier.first_contact(STUCK);
    assert!(
        reason(&tier).contains("noeviction=vouched"),
        "{}",
        reason(&tier)
    );
    let vouched = format!("{}?noeviction=vouched", url("silent"));
    for (url, durability) in [
        (url("telling"), Durability::Nothing),
        (vouched, Durability::Unknown),
    ] {
        let tier = working(config(&url));
        assert_eq!(tier.notes().durability, durability);
        let contents = pages(15, 5);
        let places = write(&tier, extent(1), &contents).unwrap();
        assert_pages(&tier, &places, &contents);
        tier.forget(&places);
    }
}
