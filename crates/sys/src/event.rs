// SPDX-License-Identifier: Apache-2.0
//! An eventfd as the vhost crates need it.
//!
//! Their `EventFd` can only be created from a number, which is unsafe because the number may belong
//! to another owner. An [`OwnedFd`] has exactly one owner.
#![expect(
    unsafe_code,
    reason = "vmm-sys-util takes an eventfd by its number only"
)]

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use vmm_sys_util::eventfd::EventFd;

/// Converts `event`, which should be an eventfd, for vhost's messages.
#[must_use]
pub fn for_vhost(event: OwnedFd) -> EventFd {
    // SAFETY: the number comes from a descriptor that was owned here and is given up, so the new
    // owner is the only one. If it is another kind of file, a read merely fails.
    unsafe { EventFd::from_raw_fd(event.into_raw_fd()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{EventfdFlags, eventfd};

    #[test]
    fn count_written_to_one_is_read_from_the_other() {
        let ours = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let theirs = for_vhost(ours.try_clone().unwrap());
        theirs.write(3).unwrap();
        let mut count = [0; 8];
        rustix::io::read(&ours, &mut count).unwrap();
        assert_eq!(u64::from_ne_bytes(count), 3);
    }
}
