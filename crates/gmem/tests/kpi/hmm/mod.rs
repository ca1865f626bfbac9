// SPDX-License-Identifier: Apache-2.0
//! Linux's self-tests of heterogeneous memory (`selftests/mm/hmm-tests.c`), under their own names.
//!
//! There a driver mirrors a process: a command reads or writes a buffer by the
//! device, migrates it to the device's memory, or looks at what the device has
//! mapped. Each test asserts bytes and two counts, which are kept here:
//! `faults`, how often a command had to stop and ask (for all that is left of
//! its buffer), and `cpages`, how many pages it went over or moved. A process is
//! an [`AddressSpace`] here, the CPU a device like the other.
//!
//! Of the 38 tests these 27 are here. The other 11 are not:
//! | tests | why |
//! |---|---|
//! | anon_write_child, anon_write_child_shared, exclusive_cow, hmm_cow_in_device | a space is not forked and has no copy on write |
//! | migrate_shared, anon_write_hugetlbfs, mixedmap, migrate_file_private | kinds of `mmap` (shared memory, hugetlbfs, a driver's mixed map, a private file) that a space does not have |
//! | migrate_remap_fault | a region does not change its addresses (`mremap`) |
//! | migrate_anon_huge_free | nothing is freed lazily (`MADV_FREE`) |
//! | benchmark_thp_migration | a benchmark |
//!
//! Where the original has one huge page (anon_write_huge, migrate_anon_huge_*)
//! the buffer is as long and aligned as one; faults bring it in pages of 4 KiB.

mod buffers;
mod devices;
mod migration;
mod mirror;
