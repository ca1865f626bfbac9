// SPDX-License-Identifier: Apache-2.0
//! What the policies do in cases that are told apart.

use super::*;

fn policy(on_fault: OnReceiveFault, prefault: Prefault) -> Policy {
    let config = ReceiveConfig {
        on_fault,
        prefault,
        ..ReceiveConfig::default()
    };
    Policy::new(&config, Merging::Mergeable)
}

/// A ring of present buffers with one absent in front of them.
fn one_absent(on_fault: OnReceiveFault) -> Run {
    let mut run = Run::new(0);
    run.on_fault = on_fault;
    run.merging = Merging::Mergeable;
    run.policy = policy(on_fault, Prefault::Off);
    run.ring.chains.push(chain(Is::Absent));
    (1..8).for_each(|_| run.ring.chains.push(chain(Is::Present)));
    run
}

/// A chain with room for any packet.
fn chain(is: Is) -> Chain {
    Chain {
        room: 200,
        is,
        lost: false,
        used: Use::Free,
        wired: false,
    }
}

#[test]
fn one_absent_buffer_costs_what_the_policy_says() {
    // Reported before the answer and after it, stored, lost.
    for (on_fault, before, after, stored, lost) in [
        (OnReceiveFault::Drop, 0, 0, 0, 4),
        (OnReceiveFault::Pause, 0, 4, 4, 0),
        (OnReceiveFault::BackupRing, 0, 4, 1, 0),
        (OnReceiveFault::OutOfOrder, 4, 4, 0, 0),
    ] {
        let mut run = one_absent(on_fault);
        for _ in 0..4 {
            run.arrive();
            while run.step() {}
        }
        assert_eq!(run.reported.len(), before, "{on_fault:?}");
        assert_eq!(run.next_id, stored, "{on_fault:?}");
        assert_eq!(run.lost.len(), lost, "{on_fault:?}");
        assert_eq!(run.asked, [(ChainNo(0), Need::Now)], "{on_fault:?}");
        run.answer(Answers::Pages);
        while run.step() {}
        assert_eq!(run.reported.len(), after, "{on_fault:?}");
        run.arrive();
        assert_eq!(run.reported.len(), after + 1, "{on_fault:?}");
    }
}

#[test]
fn chain_whose_pages_do_not_come_is_given_up_and_holds_nothing_up_until_then() {
    let mut run = one_absent(OnReceiveFault::OutOfOrder);
    run.policy = policy(OnReceiveFault::OutOfOrder, Prefault::Posted);
    let rounds = 16 * usize::from(RING);
    let mut packets = 0;
    while run.ring.at(ChainNo(0)).used == Use::Free {
        assert!(packets <= rounds + 16, "it is kept for ever");
        run.ring.chains.push(chain(Is::Absent));
        while run.step() {}
        // Pages are requested ahead however far behind the oldest one is, and come.
        let ahead = run.asked.iter().map(|(no, _)| *no).filter(|no| no.0 > 0);
        for no in ahead.collect::<Vec<_>>() {
            run.asked.retain(|(asked, _)| *asked != no);
            run.ring.at(no).is = Is::Present;
            run.policy.answered(no, Answered::Present);
        }
        run.arrive();
        packets += 1;
        while run.step() {}
    }
    assert!(packets >= rounds - 8, "{packets} packets");
    assert_eq!((run.next_id, run.reported.len()), (0, packets));
    // The late answer means nothing.
    assert_eq!(run.asked, [(ChainNo(0), Need::Ahead)]);
    run.answer(Answers::Pages);
    assert!(!run.step());
}

#[test]
fn chains_that_are_used_before_their_answer_count_as_asked_until_then() {
    let mut run = one_absent(OnReceiveFault::Drop);
    run.ring.chains.clear();
    for no in 0..200 {
        run.ring.chains.push(chain(Is::Absent));
        run.arrive();
        while run.step() {}
        // Another one has brought it in.
        run.ring.at(ChainNo(no)).is = Is::Present;
        run.arrive();
        assert_eq!(run.ring.at(ChainNo(no)).used, Use::Used);
    }
    assert_eq!(run.asked.len(), ASKED_MAX);
    while !run.asked.is_empty() {
        run.answer(Answers::Pages);
    }
    run.ring.chains.push(chain(Is::Absent));
    run.arrive();
    while run.step() {}
    assert_eq!(run.asked, [(ChainNo(200), Need::Now)]);
}

#[test]
fn prefault_requests_pages_before_any_packet_and_no_more_than_its_limit() {
    for on_fault in ALL {
        let mut run = one_absent(on_fault);
        run.policy = policy(on_fault, Prefault::Posted);
        for _ in 0..100 {
            run.ring.chains.push(chain(Is::Absent));
        }
        // A step looks at a few, and there are some for each packet's turn.
        for _ in 0..100 {
            run.step();
        }
        assert!(run.asked.iter().all(|(_, need)| *need == Need::Ahead));
        let most = usize::try_from(AHEAD_MAX).unwrap();
        // Of the first chains 7 were present.
        assert_eq!(run.asked.len(), most - 7, "{on_fault:?}");
    }
}

#[test]
fn floor_wires_the_next_buffers_and_a_burst_of_as_many_waits_for_nothing() {
    for on_fault in ALL {
        let mut run = one_absent(on_fault);
        let config = ReceiveConfig {
            on_fault,
            prefault: Prefault::Off,
            wiring: Wiring::Floor { buffers: 4 },
            ..ReceiveConfig::default()
        };
        run.policy = Policy::new(&config, Merging::Mergeable);
        for chain in &mut run.ring.chains {
            chain.is = Is::Absent;
        }
        for _ in 0..20 {
            while run.step() {}
            run.answer(Answers::Pages);
        }
        let wired = |run: &Run| run.ring.chains.iter().filter(|c| c.wired).count();
        assert_eq!(wired(&run), 4, "{on_fault:?}");
        for _ in 0..4 {
            run.arrive();
        }
        assert_eq!(run.reported.len(), 4, "{on_fault:?}");
        assert_eq!((run.next_id, run.lost.len()), (0, 0), "{on_fault:?}");
    }
}
