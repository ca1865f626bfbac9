//! Pagetide vpri.
