// SPDX-License-Identifier: Apache-2.0
//! The loop, step by step.

use super::*;

const LIMIT: i64 = 100_000;

/// A VM that the loop is asked about, in virtual time.
struct Vm {
    decisions: ReclaimLoop,
    at: Situation,
}

impl Vm {
    /// One whose heat is known and whose headroom is `free_pages`.
    fn new(free_pages: i64) -> Self {
        let headroom = Headroom::Limited {
            limit_pages: LIMIT,
            free_pages,
        };
        let mut vm = Self {
            decisions: ReclaimLoop::new(4),
            at: Situation {
                now: Duration::from_secs(100),
                headroom,
                eviction: Eviction::Allowed,
                sweeps: SWEEPS_TO_KNOW,
                requested_pages: None,
                wanted_back: None,
                demotion_in: None,
            },
        };
        assert_eq!(vm.next(), Order::Wait(ROUND));
        vm
    }

    /// The next order; a wait takes its time.
    fn next(&mut self) -> Order {
        let order = self.decisions.next(&self.at);
        if let Order::Wait(time) | Order::Rest(time) = order {
            self.at.now += time;
        }
        order
    }

    /// The orders up to and including the next wait, but for those that are the same each time.
    /// `pass` says what each pass comes to.
    fn round(&mut self, pass: &PassReport<()>) -> Vec<Order> {
        let mut orders = Vec::new();
        loop {
            let order = self.next();
            if let Order::Evict(_) = order {
                self.decisions.passed(pass);
            }
            match order {
                Order::Wait(_) => return orders,
                Order::Poll | Order::CheckHazards | Order::Sample(_) => {}
                order => orders.push(order),
            }
            assert!(orders.len() < 1000, "{orders:?}");
        }
    }
}

fn pass(evicted_pages: u64) -> PassReport<()> {
    PassReport {
        evicted_pages,
        ..PassReport::default()
    }
}

/// The reach of each pass, in order, and `None` for each time that sections are tried again.
fn steps_of(orders: &[Order]) -> Vec<Option<Reach>> {
    let step = |order: &Order| match order {
        Order::Evict(order) => Some(Some(order.reach)),
        Order::TryAgain => Some(None),
        _ => None,
    };
    orders.iter().filter_map(step).collect()
}

fn steps(need: Need) -> Vec<Option<Reach>> {
    let step = |step| match step {
        Step::Take(reach) => Some(reach),
        Step::TryAgain => None,
    };
    passes(need).map(step).collect()
}

#[test]
fn reclaim_that_evicts_nothing_goes_through_all_steps_and_gives_up() {
    let mut vm = Vm::new(0);
    let orders = vm.round(&pass(0));
    assert_eq!(steps_of(&orders), steps(Need::Limit));
    assert_eq!(orders[0], Order::CorrectHeadroom);
    assert!(orders.contains(&Order::Finish(Need::Limit)));
    assert!(matches!(
        orders.last(),
        Some(Order::KeepReady { pages: 3000 })
    ));
}

#[test]
fn nothing_is_reclaimed_above_the_low_watermark_and_the_reserve_is_kept_once_a_second() {
    let mut vm = Vm::new(LIMIT * 2 / 100);
    let reserve = [Order::KeepReady { pages: 3000 }];
    assert_eq!(vm.round(&pass(0)), reserve);
    // A request came at once.
    vm.at.now -= ROUND;
    assert_eq!(vm.round(&pass(0)), []);
    assert_eq!(vm.round(&pass(0)), reserve);
}

#[test]
fn steps_left_out_are_trying_again_and_protected_sections_while_more_was_not_tried() {
    let mut reclaim = Reclaim::new(Need::Limit);
    let run = |reclaim: &Reclaim, free_pages| -> Vec<Step> {
        let headroom = Headroom::Limited {
            limit_pages: LIMIT,
            free_pages,
        };
        let is_run = |step: &Step| !reclaim.is_left_out(*step, headroom);
        passes(Need::Limit).filter(is_run).collect()
    };
    let all: Vec<_> = passes(Need::Limit).collect();
    assert_eq!(run(&reclaim, 0), all);
    let protected = Step::Take(Reach::Protected);
    let others: Vec<_> = (all.iter().copied())
        .filter(|step| *step != protected)
        .collect();
    assert!(others.len() < all.len() && others.contains(&Step::TryAgain));
    assert_eq!(run(&reclaim, LIMIT), others);
    reclaim.has_more = true;
    let resting = [Step::Take(Reach::ColdOnly), Step::Take(Reach::AllResting)];
    for free_pages in [0, LIMIT] {
        let steps = run(&reclaim, free_pages);
        assert_eq!(&steps[..2], resting);
        assert!(steps.iter().all(|step| resting.contains(step)));
    }
}

#[test]
fn trying_again_and_protected_sections_wait_while_there_is_more_that_was_not_tried() {
    let mut vm = Vm::new(0);
    let mut seen = Vec::new();
    // Each pass has some time only; there is an end to that, since others fill.
    while seen.len() < 50 {
        let order = vm.next();
        if let Order::Evict(order) = order {
            seen.push(order.reach);
            vm.decisions.passed(&PassReport::<()> {
                has_more: true,
                ..pass(1)
            });
        }
        assert_ne!(order, Order::TryAgain);
    }
    assert!(seen.iter().all(|reach| *reach == Reach::ColdOnly));
}

#[test]
fn protected_sections_are_evicted_below_the_low_watermark_only_and_never_for_a_request() {
    let mut vm = Vm::new(LIMIT * 2 / 100);
    vm.at.requested_pages = Some(10);
    let mut orders = Vec::new();
    loop {
        let order = vm.next();
        orders.push(order);
        match order {
            Order::Evict(_) => vm.decisions.passed(&pass(0)),
            Order::Finish(Need::Wish) => break,
            _ => {}
        }
    }
    let mut expected = vec![None];
    expected.extend(steps(Need::Wish));
    assert_eq!(steps_of(&orders), expected);
    assert!(!steps(Need::Wish).contains(&Some(Reach::Protected)));

    // Fills are served meanwhile, so that there is a little headroom when their turn comes.
    let mut vm = Vm::new(0);
    let mut reaches = Vec::new();
    loop {
        match vm.next() {
            Order::Evict(order) => {
                reaches.push(order.reach);
                vm.decisions.passed(&pass(0));
                vm.at.headroom = Headroom::Limited {
                    limit_pages: LIMIT,
                    free_pages: LIMIT * 2 / 100,
                };
            }
            Order::Finish(_) => break,
            _ => {}
        }
    }
    assert!(!reaches.contains(&Reach::Protected) && reaches.len() > 2);
}

#[test]
fn pass_that_unmapped_sections_is_repeated_when_they_have_aged() {
    let mut vm = Vm::new(0);
    while !matches!(vm.next(), Order::Evict(_)) {}
    vm.decisions.passed(&PassReport::<()> {
        rests: true,
        ..pass(0)
    });
    assert_eq!(vm.next(), Order::Rest(UNMAPPED_MIN));
    // That took as long as a check for hazards is fresh.
    assert_eq!(vm.next(), Order::CheckHazards);
    let Order::Evict(order) = vm.next() else {
        panic!("the same pass again");
    };
    assert_eq!(order.reach, Reach::ColdOnly);
    assert_eq!(order.until, vm.at.now + HAZARDS_HOLD);
    assert_eq!((order.pages, order.helpers), (3000, 0));
}

#[test]
fn large_passes_have_helpers_unless_they_take_protected_sections() {
    let mut vm = Vm::new(-LIMIT);
    let mut seen = Vec::new();
    while seen.len() < 3 {
        if let Order::Evict(order) = vm.next() {
            seen.push((order.reach, order.helpers));
            vm.decisions.passed(&pass(0));
        }
    }
    let expected = [
        (Reach::ColdOnly, 4),
        (Reach::AllResting, 4),
        (Reach::Protected, 0),
    ];
    assert_eq!(seen, expected);
}

#[test]
fn first_reclaim_learns_in_two_sweeps_but_not_for_ever() {
    let mut vm = Vm::new(0);
    vm.at.sweeps = 0;
    let mut sweeps = 0;
    loop {
        match vm.next() {
            Order::Sweep { until } => {
                assert_eq!(until, Duration::from_secs(101) + LEARNING_MAX);
                assert_eq!(vm.next(), Order::Rest(LEARNING_REST));
                sweeps += 1;
                vm.at.sweeps = sweeps;
            }
            Order::CorrectHeadroom => break,
            _ => {}
        }
    }
    assert_eq!(sweeps, SWEEPS_TO_BEGIN);
    // Sweeps that get nowhere do not keep fills waiting.
    let mut vm = Vm::new(0);
    vm.at.sweeps = 0;
    while !matches!(vm.next(), Order::Sweep { .. }) {}
    vm.at.now += LEARNING_MAX;
    assert_eq!(vm.next(), Order::Rest(LEARNING_REST));
    assert_eq!(vm.next(), Order::CorrectHeadroom);
}

#[test]
fn blocked_eviction_refuses_requests_and_a_suspension_ends_after_its_time() {
    let mut vm = Vm::new(0);
    vm.at.eviction = Eviction::Blocked;
    vm.at.requested_pages = Some(10);
    let suspended_at = vm.at.now;
    vm.decisions.suspended(suspended_at);
    let ended_at = loop {
        let orders = vm.round(&pass(0));
        match orders[..] {
            [Order::RefuseRequests] => {}
            [Order::EndSuspension, Order::RefuseRequests] => break vm.at.now - ROUND,
            _ => panic!("{orders:?}"),
        }
    };
    assert_eq!(ended_at, suspended_at + SUSPENSION);
}

#[test]
fn blocker_that_comes_up_between_two_passes_ends_the_reclaim() {
    let mut vm = Vm::new(0);
    while !matches!(vm.next(), Order::Evict(_)) {}
    vm.decisions.passed(&pass(1));
    vm.at.eviction = Eviction::Blocked;
    assert_eq!(vm.next(), Order::Finish(Need::Limit));
}

#[test]
fn check_that_takes_as_long_as_it_holds_is_made_once_and_eviction_goes_on() {
    for check in [
        HAZARDS_HOLD / 2,
        HAZARDS_HOLD - HAZARDS_HOLD / 4,
        3 * HAZARDS_HOLD,
    ] {
        let mut vm = Vm::new(0);
        let (mut passes, mut before) = (0, None);
        for _ in 0..1000 {
            let order = vm.next();
            assert!(
                order != Order::CheckHazards || before != Some(order),
                "{check:?}"
            );
            match order {
                Order::CheckHazards | Order::Poll => vm.at.now += check,
                Order::Evict(_) => {
                    passes += 1;
                    vm.decisions.passed(&pass(0));
                }
                Order::Finish(_) => break,
                _ => {}
            }
            before = Some(order);
        }
        assert!(passes > 0, "{check:?}");
        assert_eq!(vm.decisions.need(), None, "{check:?}");
    }
}

#[test]
fn loop_that_goes_on_after_its_end_looks_at_once() {
    let mut vm = Vm::new(LIMIT);
    assert_eq!(vm.next(), Order::Poll);
    vm.decisions.ended();
    assert_eq!(vm.next(), Order::Wait(ROUND));
    assert_eq!(vm.next(), Order::Poll);
}

#[test]
fn heat_is_wanted_by_how_near_the_limit_is() {
    let mut vm = Vm::new(0);
    let mut want = |headroom, sweeps| {
        vm.at.headroom = headroom;
        vm.at.sweeps = sweeps;
        super::want(&vm.at)
    };
    let limited = |free_pages| Headroom::Limited {
        limit_pages: LIMIT,
        free_pages,
    };
    assert_eq!(want(limited(0), 9), Want::Pressed);
    assert_eq!(want(limited(LIMIT / 2), 9), Want::Much);
    assert_eq!(want(Headroom::Unlimited, SWEEPS_TO_KNOW - 1), Want::First);
    assert_eq!(want(Headroom::Unlimited, SWEEPS_TO_KNOW), Want::Little);
}

/// The orders of a hold in `orders`, as letters: **H**old, **T**ry again, **R**elease, **r**est, and the
/// first letter of each pass's reach.
fn letters(orders: &[Order]) -> String {
    let letter = |order: &Order| match order {
        Order::Hold(_) => Some('H'),
        Order::Release => Some('R'),
        Order::Rest(_) => Some('r'),
        Order::TryAgain => Some('T'),
        Order::Evict(EvictOrder { reach, .. }) => Some(match reach {
            Reach::ColdOnly => 'C',
            Reach::AllResting => 'A',
            Reach::Protected => 'P',
        }),
        _ => None,
    };
    orders.iter().filter_map(letter).collect()
}

#[test]
fn vm_over_its_limit_is_held_once_a_reclaim_that_evicts_nothing_is_over() {
    let mut vm = Vm::new(-1);
    let orders = vm.round(&pass(0));
    assert!(orders.contains(&Order::Hold(HOLD_MAX)));
    assert!(
        letters(&orders).ends_with("TrCAPTHAPR"),
        "{}",
        letters(&orders)
    );
    let finish = orders
        .iter()
        .position(|order| *order == Order::Finish(Need::Limit));
    let release = orders.iter().position(|order| *order == Order::Release);
    assert_eq!(finish, release.map(|at| at + 1));
    // Again only after a while.
    let mut rounds = 0;
    let began = vm.at.now;
    while !vm.round(&pass(0)).contains(&Order::Release) {
        rounds += 1;
        assert!(rounds < 10);
    }
    assert!(
        rounds >= 1 && vm.at.now - began >= ROUND,
        "after {rounds} rounds"
    );
}

#[test]
fn vm_is_not_held_below_its_limit_for_a_request_or_while_eviction_has_some_effect() {
    let never = |orders: &[Order]| !orders.iter().any(|order| matches!(order, Order::Hold(_)));
    let mut below = Vm::new(0);
    assert!(never(&below.round(&pass(0))));
    let mut useful = Vm::new(-1);
    // 17 passes that evict some: well above a sixteenth of the 3,001 pages.
    assert!(never(&useful.round(&pass(20))));
    let mut asked = Vm::new(LIMIT);
    asked.at.requested_pages = Some(1000);
    assert_eq!(asked.next(), Order::Poll);
    let mut orders = Vec::new();
    while orders.last() != Some(&Order::Finish(Need::Wish)) {
        let order = asked.next();
        if let Order::Evict(_) = order {
            asked.decisions.passed(&pass(0));
        }
        orders.push(order);
        assert!(orders.len() < 100, "{orders:?}");
    }
    assert!(never(&orders));
}

#[test]
fn held_vm_is_released_in_time_and_before_anything_ends_the_reclaim() {
    /// How a hold is cut short.
    #[derive(Clone, Copy, PartialEq)]
    enum End {
        Time,
        Enough,
        Blocked,
        Stopped,
    }
    for end in [End::Time, End::Enough, End::Blocked, End::Stopped] {
        let mut vm = Vm::new(-1);
        let mut is_held = None;
        let mut passes = 0;
        loop {
            let order = vm.next();
            match order {
                Order::Hold(time) => is_held = Some(vm.at.now + time),
                Order::Release => break,
                Order::Finish(_) => assert!(is_held.is_none(), "ended while held"),
                Order::Wait(_) => assert!(is_held.is_none(), "waits while held"),
                Order::Evict(order) if is_held.is_some() => {
                    passes += 1;
                    // This pass finds work for ever, and takes its time.
                    vm.at.now = order.until;
                    let mut report = pass(1);
                    report.has_more = true;
                    match end {
                        End::Time => {}
                        End::Enough => vm.at.headroom = of_free(LIMIT),
                        End::Blocked => vm.at.eviction = Eviction::Blocked,
                        End::Stopped => report.stopped = Some(()),
                    }
                    vm.decisions.passed(&report);
                }
                Order::Evict(_) => vm.decisions.passed(&pass(0)),
                _ => {}
            }
        }
        let until = is_held.expect("it was held");
        // The pass under way is finished, and takes no longer than a hazard check holds.
        assert!(vm.at.now <= until + HAZARDS_HOLD, "{} passes", passes);
        assert_eq!(passes > 1, end == End::Time);
        assert_eq!(vm.next(), Order::Finish(Need::Limit));
    }
}

fn of_free(free_pages: i64) -> Headroom {
    Headroom::Limited {
        limit_pages: LIMIT,
        free_pages,
    }
}

#[test]
fn full_store_is_searched_for_zeros_once_and_less_often_as_long_as_there_are_none() {
    let mut vm = Vm::new(0);
    vm.decisions.set_content(Content::Refused);
    let searched = [Some(Reach::ColdOnly), Some(Reach::AllResting)];
    let mut rests = Vec::new();
    let mut last = vm.at.now;
    for evicted in [0, 0, 0, 0, 0, 0, 7, 0] {
        let found = (0..1_000).find_map(|_| {
            let orders = vm.round(&pass(evicted));
            let has_reserve = |order: &Order| matches!(order, Order::KeepReady { .. });
            assert!(!orders.iter().any(has_reserve), "{orders:?}");
            (!orders.is_empty()).then_some(orders)
        });
        let orders = found.expect("it searches again and again");
        assert_eq!(steps_of(&orders), searched);
        assert!(orders.contains(&Order::Finish(Need::Limit)));
        rests.push((vm.at.now - last).as_secs());
        last = vm.at.now;
    }
    assert!(rests[1] >= SUSPENSION.as_secs() && rests[1] < rests[2] && rests[2] < rests[3]);
    let most = ZEROS_REST_MAX.as_secs();
    assert!((most..most + 2).contains(&rests[6]), "{rests:?}");
    assert!(rests[7] < rests[1] + 2, "{rests:?}");
    vm.decisions.set_content(Content::Taken);
    assert_eq!(steps_of(&vm.round(&pass(0))), steps(Need::Limit));
}

fn with_spare(spare_pages: i64) -> Vm {
    let mut vm = Vm::new(LIMIT * 6 / 100 + spare_pages);
    vm.at.wanted_back = Some(Wanted::Ahead);
    vm
}

#[test]
fn what_was_in_use_lately_comes_back_in_turns_into_spare_memory_by_whole_sections() {
    for (spare, pages) in [(511, None), (512, Some(512)), (1500, Some(1024))] {
        let mut vm = with_spare(spare);
        let wanted = Wanted::Ahead;
        let expected: Vec<Order> = (pages.iter())
            .map(|pages| Order::SwapIn {
                wanted,
                pages: *pages,
            })
            .collect();
        assert_eq!(vm.round(&pass(0)), expected, "{spare} spare");
    }
    let mut vm = with_spare(0);
    vm.at.headroom = Headroom::Unlimited;
    assert_eq!(vm.round(&pass(0)).len(), 1);
    vm.at.eviction = Eviction::Blocked;
    vm.at.now += ROUND;
    assert_eq!(vm.round(&pass(0)), [Order::RefuseRequests]);
}

#[test]
fn turns_follow_one_another_while_pages_come_back_and_a_round_apart_after_one_in_vain() {
    let mut vm = with_spare(5000);
    for (filled, rest) in [(1024, TURN), (1, TURN), (0, ROUND), (0, ROUND), (7, TURN)] {
        let began = vm.at.now;
        assert_eq!(vm.round(&pass(0)).len(), 1);
        vm.decisions.swapped_in(filled);
        // The wait that the round ended with was decided before.
        vm.at.now = began + rest / 2;
        assert_eq!(vm.round(&pass(0)), []);
        vm.at.now = began + rest;
    }
    // Nothing is wanted any more.
    vm.at.wanted_back = None;
    assert_eq!(vm.round(&pass(0)), []);
    let mut next = || vm.next();
    let is_wait = |order: &Order| matches!(order, Order::Wait(_));
    let wait = std::iter::repeat_with(&mut next).find(is_wait);
    assert_eq!(wait, Some(Order::Wait(ROUND)));
}

#[test]
fn what_was_evicted_together_comes_back_down_to_the_low_watermark_and_a_reclaim_goes_first() {
    let mut vm = Vm::new(LIMIT * 15 / 1000 + 600);
    let wanted = Wanted::Together;
    vm.at.wanted_back = Some(wanted);
    let orders = vm.round(&pass(0));
    assert_eq!(orders.last(), Some(&Order::SwapIn { wanted, pages: 512 }));
    let mut vm = Vm::new(LIMIT / 100);
    vm.at.wanted_back = Some(wanted);
    let is_swap_in = |order: &Order| matches!(order, Order::SwapIn { .. });
    assert!(!vm.round(&pass(0)).iter().any(is_swap_in));
}

#[test]
fn section_that_stayed_cold_is_demoted_when_its_time_has_come_and_not_while_eviction_is_blocked() {
    let mut vm = Vm::new(LIMIT / 2);
    vm.at.demotion_in = Some(Duration::from_millis(200));
    assert_eq!(vm.round(&pass(0)), []);
    assert_eq!(
        vm.at.now,
        Duration::from_secs(101) + Duration::from_millis(200)
    );
    vm.at.demotion_in = Some(Duration::ZERO);
    assert_eq!(vm.round(&pass(0)), [Order::Demote]);
    assert_eq!(
        vm.at.now,
        Duration::from_secs(101) + Duration::from_millis(200) + demotion::TURN
    );
    vm.at.demotion_in = Some(Duration::from_secs(600));
    assert_eq!(vm.round(&pass(0)), []);
    vm.at.demotion_in = Some(Duration::ZERO);
    vm.at.eviction = Eviction::Blocked;
    let before = vm.at.now;
    assert_eq!(vm.round(&pass(0)), [Order::RefuseRequests]);
    assert_eq!(vm.at.now, before + ROUND);
}
