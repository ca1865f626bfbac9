//! Pagetide vmm.
