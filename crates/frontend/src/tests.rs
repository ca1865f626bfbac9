// SPDX-License-Identifier: Apache-2.0
//! The ring without a back end: the test does what a device does.

use super::*;
use pagetide_sys::memory_file::GuestFile;
use std::os::fd::AsFd;

const BYTES: u64 = 1 << 20;
const BASE: u64 = 0x4_0000;
const READ: Request = Request {
    direction: Direction::Read,
    sector: 8,
    data: 0,
    bytes: 4096,
};

fn disk() -> (Arc<SharedMapping>, Disk) {
    let file = GuestFile::new_memfd("disk", BYTES).unwrap();
    let ram = Arc::new(SharedMapping::new(file.as_fd(), BYTES).unwrap());
    let file = file.as_fd().try_clone_to_owned().unwrap();
    let disk = Disk::new(Arc::clone(&ram), file, BASE, Path::new("/nowhere"));
    (ram, disk.unwrap())
}

/// The device says that `head` is done, as its `number`th.
fn answer(ram: &SharedMapping, number: u16, head: u32, status: u8) {
    let slot = u64::from(head) / u64::from(DESCRIPTORS_A_SLOT);
    let at = BASE + FIRST_SLOT + slot * SLOT_BYTES + STATUS_IN_SLOT;
    if slot < u64::from(SLOTS) {
        ram.copy_to(at, &[status]).unwrap();
    }
    let place = u64::from(number % QUEUE_SIZE);
    ram.copy_to(BASE + USED + 4 + 8 * place, &head.to_le_bytes())
        .unwrap();
    ram.copy_to(BASE + USED + 2, &(number + 1).to_le_bytes())
        .unwrap();
}

#[test]
fn requests_are_begun_once_and_done_once_in_any_order() {
    let (ram, mut disk) = disk();
    assert!(disk.has_hung_up());
    assert!(disk.connect().is_err());
    for slot in 0..3 {
        disk.begin(slot, &READ).unwrap();
    }
    assert!(matches!(
        disk.begin(1, &READ),
        Err(FrontendError::NotFree(1))
    ));
    assert!(matches!(
        disk.begin(SLOTS, &READ),
        Err(FrontendError::NotFree(SLOTS))
    ));
    assert_eq!((disk.under_way(), disk.take_done().unwrap()), (3, None));
    answer(&ram, 0, 6, 0);
    answer(&ram, 1, 0, 1);
    assert_eq!(disk.take_done().unwrap(), Some((2, Outcome::Done)));
    assert_eq!(disk.take_done().unwrap(), Some((0, Outcome::Failed(1))));
    assert_eq!((disk.under_way(), disk.take_done().unwrap()), (1, None));
    assert!(disk.is_free(0) && disk.is_free(2) && !disk.is_free(1));
}

#[test]
fn what_was_not_asked_for_or_is_done_twice_is_told() {
    for head in [3, 1, 48, u32::MAX] {
        let (ram, mut disk) = disk();
        disk.begin(0, &READ).unwrap();
        answer(&ram, 0, head, 0);
        assert!(
            matches!(disk.take_done(), Err(FrontendError::NotAsked(..))),
            "{head}"
        );
    }
    let (ram, mut disk) = disk();
    disk.begin(0, &READ).unwrap();
    answer(&ram, 0, 0, 0);
    answer(&ram, 1, 0, 0);
    assert_eq!(disk.take_done().unwrap(), Some((0, Outcome::Done)));
    assert!(matches!(
        disk.take_done(),
        Err(FrontendError::NotAsked(0, 2))
    ));
}

#[test]
fn ring_goes_round() {
    let (ram, mut disk) = disk();
    for number in 0..3 * QUEUE_SIZE {
        let slot = number % SLOTS;
        disk.begin(slot, &READ).unwrap();
        answer(&ram, number, u32::from(slot * DESCRIPTORS_A_SLOT), 0);
        assert_eq!(disk.take_done().unwrap(), Some((slot, Outcome::Done)));
    }
}
