// SPDX-License-Identifier: Apache-2.0
//! The kernel as Pagetide uses it, behind safe functions.
//!
//! This is the one crate with `unsafe` code: whatever needs it is wrapped here
//! once, as thinly as its duties allow. Three rules hold for all modules:
//!
//! - What the kernel may answer in good order (`EEXIST`, `EAGAIN`, `ESRCH`,
//!   `ENOSPC`) is a named outcome, not an error.
//! - Numbers become addresses only here. Addresses of *another* process are
//!   [`Hva`](pagetide_addr::Hva); they are handed to the kernel and never
//!   dereferenced.
//! - Nothing here knows what a page is worth: no words, no sections, no policy.
//!
//! | module | what the kernel does there |
//! |---|---|
//! | [`uffd`] | userfaultfd: faults as messages, pages installed from outside |
//! | [`memory_file`] | the file behind guest RAM: presence, punching, reading |
//! | [`guest_ram`] | which files may be guest RAM, and what can be guaranteed of them |
//! | [`mapping`] | our own mapping of such a file |
//! | [`sigbus`] | a mapping whose file is cut short under us |
//! | [`process`] | another process by pidfd; page-out, descriptors, same-memory |
//! | [`pagemap`] | which pages a process has mapped |
//! | [`page_idle`] | which page frames were used since they were marked |
//! | [`page_flags`] | page frames, and the folios that they are parts of |
//! | [`volatile`] | that mapping as volatile slices, for virtio |
//! | [`ptrace`] | one thread of another process stopped, system calls run in it |
//! | [`lent`] | memory that a device of another process works on |
//! | [`interrupt`] | a thread of ours taken out of a call that waits |
//! | [`membarrier`] | a fence whose cost falls on one side |
//! | [`cpu`] | where this thread runs |
//! | [`event`] | an eventfd for the vhost crates |
//! | [`signal`] | an eventfd signalled without waiting for its owner |
//! | [`byte_lock`] | locks of single bytes, which belong to an open file |
//! | [`accounts`] | users and groups by name |
//! | [`socket`] | a Unix socket with one peer at a time |

pub mod accounts;
pub mod byte_lock;
pub mod cpu;
pub mod event;
pub mod guest_ram;
pub mod interrupt;
pub mod lent;
pub mod mapping;
pub mod membarrier;
pub mod memory_file;
pub mod page_flags;
pub mod page_idle;
pub mod pagemap;
mod presence;
pub mod process;
pub mod ptrace;
pub mod sigbus;
pub mod signal;
pub mod socket;
pub mod uffd;
pub mod volatile;

#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!("Pagetide runs on 64-bit Linux only");

/// A length or offset as the type memory is indexed with.
#[expect(
    clippy::cast_possible_truncation,
    reason = "64-bit targets only, see the compile_error above"
)]
pub(crate) const fn to_usize(value: u64) -> usize {
    value as usize
}
