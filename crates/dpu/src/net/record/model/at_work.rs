// SPDX-License-Identifier: Apache-2.0
//! A driver that is at work while a successor takes over.

use super::*;

/// A ring whose driver posts while it is looked at: the index is read once before that.
struct AtWork {
    first_index: Cell<Option<u16>>,
    now: Memory,
}

impl Ring for AtWork {
    fn used_index(&self) -> u16 {
        self.now.used_index()
    }

    fn used_head(&self, index: u16) -> u32 {
        self.now.used_head(index)
    }

    fn avail_index(&self) -> u16 {
        let first = self.first_index.take();
        first.unwrap_or(self.now.avail_index)
    }

    fn avail_head(&self, index: u16) -> u16 {
        self.now.avail_head(index)
    }

    fn descriptor(&self, head: u16) -> [u8; 16] {
        self.now.descriptor(head)
    }
}

#[test]
fn driver_that_posts_during_a_take_over_gets_back_what_it_has_not_got_and_no_more() {
    let mut random = SplitMix64::new(31);
    let mut with_held = 0;
    for _ in 0..20_000 {
        let mut world = World::new(4, 0xfffd);
        for _ in 0..random.below(24) {
            let events = world.events();
            assert!(world.apply(events[random.index(events.len())], STEPS_MAX));
        }
        let first_index = world.memory.avail_index;
        for _ in 0..random.below(5) {
            let free = (0..4).find(|head| world.is_drivers(*head));
            if let Some(head) = free {
                world.apply(Event::Post(head), STEPS_MAX);
            }
        }
        let mut now = world.memory.clone();
        // One more is written, and not counted yet.
        if let Some(head) = (0..4).find(|head| world.is_drivers(*head)) {
            now.avail[usize::from(now.avail_index % now.size)] = head;
        }
        with_held += usize::from(!world.engine.held.is_empty());
        let ring = AtWork {
            first_index: Cell::new(Some(first_index)),
            now,
        };
        let cells = Cells::of(world.words.clone());
        let (_, left) = HeldRecord::take_over(cells, &tie(4), &ring).expect("the same ring");
        world.check(&left);
    }
    assert!(with_held > 5_000, "{with_held} with buffers held");
}
