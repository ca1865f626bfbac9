//! Pagetide dpu.
