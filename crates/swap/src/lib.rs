//! Pagetide swap.
