// SPDX-License-Identifier: Apache-2.0
//! The kernel interfaces that Pagetide uses, behind safe functions.
//!
//! This is the only crate with `unsafe` code: each use is wrapped here once, as thinly as its
//! safety requirements allow. Three rules hold for all modules:
//!
//! - A regular answer of the kernel (`EEXIST`, `EAGAIN`, `ESRCH`, `ENOSPC`) is a named outcome,
//!   not an error.
//! - Only this crate turns numbers into addresses. Addresses of *another* process are
//!   [`Hva`](pagetide_addr::Hva); they are passed to the kernel and never dereferenced.
//! - Nothing here knows the meaning of a page: no words, no sections, no policy.
//!
//! | module | contents |
//! |---|---|
//! | [`uffd`] | userfaultfd: faults as messages, pages installed from outside |
//! | [`memory_file`] | the file behind guest RAM: presence, punching, reading |
//! | [`guest_ram`] | which files may be guest RAM, and what can be guaranteed of them |
//! | [`mapping`] | our own mapping of such a file |
//! | [`sigbus`] | surviving a mapping whose file shrinks |
//! | [`process`] | another process by pidfd; page-out, descriptors, same-memory |
//! | [`batches`] | pages that page-out would pass over |
//! | [`pagemap`] | which pages a process has mapped |
//! | [`page_idle`] | which page frames were used since they were marked |
//! | [`page_flags`] | page frames, and the folios that they are parts of |
//! | [`volatile`] | that mapping as volatile slices, for virtio |
//! | [`ptrace`] | remote system calls, run in one stopped thread of another process |
//! | [`lent`] | memory that a device of another process uses |
//! | [`interrupt`] | getting a thread of ours out of a blocking call |
//! | [`membarrier`] | a fence whose cost falls on one side |
//! | [`clock`] | the host's monotonic clock as a number |
//! | [`cpu`] | where this thread runs |
//! | [`pauses`] | between looks for what another process gives up |
//! | [`hurry`] | a time in which this process goes before others |
//! | [`event`] | an eventfd for the vhost crates |
//! | [`signal`] | an eventfd signalled without blocking |
//! | [`byte_lock`] | locks of single bytes, which belong to an open file |
//! | [`accounts`] | users and groups by name |
//! | [`file_ring`] | an io_uring for one file, which owns its buffers |
//! | [`socket`] | a Unix socket with one peer at a time |
//! | [`inherited`] | descriptors that outlive `exec` |
//! | [`net`] | interfaces of the host: TAPs, packet sockets |
//! | [`kept_signals`] | signals that wait until they are read, also over `exec` |

pub mod accounts;
pub mod batches;
pub mod byte_lock;
pub mod clock;
pub mod cpu;
#[cfg(test)]
mod emulated;
pub mod event;
pub mod file_ring;
pub mod guest_ram;
pub mod hurry;
pub mod inherited;
pub mod interrupt;
pub mod kept_signals;
pub mod lent;
pub mod mapping;
pub mod membarrier;
pub mod memory_file;
pub mod net;
pub mod page_flags;
pub mod page_idle;
pub mod pagemap;
pub mod pauses;
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

/// A length or offset as the type that indexes memory.
#[expect(
    clippy::cast_possible_truncation,
    reason = "64-bit targets only, see the compile_error above"
)]
pub(crate) const fn to_usize(value: u64) -> usize {
    value as usize
}
