// SPDX-License-Identifier: Apache-2.0
//! How the programs `pagetide` and `pagetide-lab` speak to people: reports as text or JSON, sizes with
//! units, progress of long work, and the exit status.

pub mod outcome;
pub mod progress;
pub mod size;
pub mod text;
