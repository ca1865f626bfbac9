//! Pagetide sys.
